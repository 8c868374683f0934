"""Kernels that are known to compile to the same are compiled in part; all others always are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import native
from cute_kernels.runtime.sources import source_state
from tests import golden
from tests.golden.toy import ToyConfig, ToySpec
from tests.golden.update import files_that_compile

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the sources count with nvidia-cutlass-dsl alone")


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(golden.ALL, raising=False)


CONFIGS = [ToyConfig("Before", f"toy{number}") for number in range(64)]


def known(**changes: Any) -> dict[str, Any]:
    """That this file has passed with the toy's sources, but for ``changes``."""
    entry = {"tests": golden.file_digest(Path(__file__)), "sources": [source_state(ToySpec(CONFIGS[0])).digest]}
    name = "tests/golden/test_sampling.py"
    return {"toolchain": golden.toolchain(), "files": {name: entry | changes}} | changes


def taken(passed: dict[str, Any], configs: list[ToyConfig] | None = None) -> list[ToyConfig]:
    return golden.worth_compiling(CONFIGS if configs is None else configs, ToySpec, __file__, passed)


def test_a_sample_is_taken_of_what_has_passed_with_the_same_sources():
    sample = taken(known())
    assert 0 < len(sample) < len(CONFIGS) // 4 and set(sample) < set(CONFIGS)
    assert taken(known()) == sample, "every process takes the same"


def test_one_of_few_is_taken():
    assert [len(taken(known(), CONFIGS[:count])) for count in (0, 1, 2, 3)] == [0, 1, 1, 1]


@pytest.mark.parametrize("changes", [{"tests": "another"}, {"sources": ["another"]}, {"toolchain": "another"}])
def test_all_are_taken_where_anything_has_changed(changes: dict[str, Any]):
    assert taken(known(**changes)) == CONFIGS
    assert taken({"toolchain": golden.toolchain(), "files": {}}) == CONFIGS


def test_all_are_taken_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(golden.ALL, "1")
    assert taken(known()) == CONFIGS


def test_what_has_passed_is_written_as_it_is_read(tmp_path: Path):
    (entry,) = known()["files"].values()
    golden.write_passed({"tests/golden/test_sampling.py": entry["sources"]}, tmp_path / "passed.json")
    assert golden.read(tmp_path / "passed.json") == known()


def test_files_whose_helpers_compile_are_run_in_full_too():
    found = {path.name for path in files_that_compile(Path(__file__).parents[1])}
    assert {"test_portable_compile.py", "test_six_bits.py", "test_parity.py"} < found
    assert "test_sampling.py" not in found and "generic.py" not in found
