"""Measured times, as data with their source: what the schedules' models are fitted to.

A file holds a "source" (which GPU, how, when) and "tables"; a table says what its keys and values are ("about").
Within "values" {"table": [[key, value], ...]} is a mapping; lists stand for tuples, which keys often are.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


def table(file: str, name: str) -> dict[Any, Any]:
    """A table as a dictionary; keys, and values that are no tables, are numbers, texts and tuples of them."""
    return _decoded(_read(file)["tables"][name]["values"])


@functools.cache
def _read(file: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / f"{file}.json").read_text())


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {_decoded(key): _decoded(one) for key, one in value["table"]}
    return tuple(_decoded(one) for one in value) if isinstance(value, list) else value
