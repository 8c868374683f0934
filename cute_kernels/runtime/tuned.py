"""Tables of what was measured to be fastest on a GPU, which selection consults before it asks its model.

A table never says how to compute something, only which of the schedules that selection enumerates to take: an entry
that names none of them, of another version or made for another GPU, is as good as no entry, and results are right.

Where tables are looked for, the first that has an entry counts: the file that CUTE_KERNELS_TUNED names ("" for no
tables at all), `tuned/<gpu>.json` in the directory of compiled kernels, which `python -m cute_kernels tune` writes, and
`cute_kernels/gemm/tuning/<gpu>.json`, which ships.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.runtime import native
from cute_kernels.runtime.store import default_directory

VARIABLE = "CUTE_KERNELS_TUNED"
VERSION = 1
SHIPPED = Path(__file__).resolve().parent.parent / "gemm" / "tuning"


class TableError(ValueError):
    """A file is no table of this version; the message names it and says why."""


@dataclass(frozen=True)
class Choice:
    """What was fastest for one problem.

    Attributes:
        kernel: which of the family's kernels.
        config: name of its configuration.
        cut: parts of K.
        us: median time, microseconds. model_us: that of what the model would have taken.
    """

    kernel: str
    config: str
    cut: int
    us: float
    model_us: float


@dataclass
class TunedTable:
    """Choices by problem, measured on one kind of GPU with one version of the compiler."""

    gpu: str
    dsl: str | None
    entries: dict[str, Choice] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> TunedTable:
        """The table in a file.

        Raises:
            TableError: the file holds no table of this version. OSError: it cannot be read.
        """
        try:
            content = json.loads(path.read_text())
            if content["version"] != VERSION:
                raise TableError(f"{path}: got a table of version {content['version']!r}, want {VERSION}")
            entries = {key: _choice(value) for key, value in content["entries"].items()}
            gpu, dsl = content["gpu"], content["dsl"]
            if not isinstance(gpu, str) or not isinstance(dsl, str | None):
                raise TypeError("gpu and dsl are not strings")
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{path}: got no table of tuned kernels ({type(error).__name__}: {error})") from error
        return TunedTable(gpu, dsl, entries)

    def write(self, path: Path) -> None:
        """Replaces the file as a whole, so that whoever reads it meanwhile, or stops this, has the old or the new."""
        content = {"version": VERSION, "gpu": self.gpu, "dsl": self.dsl}
        content["entries"] = {key: asdict(choice) for key, choice in sorted(self.entries.items())}
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(file.name, path)

    def mismatch(self, gpu: str) -> str | None:
        """Why the table does not hold here, or None."""
        if self.gpu != gpu:
            return f"was measured on {self.gpu}, not on {gpu}"
        here = native.compiler_version()  # of a bundle's kernels nothing is known, nor need be
        if here is not None and self.dsl is not None and here != self.dsl:
            return f"was measured with nvidia-cutlass-dsl {self.dsl}, not {here}"
        return None


def file_name(gpu: str) -> str:
    """Of the table for a GPU: its name in lower case, words joined by underscores."""
    return "_".join(re.findall("[a-z0-9]+", gpu.lower())) + ".json"


def own_path(gpu: str) -> Path:
    """Where `python -m cute_kernels tune` writes."""
    return default_directory() / "tuned" / file_name(gpu)


@functools.cache
def tables(gpu: str) -> tuple[TunedTable, ...]:
    """The tables that hold for a GPU, the first to be asked first; read once in a process.

    One that is damaged or does not hold is left out, with a warning. Raises TableError or OSError if that is the one
    which CUTE_KERNELS_TUNED names.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        if not named:
            return ()
        table = TunedTable.read(Path(named))
        reason = table.mismatch(gpu)
        if reason is not None:
            raise TableError(f"{named}: the table that {VARIABLE} names {reason}")
        return (table,)
    found = []
    for path in (own_path(gpu), SHIPPED / file_name(gpu)):
        try:
            table = TunedTable.read(path)
            reason = table.mismatch(gpu)
        except FileNotFoundError:
            continue
        except (TableError, OSError) as error:
            table, reason = None, str(error)
        if table is None or reason is not None:
            warnings.warn(f"tuned table {path} is not used: {reason}", RuntimeWarning, stacklevel=2)
        else:
            found.append(table)
    return tuple(found)


def shipped_tables() -> list[TunedTable]:
    """The tables that ship, for any GPU."""
    return [TunedTable.read(path) for path in sorted(SHIPPED.glob("*.json"))]


def choice_of(key: str, gpu: str) -> Choice | None:
    """What the tables say of a problem."""
    return next((table.entries[key] for table in tables(gpu) if key in table.entries), None)


def _choice(value: Mapping[str, Any]) -> Choice:
    choice = Choice(**value)
    kinds = {"kernel": str, "config": str, "cut": int, "us": (int, float), "model_us": (int, float)}
    for name, kind in kinds.items():
        if not isinstance(getattr(choice, name), kind):
            raise TypeError(f"{name} is {getattr(choice, name)!r}")
    return choice
