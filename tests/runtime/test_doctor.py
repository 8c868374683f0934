"""The doctor tells what works, what does not and what to do about it, without touching anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.runtime import doctor, native
from cute_kernels.runtime.doctor import LIMITED, MISSING, OK, Finding, ToolMissingError
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.store import DiskStore


@pytest.fixture(autouse=True)
def scratch_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTE_KERNELS_AOT_DIR", raising=False)
    return tmp_path / "cache"


def finding(subject: str) -> Finding:
    return next(item for item in doctor.examine() if item.subject == subject)


def test_every_subject_is_looked_at_and_whatever_is_not_well_has_a_remedy(scratch_cache: Path):
    findings = doctor.examine()
    assert len({item.subject for item in findings}) == len(doctor.CHECKS)
    assert all(item.remedy for item in findings if item.status != OK)
    assert not scratch_cache.exists()


def test_no_gpu_stops_running_and_nothing_else():
    with standing_in(Gpu(is_available=lambda: False)), native.having(driver_version=lambda: None):
        blocked = doctor.abilities(doctor.examine())
        found = finding("gpu")
    assert blocked["run kernels"] == ["driver", "gpu"]
    assert blocked["compile kernels"] == [] and blocked["load ahead-of-time bundles"] == []
    assert found.detail.startswith("no GPU: torch")


def test_a_compiler_of_another_version_is_none():
    with native.having(dsl_version=lambda: "4.6.0"):
        found, blocked = finding("compiler"), doctor.abilities(doctor.examine())
    assert found.status == MISSING and "4.6.0 is installed, by another package" in found.detail
    assert "build a bundle with 4.8.1" in found.remedy
    assert blocked["load ahead-of-time bundles"] == []


def test_an_old_driver_is_a_limit():
    with native.having(driver_version=lambda: (12, 8)):
        found = finding("driver")
    assert (found.status, found.detail) == (LIMITED, "takes CUDA 12.8")


def test_without_the_compiler_bundles_still_load():
    with native.having(dsl_version=lambda: None):
        findings, found = doctor.examine(), finding("compiler")
    assert doctor.abilities(findings)["compile kernels"] == ["compiler"]
    assert doctor.abilities(findings)["load ahead-of-time bundles"] == []
    assert f"pip install '{native.DSL_DISTRIBUTION}[cu13]=={native.COMPILER_VERSION}'" in found.remedy


def test_without_a_linker_bundles_are_not_built():
    with native.having(linkers=()):
        assert doctor.abilities(doctor.examine())["build ahead-of-time bundles"] == ["linker"]


def test_a_runtime_library_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(native.RUNTIME_VARIABLE, "/no/such/library.so")
    assert finding("runtime library").status == MISSING
    assert "/no/such/library.so is no file" in finding("runtime library").detail


def test_a_cache_that_cannot_be_written_is_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert finding("cache").status == LIMITED and "CUTE_KERNELS_CACHE_DIR" in finding("cache").remedy


def test_a_cache_that_the_runtime_refuses_is_a_limit(scratch_cache: Path):
    """Because others can write it, or the directory that it will be made in."""
    assert finding("cache").status == OK
    for place in (scratch_cache.parent, scratch_cache):
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        found = finding("cache")
        assert found.status == LIMITED and f"not used, as others could put code there: {place}" in found.detail
        assert DiskStore(scratch_cache).refusal is not None and "chmod go-w" in found.remedy
        place.chmod(0o755)
    assert finding("cache").status == OK and DiskStore(scratch_cache).refusal is None


def test_a_cache_in_a_temporary_directory_for_all_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    assert finding("cache").status == OK


def test_a_bundle_that_does_not_open_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(tmp_path))
    assert finding("bundles").status == MISSING
    assert "holds no bundle" in finding("bundles").detail
    assert doctor.abilities(doctor.examine())["load ahead-of-time bundles"] == ["bundles"]


def test_missing_tools_stop_reports_alone(monkeypatch: pytest.MonkeyPatch):
    def no_tool(name: str) -> str:
        raise ToolMissingError(f"{name} was not found")

    monkeypatch.setattr(doctor, "find_tool", no_tool)
    blocked = doctor.abilities(doctor.examine())
    assert blocked["report registers and spills"] == ["resource reports"] and blocked["compile kernels"] == []
