"""Tests compile a sample of the kernels, the same in every process."""

from __future__ import annotations

import pytest

from cute_kernels.runtime import native
from tests import golden
from tests.golden.toy import ToyConfig, ToySpec

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="nothing is compiled without nvidia-cutlass-dsl")
CONFIGS = [ToyConfig("Before", f"toy{number}") for number in range(64)]
SPECS = [ToySpec(config) for config in CONFIGS]


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(golden.ALL, raising=False)


def test_few_are_taken_and_the_same_ones_again():
    taken = golden.worth_compiling(CONFIGS, ToySpec)
    assert 0 < len(taken) < len(CONFIGS) // 4 and set(taken) < set(CONFIGS)
    assert golden.worth_compiling(CONFIGS, ToySpec) == taken
    assert golden.sample(SPECS, 8) == golden.sample(SPECS[::-1], 8) and len(golden.sample(SPECS, 8)) == 8


def test_one_of_few_is_taken():
    assert [len(golden.worth_compiling(CONFIGS[:count], ToySpec)) for count in (0, 1, 2, 3)] == [0, 1, 1, 1]


def test_all_are_taken_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(golden.ALL, "1")
    assert golden.worth_compiling(CONFIGS, ToySpec) == CONFIGS and golden.sample(SPECS, 8) == SPECS
