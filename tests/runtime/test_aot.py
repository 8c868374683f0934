"""A bundle is built anywhere and runs without the compiler, where it fits; where it does not, it says why."""

from __future__ import annotations

import ctypes
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime import BundleError, KernelCache, LinkerMissingError, aot, aot_build, native
from cute_kernels.runtime.elf import dynamic_symbols
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import TinyConfig, TinySpec, tiny_specs

SPECS = tiny_specs(2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, warm_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    aot_build.build(SPECS, ARCH, directory, cache=KernelCache(warm_directory))
    return directory


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to alter."""
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def alter(bundle: Path, **changes: Any) -> None:
    path = bundle / aot.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_manifest_says_what_is_inside_and_what_it_needs(built: Path):
    manifest = aot.read_manifest(built)
    assert sorted(path.name for path in built.iterdir()) == ["bundle.so", "manifest.json"]
    assert set(manifest["kernels"]) == {spec.symbol for spec in SPECS}
    assert manifest["kernels"][SPECS[0].symbol]["config"] == {"scale": 1.0, "smem_floats": 128}
    assert manifest["arch"] == ARCH and manifest["host"] == native.host_isa()
    assert manifest["versions"]["nvidia-cutlass-dsl"] == native.dsl_version()


def test_every_kernel_of_the_bundle_loads_and_checks_its_arguments(built: Path):
    bundle = aot.open_bundle(built)
    for spec in SPECS:
        function = bundle.get(spec, ARCH)
        assert function is not None
        with pytest.raises(ValueError, match="device_type=cuda"):
            function(torch.zeros(8), torch.zeros(8))


def test_it_holds_exactly_its_configurations_and_architecture(built: Path):
    bundle = aot.open_bundle(built)
    assert bundle.holds(SPECS[0], ARCH)
    assert not bundle.holds(SPECS[0], "sm_100a")
    assert not bundle.holds(TinySpec(TinyConfig(scale=77.0)), ARCH)
    assert bundle.get(TinySpec(TinyConfig(scale=77.0)), ARCH) is None


def test_bundles_come_before_the_disk(built: Path, tmp_path: Path):
    cache = KernelCache(tmp_path, [aot.open_bundle(built)])
    assert cache.load_from(SPECS[0], ARCH)[1] == "bundle"
    assert len(cache.load_many(SPECS, ARCH)) == 2
    assert not any(tmp_path.iterdir())


def test_the_environment_names_bundles_and_no_compiler_is_needed(built: Path, tmp_path: Path, output_of: Callable):
    program = """
import sys
sys.modules["cutlass"] = None  # importing it fails
from cute_kernels.runtime import default_cache
from tests.runtime.tiny import tiny_specs
print([default_cache().load_from(spec, "sm_90a")[1] for spec in tiny_specs(2)])
"""
    printed = output_of(program, CUTE_KERNELS_AOT_DIR=str(built), CUTE_KERNELS_CACHE_DIR=str(tmp_path))
    assert printed == "['bundle', 'bundle']"


def test_a_bundle_of_the_installed_files_needs_no_search(bundle: Path, tmp_path: Path, output_of: Callable):
    program = """
from cute_kernels.runtime import default_cache, definitions
from tests.runtime.tiny import tiny_specs
print([default_cache().load_from(spec, "sm_90a")[1] for spec in tiny_specs(2)], definitions.reads() > 0)
"""
    environment = {"CUTE_KERNELS_AOT_DIR": str(bundle), "CUTE_KERNELS_CACHE_DIR": str(tmp_path / "none")}
    assert output_of(program, **environment) == "['bundle', 'bundle'] False"
    assert not (tmp_path / "none").exists()
    kernels = aot.read_manifest(bundle)["kernels"]
    built_elsewhere = {symbol: kernel | {"question": None} for symbol, kernel in kernels.items()}
    alter(bundle, kernels=built_elsewhere)
    assert output_of(program, **environment) == "['bundle', 'bundle'] True"


def test_the_runtime_library_may_be_named_where_the_compiler_is_not_installed(built: Path, output_of: Callable):
    program = """
import importlib.metadata, importlib.util, pathlib, sys
find, version = importlib.util.find_spec, importlib.metadata.version

def hidden_find(name, *rest):
    return None if name == "nvidia_cutlass_dsl" else find(name, *rest)

def hidden_version(name):
    if name == "nvidia-cutlass-dsl":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.util.find_spec, importlib.metadata.version = hidden_find, hidden_version
from cute_kernels.runtime import aot, native
from tests.runtime.tiny import tiny_specs
bundle = aot.open_bundle(pathlib.Path(sys.argv[1]))
print(native.dsl_version(), native.runtime_flavor(), bundle.get(tiny_specs(1)[0], "sm_90a") is not None)
"""
    assert output_of(program, str(built), CUTE_DSL_RUNTIME=str(native.runtime_library())) == "None custom True"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "aarch64"}, "host code is for aarch64, this machine is "),
        ({"host": "x86_64-v9"}, "host code is for x86_64-v9"),
        (
            {"wanted": ["TVMFFIEnvGetStream", "_cudaOfAnotherAge"]},
            "built with nvidia-cutlass-dsl 4.8.1, _cudaOfAnotherAge not in the runtime library of 4.8.1",
        ),
        (
            {"versions": {"nvidia-cutlass-dsl": native.dsl_version(), "apache-tvm-ffi": "0.9.1"}},
            "built with apache-tvm-ffi 0.9.1, installed is 0.1.",
        ),
    ],
)
def test_a_bundle_for_another_installation_is_refused_with_every_difference(bundle: Path, changes: Any, words: str):
    alter(bundle, **changes)
    with pytest.raises(BundleError, match=f"does not fit this installation: .*{words}.* rebuild it here"):
        aot.open_bundle(bundle)


@pytest.mark.parametrize("version", ["4.6.0", "4.9.0"])
def test_a_bundle_of_another_compiler_opens_where_all_that_it_calls_is_there(bundle: Path, version: str):
    assert "TVMFFIEnvGetStream" in aot.read_manifest(bundle)["wanted"]
    alter(bundle, versions={"nvidia-cutlass-dsl": version, "apache-tvm-ffi": "0.1.9"})
    assert aot.open_bundle(bundle).get(SPECS[0], ARCH) is not None


def test_a_bundle_brings_how_errors_are_raised_where_the_runtime_library_lacks_it(built: Path):
    name = "CuteDSLRT_TVMFFISetRaisedCudaError"
    assert name not in aot.read_manifest(built)["wanted"]
    assert name in dynamic_symbols(built / aot.LIBRARY).exported
    said: list[tuple[bytes, list[bytes]]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int)
    def set_raised(kind, parts, count):
        said.append((kind, [parts[i] for i in range(count)]))

    # A library by itself: in a bundle that is loaded the runtime library's own function would come first.
    with tempfile.TemporaryDirectory() as folder:
        errors, library = Path(folder) / "errors.o", Path(folder) / "errors.so"
        assert native.compile_c(aot_build.ERRORS, errors)
        native.link([errors], library)
        raise_error = getattr(ctypes.CDLL(str(library)), name)
        for code in (0, 1, 719, -4):
            raise_error(set_raised, code)
    assert said == [(b"CUDADialectError", [b"CUDA Error Code: ", text]) for text in (b"1", b"719", b"-4")]


def test_a_bundle_without_it_wants_it(tmp_path: Path, warm_cache: KernelCache):
    with native.having(c_compilers=()):
        manifest = aot_build.build(SPECS[:1], ARCH, tmp_path, cache=warm_cache)
    assert "CuteDSLRT_TVMFFISetRaisedCudaError" in manifest["wanted"]


def test_a_bundle_for_a_newer_driver_is_refused(bundle: Path):
    words = r"built for CUDA 13, the driver takes CUDA 12\.8"
    with native.having(driver_version=lambda: (12, 8)), pytest.raises(BundleError, match=words):
        aot.open_bundle(bundle)


def test_a_damaged_library_is_refused_before_it_is_loaded(bundle: Path):
    content = (bundle / aot.LIBRARY).read_bytes()
    (bundle / aot.LIBRARY).write_bytes(content[:-1] + b"x")
    with pytest.raises(BundleError, match=r"missing or not the file that manifest\.json describes"):
        aot.open_bundle(bundle)


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_damaged_manifest_is_refused(bundle: Path, content: str):
    (bundle / aot.MANIFEST).write_text(content)
    with pytest.raises(BundleError, match=r"manifest.json cannot be read .* rebuild"):
        aot.open_bundle(bundle)


def test_an_empty_directory_is_no_bundle(tmp_path: Path):
    with pytest.raises(BundleError, match=r"holds no bundle: manifest.json is missing"):
        aot.open_bundle(tmp_path)


def test_a_stale_kernel_is_compiled_instead_with_one_warning(bundle: Path, warm_directory: Path):
    kernels = aot.read_manifest(bundle)["kernels"]
    others = {"sources": "0" * 64, "question": ["0" * 64, kernels[SPECS[0].symbol]["question"][1]]}
    alter(bundle, kernels={symbol: kernel | others for symbol, kernel in kernels.items()})
    cache = KernelCache(warm_directory, [aot.open_bundle(bundle)])
    with pytest.warns(RuntimeWarning, match="built from other sources than are installed") as caught:
        assert [cache.load_from(spec, ARCH)[1] for spec in SPECS] == ["disk", "disk"]
    assert len(caught) == 1


def test_a_rebuilt_bundle_is_loaded_anew_in_the_same_process(tmp_path: Path, warm_directory: Path):
    cache = KernelCache(warm_directory)
    aot_build.build(SPECS[:1], ARCH, tmp_path, cache=cache)
    aot.open_bundle(tmp_path)
    aot_build.build(SPECS[1:], ARCH, tmp_path, cache=cache)
    assert aot.open_bundle(tmp_path).get(SPECS[1], ARCH) is not None


def test_building_asks_for_kernels_with_symbols_of_their_own(tmp_path: Path, warm_cache: KernelCache):
    with pytest.raises(ValueError, match="specs is empty"):
        aot_build.build([], ARCH, tmp_path, cache=warm_cache)

    class Namesake(TinySpec):
        symbol = SPECS[0].symbol  # pyright: ignore[reportAssignmentType]

    with pytest.raises(ValueError, match=f"two specs have the symbol {SPECS[0].symbol}"):
        aot_build.build([SPECS[0], Namesake()], ARCH, tmp_path, cache=warm_cache)


def test_building_needs_a_linker(tmp_path: Path, warm_cache: KernelCache):
    with native.having(linkers=()), pytest.raises(LinkerMissingError, match="install cc or ld"):
        aot_build.build(SPECS, ARCH, tmp_path, cache=warm_cache)
