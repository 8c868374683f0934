"""`python -m cute_kernels`: doctor, bundles and the cache, on the tiny family."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels import __main__ as command_line
from cute_kernels import __version__, families
from cute_kernels.runtime import KernelCache
from cute_kernels.runtime.cache import using
from tests.observed import calls_of
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import tiny_specs


@pytest.fixture
def tiny_family(monkeypatch: pytest.MonkeyPatch, warm_directory: Path) -> Iterator[None]:
    """The tiny family is all that ships, and its cache is warm."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(warm_directory))
    monkeypatch.delenv("CUTE_KERNELS_AOT_DIR", raising=False)
    monkeypatch.setattr(families, "shipped_specs", lambda: tiny_specs(2))
    with using(KernelCache(warm_directory)):
        yield


def test_the_doctor_ends_with_what_can_be_done(tiny_family: None, capsys: pytest.CaptureFixture[str]):
    assert command_line.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ok +compiler: nvidia-cutlass-dsl 4\.8\.1 \(cu1[23]\)$", printed, re.MULTILINE)
    assert "yes, compile kernels\n" in printed


def test_a_bundle_is_built_shown_and_described(tiny_family: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command_line.main(["aot", "build", "--arch", ARCH, "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "[1/2] tiny:" in printed and "[2/2] tiny:" in printed and "2 kernels, " in printed
    assert command_line.main(["aot", "info", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert '{"scale": 1.0, "smem_floats": 128}' in printed and printed.endswith("fits this installation\n")


def test_a_pattern_selects_kernels(tiny_family: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    symbol = tiny_specs(1)[0].symbol
    assert command_line.main(["aot", "build", "--arch", ARCH, "-o", str(tmp_path), "--only", f"tiny:{symbol}"]) == 0
    assert "1 kernels" in capsys.readouterr().out
    assert command_line.main(["aot", "build", "--arch", ARCH, "-o", str(tmp_path), "--only", "moe:*"]) == 2
    assert "no shipped kernel matches moe:*" in capsys.readouterr().err


def test_shipped_kernels_are_listed_without_compiling_any(tiny_family: None, capsys: pytest.CaptureFixture[str]):
    with calls_of(KernelCache.artifacts) as compiled:
        assert command_line.main(["aot", "list"]) == 0
        assert capsys.readouterr().out.splitlines() == [str(spec) for spec in tiny_specs(2)]
        assert command_line.main(["aot", "list", "--only", f"*:{tiny_specs(1)[0].symbol}"]) == 0
        assert capsys.readouterr().out.splitlines() == [str(tiny_specs(1)[0])]
        assert command_line.main(["aot", "list", "--only", "moe:*"]) == 2
    assert not compiled


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["--version"])
    assert capsys.readouterr().out == f"cute-kernels {__version__}\n"


def test_an_unsupported_architecture_is_refused(tiny_family: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command_line.main(["aot", "build", "--arch", "sm_80", "-o", str(tmp_path)])
    assert "invalid choice: 'sm_80'" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_said_before_anything_is_compiled(
    tiny_family: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = tmp_path / "file"
    place.touch()
    with calls_of(KernelCache.artifacts) as compiled:
        assert command_line.main(["aot", "build", "--arch", ARCH, "-o", str(place)]) == 1
    assert not compiled
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(place) in said and said.count("\n") == 1


@pytest.mark.parametrize("jobs", ["0", "-3", "many"])
def test_no_number_of_workers_is_refused(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["aot", "build", "--arch", ARCH, "-o", str(tmp_path), f"--jobs={jobs}"])
    assert f"argument --jobs: got {jobs}, want a number of at least 1" in capsys.readouterr().err


def test_errors_are_one_line(tiny_family: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command_line.main(["aot", "info", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} holds no bundle: manifest.json is missing\n"


def test_the_cache_is_listed_and_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    KernelCache(tmp_path).artifact(tiny_specs(1)[0], ARCH)
    assert command_line.main(["cache", "info"]) == 0
    assert f"tiny:{tiny_specs(1)[0].symbol}  {ARCH}" in capsys.readouterr().out
    assert command_line.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"removed 1 kernels from {tmp_path}\n"


def test_shipped_specs_are_those_of_every_room(monkeypatch: pytest.MonkeyPatch):
    rooms = {"one": tiny_specs(1), "two": tiny_specs(2)[1:]}
    monkeypatch.setattr(families, "ROOMS", sorted(rooms))
    monkeypatch.setattr(
        families.importlib,
        "import_module",
        lambda name: types.SimpleNamespace(shipped_specs=lambda: rooms[name.split(".")[1]]),
    )
    assert families.shipped_specs() == tiny_specs(2)
    rooms["two"] = tiny_specs(1)
    with pytest.raises(ValueError, match="is the symbol of two configurations"):
        families.shipped_specs()
