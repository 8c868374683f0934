"""Compares every shipped kernel's machine code and resources with another revision's.

    python -m tests.golden.compare REV [--family FAMILY ...] [--only REGEX] [--map FILE]

Runs the programs of both revisions' kernels (REV in a temporary worktree) as far as the IR that the compiler takes.
Where the IR is the same, so is the machine code; where it differs, both are compiled through the kernel cache and the
objects are compared. What was traced or compiled before is not again, nor are programs that differ in comments and
docstrings alone. Kernels are paired by symbol, under a map of old to new symbols; names of classes and kernels do not
count (see `fingerprint`). The map is a JSON object:

    "renamed":  [[REGEX, REPLACEMENT], ...]   applied in order to each old symbol (re.sub)
    "removed":  {REGEX: REASON, ...}          old symbols that are gone
    "added":    {REGEX: REASON, ...}          new symbols
    "changed":  {REGEX: REASON, ...}          new symbols whose code differs, on purpose

`--affected` compiles nothing: it says which kernels' sources differ, which is what an edit compiles anew, and because
of which definitions.

Exit status: 0 if every difference has its reason, 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.runtime.artifact import Artifact, launches_from_json
from cute_kernels.runtime.doctor import ToolMissingError
from tests import golden
from tests.golden.fingerprint import fingerprint
from tools.resources import resource_report, short_name

ROOT = Path(__file__).resolve().parent.parent.parent
COLLECT = Path(__file__).with_name("collect.py")
DIFFERENCES_SHOWN = 6  # lines about one kernel


@dataclass(frozen=True)
class Kernel:
    """One configuration's compiled object: its symbol, and the folder of the kernel cache that holds it."""

    symbol: str
    arch: str
    folder: Path

    def artifact(self) -> Artifact:
        record = json.loads((self.folder / "entry.json").read_text())
        return Artifact(self.symbol, (self.folder / "kernel.o").read_bytes(), launches_from_json(record["launches"]))


Key = tuple[str, str]
"""A kernel's symbol and architecture."""


@dataclass(frozen=True)
class Map:
    """How the symbols of one revision became the other's, and which differences are meant."""

    renamed: Sequence[tuple[str, str]] = ()
    removed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)

    def new_symbol(self, old: str) -> str:
        for pattern, replacement in self.renamed:
            old = re.sub(pattern, replacement, old)
        return old


@dataclass
class Outcome:
    """same: kernels whose code is the same. explained: lines of differences with their reasons; unexplained: without.

    classes: how often a kernel function's name became another, by (old, new).
    """

    same: int = 0
    explained: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    classes: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)


def read_map(path: Path | None) -> Map:
    """Raises ValueError for keys that are none of a map's."""
    values = {} if path is None else json.loads(path.read_text())
    unknown = values.keys() - Map.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"{path}: got {sorted(unknown)}, want some of {sorted(Map.__dataclass_fields__)}")
    return Map(**values)


def pair(old: Iterable[Key], new: Iterable[Key], names: Map, outcome: Outcome) -> list[tuple[Key, Key]]:
    """Old and new kernels by mapped symbol and architecture; those without a partner go into `outcome`."""
    renamed: dict[Key, Key] = {}
    for item in old:
        other = renamed.setdefault((names.new_symbol(item[0]), item[1]), item)
        if other is not item:
            outcome.unexplained.append(f"{item[0]} and {other[0]} are mapped to one symbol")
    present = set(new)
    for key in sorted(renamed.keys() - present):
        _sort_in(outcome, f"- {renamed[key][0]} for {key[1]}", names.removed, renamed[key][0])
    for key in sorted(present - renamed.keys()):
        _sort_in(outcome, f"+ {key[0]} for {key[1]}", names.added, key[0])
    return [(renamed[key], key) for key in sorted(renamed.keys() & present)]


def _sort_in(outcome: Outcome, line: str, reasons: dict[str, str], symbol: str) -> None:
    for pattern, reason in reasons.items():
        if re.fullmatch(pattern, symbol):
            outcome.explained.append(f"{line}: {reason}")
            return
    outcome.unexplained.append(line)


def compare(outcome: Outcome, old: Kernel, new: Kernel, names: Map) -> None:
    """Compares two compiled kernels; each object is read once."""
    if old.folder == new.folder:
        outcome.same += 1
        return
    a, b = old.artifact(), new.artifact()
    for before, after in zip(a.launches, b.launches, strict=False):
        if short_name(before.kernel) != short_name(after.kernel):
            outcome.classes[short_name(before.kernel), short_name(after.kernel)] += 1
    differing = _differences(a, b)
    if not differing:
        outcome.same += 1
        return
    _sort_in(outcome, f"~ {new.symbol} for {new.arch}: {'; '.join(differing)}", names.changed, new.symbol)


def _differences(old: Artifact, new: Artifact) -> list[str]:
    """What differs between two objects beside their names; empty if nothing does."""
    shapes = [[(launch.dynamic_smem_bytes, launch.threads) for launch in item.launches] for item in (old, new)]
    lines = [] if shapes[0] == shapes[1] else [f"launches (shared memory, threads) {shapes[0]} -> {shapes[1]}"]
    a, b = (fingerprint(item.object_code, [launch.kernel for launch in item.launches]) for item in (old, new))
    parts = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    if any(name.startswith("cubin") for name in parts):
        lines += _resource_differences(old, new)
    lines += sorted(parts)
    left = len(lines) - DIFFERENCES_SHOWN
    return lines if left <= 0 else [*lines[:DIFFERENCES_SHOWN], f"{left} more"]


def _resource_differences(old: Artifact, new: Artifact) -> list[str]:
    """Registers, shared memory and opcodes that differ; only for kernels whose code does, since it is slow."""
    try:
        reports = [[golden.entry_of(item) for item in resource_report(artifact)] for artifact in (old, new)]
    except ToolMissingError as error:
        return [str(error)]
    for before, after in zip(*reports, strict=False):
        after["kernel"] = before["kernel"]
    return golden.differences(*reports)


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The files of a revision in a temporary folder. Raises CalledProcessError for an unknown one."""
    with tempfile.TemporaryDirectory(prefix="cute_kernels_compare_") as folder:
        path = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(path), revision], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def collect(tree: Path, what: str, families: Sequence[str], only: str) -> dict[Key, str]:
    """Digests of a tree's kernels' IR ("ir") or sources ("sources"), or folders of their objects ("objects"), by symbol
    and architecture.

    It is another process that makes them, which imports from the tree alone. only: a regular expression; of the
    kernels whose symbols it is found in. Raises CalledProcessError if a kernel's program fails.
    """
    with tempfile.TemporaryDirectory(prefix="cute_kernels_compare_") as folder:
        output = Path(folder) / "kernels.json"
        request = {"tree": str(tree), "output": str(output), "what": what, "families": list(families), "only": only}
        command = [sys.executable, str(COLLECT), json.dumps(request)]
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
        records: list[tuple[str, str, str]] = json.loads(output.read_text())
    return {(symbol, arch): value for symbol, arch, value in records}


def _exactly(symbols: Iterable[str]) -> str:
    return f"^(?:{'|'.join(re.escape(symbol) for symbol in symbols)})$"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("revision", help="git revision to compare this tree with")
    parser.add_argument("--family", action="append", default=[], help="compare only this family's kernels; repeatable")
    parser.add_argument("--only", default="", help="compare only kernels whose symbol has this regular expression")
    parser.add_argument("--map", type=Path, help="JSON file of old to new symbols and of intended differences")
    parser.add_argument("--affected", action="store_true", help="only say which kernels the edits recompile")
    options = parser.parse_args(arguments)
    names, outcome, start = read_map(options.map), Outcome(), time.perf_counter()
    with worktree(options.revision) as tree:
        trees = {options.revision: tree, "this tree": ROOT}
        if options.affected:
            old, new = (collect(each, "sources", options.family, options.only) for each in trees.values())
            show_affected(old, new)
            return 0
        old, new = (_announced(name, trees[name], "ir", options.family, options.only) for name in trees)
        pairs = pair(old, new, names, outcome)
        differing = [(a, b) for a, b in pairs if old[a] != new[b]]
        outcome.same += len(pairs) - len(differing)
        traced = time.perf_counter()
        if differing:
            print(f"{len(differing)} kernels have another IR")
            sides = [_exactly({side[index][0] for side in differing}) for index in (0, 1)]
            old, new = (
                _announced(name, trees[name], "objects", options.family, only)
                for name, only in zip(trees, sides, strict=True)
            )
    compiled = time.perf_counter()
    for a, b in differing:
        compare(outcome, Kernel(*a, Path(old[a])), Kernel(*b, Path(new[b])), names)
    show(outcome)
    times = (traced - start, compiled - traced, time.perf_counter() - compiled)
    print("{:.0f} s to trace, {:.0f} s to compile, {:.1f} s to compare objects".format(*times))
    return 1 if outcome.unexplained else 0


def differing_sources(old: dict[Key, str], new: dict[Key, str]) -> list[Key]:
    """The kernels of the new tree that the old one has not, or has from other sources."""
    return sorted(key for key, value in new.items() if old.get(key, "").split(" ")[0] != value.split(" ")[0])


def show_affected(old: dict[Key, str], new: dict[Key, str]) -> None:
    affected = differing_sources(old, new)
    causes: collections.Counter[str] = collections.Counter()
    for key in affected:
        print("  {} for {}".format(*key))
        before, after = (set(side.get(key, "").split(" ")[1:]) for side in (old, new))
        causes.update({text.partition(":")[0] for text in before ^ after} if key in old else ["(a new kernel)"])
    for name, count in causes.most_common():
        print(f"  {count} by {name}")
    print(f"{len(affected)} of {len(new)} kernels have other sources")


def _announced(name: str, tree: Path, *arguments: Any) -> dict[Key, str]:
    print(f"{name}:", flush=True)
    return collect(tree, *arguments)


def show(outcome: Outcome) -> None:
    for (before, after), count in sorted(outcome.classes.items()):
        print(f"  kernel {before} is now {after} ({count})")
    for line in outcome.explained:
        print(f"  explained: {line}")
    for line in outcome.unexplained:
        print(f"  UNEXPLAINED: {line}")
    counts = (outcome.same, len(outcome.explained), len(outcome.unexplained))
    print("{} kernels have the same code, {} differences are explained, {} are not".format(*counts))


if __name__ == "__main__":
    sys.exit(main())
