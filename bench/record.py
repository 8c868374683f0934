"""The JSON record of a run, written after every measurement so that a failure loses nothing."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from bench.bars import judge
from bench.environment import ROOT, environment

RESULTS = ROOT / "bench" / "results"
SCHEMA = 1


class Recorder:
    """Collects one run. `data` is what the file holds."""

    def __init__(self, path: Path | None, **about: object) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "environment": environment(),
            **about,
            "rows": [],
            "failures": [],
        }
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._begin

    def resume_from(self, earlier: dict[str, Any]) -> None:
        """Goes on with a record of the same command that was cut: its rows stay, and where they were measured is kept
        under "resumed", the newest first.

        Raises:
            ValueError: it is of another kind, of another engine, or of another GPU.
        """
        for name, known, own in (
            *((name, earlier.get(name), self.data.get(name)) for name in ("kind", "engine")),
            ("gpu", earlier["environment"].get("gpu"), self.data["environment"].get("gpu")),
        ):
            if known != own:
                raise ValueError(f"got a record whose {name} is {known}, want {own}")
        runs = [earlier["environment"], *earlier.get("resumed", [])]
        self.data = {**earlier, "environment": self.data["environment"], "resumed": runs}

    def add_row(self, row: dict[str, Any]) -> None:
        self.data["rows"].append(row)
        self.save()

    def set(self, key: str, value: object) -> None:
        self.data[key] = value
        self.save()

    def add_failure(self, what: str, error: BaseException) -> str:
        """Records that `what` failed and goes on; returns the message."""
        message = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error)[-6:])
        self.data["failures"].append({"what": what, "error": message, "trace": trace})
        self.save()
        return message

    def save(self) -> None:
        self.data["bars"] = [verdict.as_dict() for verdict in judge(self.data)]
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = json.dumps(self.data, indent=1) + "\n"
        if self.path.exists() and not self.path.is_file():  # a device or a pipe, such as /dev/null, stays what it is
            self.path.write_text(written)
            return
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(written)
        os.replace(scratch, self.path)


def load(path: str | Path) -> dict[str, Any]:
    """A recorded run; ValueError if it is none."""
    data = json.loads(Path(path).read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: got schema {data.get('schema') if isinstance(data, dict) else None}, want {SCHEMA}")
    return data
