"""A recorded run as text: aligned tables for a terminal, Markdown tables for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import perplexity
from bench.workloads import HEADS_FIRST

Record = dict[str, Any]
Column = tuple[str, Callable[[Record], str]]

OURS = "cute-kernels"
IN_GRAPHS = ("skewed", "short", "blocks")  # suites whose tables have the time in a CUDA graph as well
INVARIANT = "batch-invariant"  # the same with that option


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _own(row: Record) -> float | None:
    return row["us"]["median_us"] if row.get("us") else None


def _graph(row: Record) -> float | None:
    return row["graph_us"]["median_us"] if row.get("graph_us") else None


ROW_COLUMNS: tuple[Column, ...] = (
    ("format", lambda row: row["kv_format"]),
    ("shape", lambda row: row["name"]),
    ("MB", lambda row: number(row["cache_bytes"] * 1e-6)),
    ("floor us", lambda row: number(row["floor"]["us"])),
    ("us", lambda row: number(_own(row))),
    ("min", lambda row: number(row["us"]["min_us"] if row.get("us") else None)),
    ("p90", lambda row: number(row["us"]["p90_us"] if row.get("us") else None)),
    ("graph", lambda row: number(_graph(row))),
    ("GB/s", lambda row: number(row.get("gb_per_s"), 0)),
    ("/ floor", lambda row: number(row.get("floor_ratio"), 2)),
)


def by_format(rows: Iterable[Record]) -> list[Record]:
    """Rows of one format together, formats in order of appearance; measuring goes shape by shape."""
    rows = list(rows)
    order = list(dict.fromkeys(row["kv_format"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["kv_format"]))


def peer_names(rows: Iterable[Record]) -> list[str]:
    """Peers with at least one time, in order of appearance."""
    names = [name for row in rows for name, peer in row.get("peers", {}).items() if peer.get("us") is not None]
    return list(dict.fromkeys(names))


def _peer_column(name: str) -> Column:
    return name, lambda row: number(row.get("peers", {}).get(name, {}).get("us"))


def text(record: Record) -> str:
    """Everything the run measured, aligned for a terminal."""
    environment = record["environment"]
    origin = f"{environment['gpu']}, driver {environment.get('driver')}, commit {commit_of(environment)}"
    lines = [f"{origin}, {environment['date']}"]
    for suite in dict.fromkeys(row["suite"] for row in record["rows"]):
        rows = by_format(row for row in record["rows"] if row["suite"] == suite)
        columns = [*ROW_COLUMNS, *(_peer_column(name) for name in peer_names(rows))]
        lines += ["", f"{suite} (median us of {record.get('samples')} calls, L2 made cold by reading)"]
        lines += aligned([[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])
    lines += _absent_peers(record["rows"])
    for ladder in record.get("ladder", []):
        lines += ["", f"ladder: {ladder['kv_format']} {ladder['name']}", *aligned(_ladder_cells(ladder))]
    if record.get("host_us"):
        costs = ", ".join(f"{name} {us:.2f} us" for name, us in record["host_us"].items())
        lines += ["", f"host cost per call: {costs}"]
    return "\n".join([*lines, *closing(record)])


def commit_of(environment: Record) -> str:
    """The commit that was measured, and what is known of changes to it, as `bench.environment` says."""
    about = {True: " (dirty)", False: "", None: " (local changes not known)"}[environment["dirty"]]
    return str(environment["commit"])[:10] + about


def closing(record: Record) -> list[str]:
    """What any run ends with: its bars, and what failed."""
    failed = [f"failed: {failure['what']}: {failure['error'][:200]}" for failure in record["failures"]]
    return [*_bars(record.get("bars", [])), *failed]


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell; numbers to the right, words to the left."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [all(_is_numeric(row[i]) for row in cells[1:]) for i in range(len(widths))]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]


def _is_numeric(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()


def _absent_peers(rows: Iterable[Record]) -> list[str]:
    reasons: dict[str, str] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            if peer.get("us") is None and peer.get("why_not"):
                reasons.setdefault(f"{name} ({row['kv_format']})", peer["why_not"])
    return ["", *(f"{name}: {why[:300]}" for name, why in reasons.items())] if reasons else []


def _ladder_cells(ladder: Record) -> list[list[str]]:
    cells = [["step", "optimisation", "on us", "off us", "x", "switch, or how it is built in"]]
    for rung in ladder["rungs"]:
        off, on = rung.get("off_us"), rung.get("on_us")
        gain = off / on if off and on else None
        why = ": ".join(rung[key] for key in ("off", "why_not") if key in rung) or rung.get("counted") or rung["how"]
        step = str(rung["number"] or "+")
        cells.append([step, rung["title"], number(on), number(off), number(gain, 2), why])
    return cells


def _bars(bars: Sequence[Record]) -> list[str]:
    if not bars:
        return []
    cells = [["", "bar", "measured", "wanted"]]
    cells += [["ok" if b["met"] else "NOT MET", b["what"], f"{b['measured']:.3f}", b["bar"]] for b in bars]
    met = sum(bar["met"] for bar in bars)
    return ["", *aligned(cells), f"{met} of {len(bars)} bars met"]


# -- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(record: Record, suite: str = "main") -> str:
    """The suite as a Markdown table, one line per shape and format; for the README."""
    rows = by_format(row for row in record["rows"] if row["suite"] == suite and row.get("us"))
    if not rows:
        known = ", ".join(dict.fromkeys(row["suite"] for row in record["rows"]))
        raise ValueError(f"suite: got {suite!r}, want one that the record has measurements of: {known}")
    columns: list[Column] = [
        ("KV cache", lambda row: row["kv_format"]),
        ("batch" if suite == "main" else "shape", lambda row: _shape_cell(row, suite)),
        ("MB", lambda row: number(row["cache_bytes"] * 1e-6, 0)),
        ("streaming floor, us", lambda row: number(row["floor"]["us"])),
        (f"{OURS}, us", lambda row: f"**{number(_own(row))}**"),
        *([("in a graph, us", lambda row: number(_graph(row)))] if suite in IN_GRAPHS else []),
        ("GB/s", lambda row: number(row.get("gb_per_s"), 0)),
        ("ratio to floor", lambda row: number(row.get("floor_ratio"), 2)),
        *((f"{name}, us", cell) for name, cell in (_peer_column(peer) for peer in peer_names(rows))),
    ]
    head = [title for title, _ in columns]
    about = f"median of {record.get('samples')} calls, each with L2 made cold by reading 256 MB."
    return in_markdown(record, head, ([cell(row) for _, cell in columns] for row in rows), about + about_layouts(rows))


def about_layouts(rows: Iterable[Record]) -> str:
    """What a table says of rows over head-major caches, where it has any; begins with a blank."""
    if not any(row["name"].endswith(HEADS_FIRST) for row in rows):
        return ""
    return f' "{HEADS_FIRST[2:].capitalize()}": pages are [KV heads, tokens, row], `cache_layout="HND"`.'


def in_markdown(record: Record, head: Sequence[str], lines: Iterable[Sequence[str]], about: str) -> str:
    """A Markdown table, and below it where its figures are from; about: how they were made, what cells hold.

    What INT4 caches cost in perplexity stands with their figures.
    """
    environment = record["environment"]
    measured = [row for row in record.get("rows", []) if isinstance(row, dict) and row.get("commit")]
    commits = dict.fromkeys(str(each["commit"])[:10] for each in (environment, *record.get("resumed", []), *measured))
    origin = (
        f"{environment['gpu']}, driver {environment.get('driver')}, torch {environment['versions']['torch']}, commit "
        f"{' and '.join(commits)}, {str(environment['date'])[:10]}"
    )
    cells = [head, ["---"] * len(head), *lines]
    said = " ".join(filter(None, [f"{origin}; {about}", perplexity.beside(record)]))
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + f"\n\n{said}\n"


MARK_LINEAR = "<!-- bench:linear -->"
MARK_MLA = "<!-- bench:mla -->"
MARK_MOE = "<!-- bench:moe -->"
MARK_END = "<!-- /bench -->"


def mark(suite: str) -> str:
    """The comment after which a document holds a suite's table; `MARK_END` closes it."""
    return "<!-- bench:decode -->" if suite == "main" else f"<!-- bench:decode-{suite} -->"


def filled(text: str, begin: str, table: str) -> str:
    """`text` with `table` between `begin` and the next `MARK_END`, in place of what was there."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(MARK_END)
    if not (found and closed):
        raise ValueError(f"text: got no {begin} ... {MARK_END}, want exactly these marks around the table")
    return f"{before}{begin}\n{table}{MARK_END}{after}"


def _shape_cell(row: Record, suite: str) -> str:
    return str(row["shape"]["batch"]) if suite == "main" else row["name"]
