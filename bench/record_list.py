"""The list of all records in bench/results for docs/benchmarks.md: what made each, on which GPU, and when."""

from __future__ import annotations

import json
import shlex
from typing import Any

from bench.record import RESULTS

MARK = "<!-- bench:records -->"
COMMANDS = ("accuracy", "append", "compare", "decode", "e2e", "extend", "linear", "mla", "moe", "norm")


def command_of(record: dict[str, Any]) -> str:
    """The command that made a record, without the place of the record; empty where it does not say one."""
    words = list(record.get("command") or [])
    if isinstance(record.get("command"), str) or not words or words[0] not in COMMANDS:
        return ""
    for option in ("--json", "--base-dir", "--peers-from"):
        if option in words:
            first = words.index(option)
            del words[first : first + 2]
    return f"`python -m bench {shlex.join(words)}`"


def markdown() -> str:
    """One line a record."""
    cells = [["record", "command, or the kind of study", "GPU", "date"], ["---"] * 4]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        environment = record.get("environment") or {}
        kind = " ".join(filter(None, (record.get("kind", "study"), record.get("engine")))).replace("_", " ")
        made = command_of(record) or kind
        about = [str(environment.get("gpu") or "CPU").removeprefix("NVIDIA "), str(environment.get("date") or "")[:10]]
        cells.append([f"`{path.stem}`", made, *about])
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)
