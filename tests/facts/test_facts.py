"""Every file of measured times says where it is from and what its tables are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import facts

FILES = sorted(Path(facts.__file__).parent.glob("*.json"))


def times_in(value: Any) -> list[float]:
    """All times of a table."""
    if isinstance(value, dict):
        return [time for one in value.values() for time in times_in(one)]
    return [time for one in value for time in times_in(one)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_its_source_and_plausible_times(path: Path):
    content = json.loads(path.read_text())
    assert set(content) == {"source", "tables"} and re.search(r"H[12]00|20\d\d-\d\d-\d\d", content["source"])
    for name, entry in content["tables"].items():
        assert set(entry) == {"about", "values"} and entry["about"], name
        found = facts.table(path.stem, name)
        assert found and all(1 < time < 1e6 for time in times_in(found) if isinstance(time, float)), name


def test_keys_are_tuples_and_tables_nest():
    assert facts.table("linear", "MICROSECONDS")[8192, 8192, 8][16, 256, 4] == 19.5
    assert facts.table("moe", "SIZES")[4, (8, 2, 4096, 14336), 512, 1][160] == 365.2
