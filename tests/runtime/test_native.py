"""The runtime library is found without the DSL, a linker where there is one, and code only runs where it can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cute_kernels.runtime import LinkerMissingError, RuntimeLibraryError, native


def test_the_installed_runtime_library_is_found_without_importing_the_dsl():
    path = native.runtime_library()
    assert path.name == native.RUNTIME_LIBRARY and path.parent.parent.name == native.runtime_flavor()
    assert native.runtime_flavor() in {"cu12", "cu13"}


@pytest.mark.parametrize(("installed", "compiles"), [("4.8.1", True), ("4.8.0", True), ("4.7.1", False), (None, False)])
def test_versions_of_the_compiler_that_make_the_same_code_compile(installed: str | None, compiles: bool):
    with native.having(dsl_version=lambda: installed):
        assert (native.compiler_version() is not None) is compiles
        assert compiles or native.COMPILER_VERSION in native.compiler_remedy()


def test_a_named_runtime_library_wins_and_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    library = tmp_path / "runtime.so"
    monkeypatch.setenv(native.RUNTIME_VARIABLE, str(library))
    with pytest.raises(RuntimeLibraryError, match=r"CUTE_DSL_RUNTIME=.*runtime\.so is no file"):
        native.runtime_library()
    library.write_text("not a library")
    assert native.runtime_library() == library
    with pytest.raises(RuntimeLibraryError, match="does not load"):
        native.load_runtime()


@pytest.mark.parametrize(("driver", "flavor"), [((13, 0), "cu13"), ((12, 9), "cu12"), (None, "cu13")])
def test_the_library_follows_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver, flavor: str):
    package = tmp_path / "nvidia_cutlass_dsl"
    for major in ("cu12", "cu13"):
        (package / major / "lib").mkdir(parents=True)
        (package / major / "lib" / native.RUNTIME_LIBRARY).touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia_cutlass_dsl", raising=False)
    with native.having(driver_version=lambda: driver):
        assert native._installed_runtime_library.__wrapped__().parent.parent.name == flavor


def test_a_driver_older_than_every_library_is_a_clear_error():
    words = r"installed for CUDA 12, CUDA 13, the driver takes CUDA 11\.8"
    with native.having(driver_version=lambda: (11, 8)), pytest.raises(RuntimeLibraryError, match=words):
        native._installed_runtime_library.__wrapped__()


@pytest.mark.parametrize(
    ("built_for", "host", "runs"),
    [
        ("x86_64-v3", "x86_64-v4", True),
        ("x86_64-v4", "x86_64-v4", True),
        ("x86_64-v4", "x86_64-v3", False),
        ("aarch64", "aarch64", True),
        ("aarch64", "x86_64-v4", False),
        ("x86_64-v1", "aarch64", False),
    ],
)
def test_code_runs_on_the_same_machine_of_at_least_its_level(built_for: str, host: str, runs: bool):
    assert native.isa_runs(built_for, host) is runs


def test_the_plain_linker_serves_where_there_is_no_compiler_driver(tmp_path: Path, warm_directory: Path):
    with native.having(linkers=[entry for entry in native.LINKERS if entry[0] == "ld"]):
        if native.find_linker() is None:
            pytest.skip("ld is not installed")
        source = next(warm_directory.glob("tiny/*/kernel.o"))
        native.link([source], tmp_path / "kernel.so")
    assert native.open_library(tmp_path / "kernel.so")(source.parent.name.rsplit("-", 1)[0]) is not None


def test_a_linker_that_fails_is_quoted(tmp_path: Path):
    (tmp_path / "broken.o").write_bytes(b"no object")
    with pytest.raises(RuntimeError, match=r"failed to link out\.so: .*broken\.o"):
        native.link([tmp_path / "broken.o"], tmp_path / "out.so")


def test_no_linker_is_a_clear_error(tmp_path: Path):
    none = [("no-such-linker", ("-shared",))]
    with native.having(linkers=none), pytest.raises(LinkerMissingError, match="tried no-such-linker"):
        native.link([], tmp_path / "out.so")
