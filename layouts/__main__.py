"""``python -m layouts list | verify [NAME ...] | draw NAME -o FILE``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from layouts import algebra
from layouts.broken_pipes import ends_with_its_reader
from layouts.draw import Figure, figures, save
from layouts.proofs import ProofError
from layouts.registry import Entry, entries

MOST_ELEMENTS = 1 << 16  # of a layout that is drawn: 16 MB of picture


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m layouts", description="List, verify and draw layouts.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every named object, by kind")
    verify = commands.add_parser("verify", help="prove what every object claims, or only the named ones")
    verify.add_argument("names", nargs="*", metavar="NAME")
    draw = commands.add_parser("draw", help="write a picture as .svg or .html")
    draw.add_argument("name", metavar="NAME", help="a name from the list, or a layout such as '(8,8):(8,1)'")
    draw.add_argument("-o", "--output", required=True, metavar="FILE")
    return parser


def _select(names: Sequence[str], known: dict[str, Entry]) -> list[Entry]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no entry is named {', '.join(unknown)}; see `python -m layouts list`")
    return [known[name] for name in names] if names else list(known.values())


def _by_kind(selected: Sequence[Entry]) -> dict[str, list[Entry]]:
    kinds: dict[str, list[Entry]] = {}
    for entry in selected:
        kinds.setdefault(entry.kind, []).append(entry)
    return kinds


def list_entries(known: dict[str, Entry]) -> int:
    """Prints every entry and returns the exit status."""
    width = max(len(name) for name in known)
    for kind, members in _by_kind(list(known.values())).items():
        print(f"{kind} ({len(members)})")
        for entry in members:
            print(f"  {entry.name:<{width}}  {entry.summary}")
    return 0


def verify_entries(selected: Sequence[Entry]) -> int:
    """Proves and prints every claim of the selected entries. Returns the exit status: 1 if a claim is not true, else
    0.
    """
    start, claims, failures = time.perf_counter(), 0, 0
    for kind, members in _by_kind(selected).items():
        print(kind)
        for entry in members:
            try:
                proofs = entry.verify()
            except (ProofError, ValueError, ArithmeticError) as error:
                failures += 1
                print(f"  {entry.name}: NOT PROVED: {error}")
                continue
            claims += len(proofs)
            print(f"  {entry.name}")
            for proof in proofs:
                print(f"    {proof.method:<10} {proof.cases:>7}  {proof.claim}")
    seconds = time.perf_counter() - start
    print(
        f"{claims} claims of {len(selected) - failures} entries proved, {failures} entries not proved, {seconds:.1f} s"
    )
    return 1 if failures else 0


def _figure(name: str, known: dict[str, Entry]) -> Figure:
    if name not in known and ":" in name:
        layout = algebra.parse(name)
        if algebra.size(layout) > MOST_ELEMENTS:
            raise ValueError(f"layout is {name!r}; want one of at most {MOST_ELEMENTS} elements")
        try:
            return figures.value_grid(layout)
        except OverflowError as error:
            raise ValueError(f"layout is {name!r}; want one whose offsets fit 64 bits") from error
    return _select([name], known)[0].figure()


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status (2 for a wrong name or file)."""
    options = _parser().parse_args(arguments)
    known = entries()
    try:
        if options.command == "list":
            return list_entries(known)
        if options.command == "verify":
            return verify_entries(_select(options.names, known))
        print(save(_figure(options.name, known), options.output))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
