"""A kernel is compiled once: later loads come from memory, later processes from disk, and damage is survived."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime import CompileError, CompilerMissingError, KernelCache, Progress, native, store
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import BrokenSpec, CrashingSpec, TinyConfig, TinySpec, tiny_specs

SPEC = tiny_specs(1)[0]

LOAD = """
import sys, pathlib
from cute_kernels.runtime import KernelCache
from tests.runtime.tiny import tiny_specs
function, source = KernelCache(pathlib.Path(sys.argv[1])).load_from(tiny_specs(1)[0], "sm_90a")
print(source)
"""


def entry_folder(directory: Path) -> Path:
    return store.DiskStore(directory).folder(store.key_of(SPEC, ARCH))


def test_the_order_is_memory_then_disk_then_compiler(tmp_path: Path):
    cache = KernelCache(tmp_path)
    function, source = cache.load_from(SPEC, ARCH)
    assert source == "compiled"
    assert cache.load_from(SPEC, ARCH) == (function, "memory")
    assert KernelCache(tmp_path).load_from(SPEC, ARCH)[1] == "disk"


def test_the_function_is_raw_and_checks_its_arguments(warm_cache: KernelCache):
    function = warm_cache.load(SPEC, ARCH)
    assert type(function).__module__.startswith("tvm_ffi")
    with pytest.raises(ValueError, match=r"argument #0 .*device_type=cuda"):
        function(torch.zeros(8), torch.zeros(8))


def test_an_entry_says_what_it_was_made_of(warm_directory: Path):
    record = json.loads((entry_folder(warm_directory) / "entry.json").read_text())
    key = record["key"]
    assert key["config"] == {"scale": 1.0, "smem_floats": 128}
    assert (key["family"], key["arch"], key["nvidia-cutlass-dsl"]) == ("tiny", ARCH, native.dsl_version())
    assert len(key["sources"]) == 64


def test_the_key_follows_the_settings_that_change_the_code(monkeypatch: pytest.MonkeyPatch):
    plain = store.key_of(SPEC, ARCH)
    assert plain != store.key_of(SPEC, "sm_100a")
    assert plain != store.key_of(TinySpec(TinyConfig(scale=9.0)), ARCH)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert plain != store.key_of(SPEC, ARCH)
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    with native.having(dsl_version=lambda: "4.9.0"):
        assert plain != store.key_of(SPEC, ARCH)


def replace(path: Path, content: bytes) -> None:
    """A new file in the old one's place: writing into a library that this process has mapped would kill it."""
    path.unlink()
    path.write_bytes(content)


def damage_object(folder: Path) -> None:
    content = bytearray((folder / "kernel.o").read_bytes())
    content[len(content) // 2] ^= 1
    replace(folder / "kernel.o", bytes(content))


def truncate_library(folder: Path) -> None:
    replace(folder / "kernel.so", (folder / "kernel.so").read_bytes()[:-100])


def empty_record(folder: Path) -> None:
    replace(folder / "entry.json", b"")


def lose_a_file(folder: Path) -> None:
    (folder / "kernel.o").unlink()


def swap_record(folder: Path) -> None:
    record = json.loads((folder / "entry.json").read_text())
    record["key"]["config"]["scale"] = 7.0
    (folder / "entry.json").write_text(json.dumps(record))


@pytest.mark.parametrize("damage", [damage_object, truncate_library, empty_record, lose_a_file, swap_record])
def test_a_damaged_entry_is_quarantined_and_rebuilt(tmp_path: Path, damage: Callable[[Path], None]):
    KernelCache(tmp_path).load(SPEC, ARCH)
    damage(entry_folder(tmp_path))
    with pytest.warns(RuntimeWarning, match="damaged kernel cache entry .* rebuilding"):
        assert KernelCache(tmp_path).load_from(SPEC, ARCH)[1] == "compiled"
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert KernelCache(tmp_path).load_from(SPEC, ARCH)[1] == "disk"


def test_an_entry_that_does_not_load_is_rebuilt(tmp_path: Path):
    """Complete by its checksums, and still no library: written so by a faulty linker, say."""
    cache = KernelCache(tmp_path)
    cache.load(SPEC, ARCH)
    folder = entry_folder(tmp_path)
    replace(folder / "kernel.so", b"not a library")
    record = json.loads((folder / "entry.json").read_text())
    record["sha256"]["kernel.so"] = hashlib.sha256(b"not a library").hexdigest()
    (folder / "entry.json").write_text(json.dumps(record))
    with pytest.warns(RuntimeWarning, match="does not load"):
        assert KernelCache(tmp_path).load_from(SPEC, ARCH)[1] == "compiled"


def test_without_a_linker_the_object_is_loaded_by_the_compiler(tmp_path: Path):
    with native.having(linkers=()):
        assert KernelCache(tmp_path).load_from(SPEC, ARCH)[1] == "compiled"
        assert sorted(path.name for path in entry_folder(tmp_path).iterdir()) == ["entry.json", "kernel.o"]
        function, source = KernelCache(tmp_path).load_from(SPEC, ARCH)
    assert source == "disk"
    with pytest.raises(ValueError, match="device_type=cuda"):
        function(torch.zeros(8), torch.zeros(8))


def test_a_directory_that_cannot_be_written_costs_one_warning_and_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        assert cache.load_from(SPEC, ARCH)[1] == "compiled"
        assert cache.load_from(tiny_specs(2)[1], ARCH)[1] == "compiled"
    assert len([w for w in caught if "cannot be written" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load_from(SPEC, ARCH)[1] == "memory"
        assert len(cache.load_many(tiny_specs(3), ARCH, jobs=1)) == 3


def test_many_kernels_compile_in_worker_processes(tmp_path: Path):
    specs = tiny_specs(3)
    seen: list[Progress] = []
    cache = KernelCache(tmp_path)
    functions = cache.load_many([*specs, specs[0]], ARCH, jobs=2, progress=seen.append)
    assert len(functions) == 4 and functions[0] is functions[3]
    assert [item.done for item in seen] == [1, 2, 3, 4] and {item.total for item in seen} == {4}
    assert sorted(item.source for item in seen) == ["compiled", "compiled", "compiled", "memory"]
    assert [KernelCache(tmp_path).load_from(spec, ARCH)[1] for spec in specs] == ["disk"] * 3


def test_failures_are_named_after_the_others_are_done(tmp_path: Path):
    cache = KernelCache(tmp_path)
    with pytest.raises(CompileError, match="cannot compile for sm_90a") as caught:
        cache.load_many([BrokenSpec(), CrashingSpec(), SPEC], ARCH, jobs=1)
    failures = caught.value.failures
    assert set(failures) == {BrokenSpec(), CrashingSpec()}
    assert "status 7" in failures[CrashingSpec()]
    assert cache.load_from(SPEC, ARCH)[1] == "disk"


def test_jobs_must_be_positive(tmp_path: Path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        KernelCache(tmp_path).load_many([SPEC], ARCH, jobs=0)


def test_an_error_of_the_kernel_reaches_the_caller_and_stores_nothing(tmp_path: Path):
    with pytest.raises(ArithmeticError, match="cannot compile"):
        KernelCache(tmp_path).load(BrokenSpec(), ARCH)
    assert store.DiskStore(tmp_path).entries() == []


def test_without_the_compiler_a_missing_kernel_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(CompilerMissingError, match=r"tiny_\w+ is in no cache .* needs nvidia-cutlass-dsl"):
        KernelCache(tmp_path).load(SPEC, ARCH)


def test_of_two_processes_one_compiles_and_the_other_waits(tmp_path: Path, python: Callable):
    processes = [python(LOAD, str(tmp_path)) for _ in range(2)]
    outcomes = sorted(process.communicate(timeout=600)[0].strip() for process in processes)
    assert outcomes == ["compiled", "disk"]


def test_a_second_process_starts_without_the_compiler(warm_directory: Path, output_of: Callable):
    """Beside PyTorch it imports little, which takes half a second; the compiler alone would take another one."""
    program = """
import sys, pathlib
import torch
before = set(sys.modules)
from cute_kernels.runtime import KernelCache
from tests.runtime.tiny import tiny_specs
function, source = KernelCache(pathlib.Path(sys.argv[1])).load_from(tiny_specs(1)[0], "sm_90a")
print(source, *{name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)
"""
    source, *imported = output_of(program, str(warm_directory)).split()
    assert source == "disk"
    own = {"cute_kernels", "layouts", "tensor_layouts", "tests"}
    assert {name for name in imported if not name.startswith("_")} - own <= {"numpy", "tvm_ffi"}


STALE = """
from dataclasses import dataclass
from tests.runtime.tiny import TinySpec

@dataclass(frozen=True)
class Spec(TinySpec):
    def compile(self, arch):
        return super().compile(arch)
"""

LOAD_STALE = """
import sys, pathlib
from cute_kernels.runtime import KernelCache
from stale_family import Spec
print(*(KernelCache(pathlib.Path(sys.argv[1])).load_from(Spec(), "sm_90a")[1] for _ in range(2)))
"""


def test_an_edited_source_is_compiled_anew(tmp_path: Path, output_of: Callable):
    family, cache = tmp_path / "family", tmp_path / "cache"
    family.mkdir()
    source = family / "stale_family.py"
    source.write_text(STALE)
    os.utime(source, (1, 1))
    assert output_of(LOAD_STALE, str(cache), path=family) == "compiled disk"
    source.write_text(STALE.replace("return super()", "print(end='')\n        return super()"))
    os.utime(source, (1, 1))
    assert output_of(LOAD_STALE, str(cache), path=family) == "compiled disk"


def test_nothing_is_stored_from_sources_that_changed_under_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fresh_family.py").write_text(STALE)  # newer than this process
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.import_module("fresh_family").Spec()
    cache = KernelCache(tmp_path / "cache")
    with pytest.warns(RuntimeWarning, match="changed after this process started"):
        assert cache.load_from(spec, ARCH)[1] == "compiled"
    assert cache.store.entries() == []


def test_clearing_removes_entries_and_nothing_else(tmp_path: Path):
    KernelCache(tmp_path).load(SPEC, ARCH)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("mine too")
    assert len(store.DiskStore(tmp_path).entries()) == 1
    assert store.DiskStore(tmp_path).clear() == 1
    assert store.DiskStore(tmp_path).entries() == []
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "photos" / "me.jpg").exists()


def test_symbols_of_any_length_have_places_of_their_own(tmp_path: Path):
    """A step in one launch is named after attention and append: 243 characters with K and V apart and all options."""
    disk = store.DiskStore(tmp_path)
    keys = [store.Key("tiny", 250 * "x", content) for content in ("1", "2")]
    for key in keys:
        disk.folder(key).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="moved to .*; rebuilding"):
        assert disk.read(keys[0]) is None  # without a record in it: damaged
    assert not disk.folder(keys[0]).exists() and disk.folder(keys[1]).exists()
