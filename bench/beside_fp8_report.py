"""A recorded run of `python -m bench accuracy --beside-fp8` as text and as the first table of docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.report import aligned, commit_of

Record = dict[str, Any]
Column = tuple[str, Callable[[Record], str]]

MARK = "<!-- bench:beside-fp8 -->"


def columns_of(record: Record) -> Sequence[Column]:
    """A table's columns: titles, and what a row has there."""
    columns: list[Column] = [
        ("K and V", lambda row: row["name"]),
        ("bytes of BF16's, %", lambda row: f"{100 * row['share_of_bf16']:.0f}"),
    ]
    for group in record["model"]["texts"]:
        title = "second turn" if group == "turn" else f"at {group}"
        columns += [
            (f"{title}: KL / 1000", lambda row, group=group: _kl(row.get(group))),
            ("top-1, %", lambda row, group=group: _agreement(row.get(group))),
        ]
        if group != "turn":
            columns.append(("needles", lambda row, group=group: _needles(row.get(group))))
    return [*columns, ("keeps the answers", lambda row: _verdict(row.get("keeps_answers")))]


def _kl(found: Record | None) -> str:
    return "" if found is None else f"{1000 * found['kl']:.2f}"


def _agreement(found: Record | None) -> str:
    return "" if found is None else f"{100 * found['agreement']:.1f} ± {100 * found['agreement_error']:.1f}"


def _needles(found: Record | None) -> str:
    """Found of those that BF16 finds: numbers and words together."""
    kinds = [found[kind] for kind in ("number", "word") if kind in found] if found else []
    return f"{sum(kind['found'] for kind in kinds)} of {sum(kind['of'] for kind in kinds)}" if kinds else ""


def _verdict(keeps: bool | None) -> str:
    return "" if keeps is None else ("yes" if keeps else "no")


def text(record: Record) -> str:
    """The run for a terminal."""
    columns = columns_of(record)
    cells = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in record["rows"])]
    return "\n".join([about(record), "", *aligned(cells)])


def markdown(record: Record) -> str:
    """The run for a document."""
    columns = columns_of(record)
    rows = [[title for title, _ in columns], ["---", *["---:"] * (len(columns) - 1)]]
    rows += [[cell(row) for _, cell in columns] for row in record["rows"]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{about(record)}\n"


def about(record: Record) -> str:
    """What was measured, on what."""
    environment, model = record["environment"], record["model"]
    chats = model["texts"].get("turn", 0)
    texts = " and ".join(f"{many} of {length} tokens" for length, many in model["texts"].items() if length != "turn")
    return (
        f"{environment['gpu'] or 'CPU'}, fp32 but for K and V, torch {environment['versions']['torch']}, commit "
        f"{commit_of(environment)}, {str(environment['date'])[:10]}. {model['name']}, head_dim {model['head_dim']}: "
        f"texts: {texts}, with {model['needles_each']} needles, the last {model['continuation']} tokens predicted; "
        f"{chats} chats over {model['page']} tokens, {model['answer']} tokens of each second answer; "
        f"constants from {model['calibration_windows']} windows of {model.get('window', 1024)} tokens of other text."
    )
