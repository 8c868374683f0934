"""A recorded run of `python -m bench accuracy --model` as text for a terminal and as a table for users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.report import aligned, commit_of

Record = dict[str, Any]

MARK = "<!-- bench:model-accuracy -->"
MARK_WEIGHTS = "<!-- bench:weights-accuracy -->"


def columns_of(record: Record) -> Sequence[tuple[str, Callable[[Record], str]]]:
    """A table's columns: titles, and what a row has there."""
    columns: list[tuple[str, Callable[[Record], str]]] = [
        ("K and V", lambda row: row["name"]),
        ("bytes", lambda row: str(row.get("bytes_per_token", ""))),
    ]
    if record["kind"] == "weights_accuracy":
        columns = [("weights", lambda row: row["name"].removeprefix("weights "))]
    columns += [
        ("perplexity, %", lambda row: f"{row['increase_percent']:+.2f} ± {row['increase_error_percent']:.2f}"),
        ("KL, nats / 1000", lambda row: f"{1000 * row['kl']:.2f} ± {1000 * row['kl_error']:.2f}"),
    ]
    for length, exact in record.get("needles", {}).items():
        title = f"needles at {length} (exact {exact['found']} of {exact['of']}, {exact['loss']:.2f} nats)"
        columns.append((title, lambda row, length=length: _needles(row.get("needles", {}).get(length))))
    return columns


def _needles(found: Record | None) -> str:
    if found is None:
        return ""
    return f"{found['found']}, {found['loss']:.2f}"


def text(record: Record) -> str:
    """The run for a terminal."""
    columns = columns_of(record)
    cells = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in record["rows"])]
    lines = [_about(record), "", *aligned(cells), *(["", _decoded(record)] if _decoded(record) else [])]
    lines += [f"failed: {failure['what']}: {failure['error'][:200]}" for failure in record["failures"]]
    return "\n".join(lines)


def markdown(record: Record) -> str:
    """The run for a document."""
    columns = columns_of(record)
    rows = [[title for title, _ in columns], ["---", *["---:"] * (len(columns) - 1)]]
    rows += [[cell(row) for _, cell in columns] for row in record["rows"]]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n{_about(record)} {_decoded(record)}".rstrip() + "\n"


def _decoded(record: Record) -> str:
    """What decoding through the operators has shown; "" where it was not done."""
    rows = [row for row in record["rows"] if "decoded" in row]
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row["decoded"]["difference"])
    return (
        f"Decoded token by token through a DecodeCache in bf16: {len(rows)} rows; a window's loss is at most "
        f"{worst['decoded']['difference']:.3f} nats off ({worst['name']})."
    )


def _about(record: Record) -> str:
    environment, model = record["environment"], record.get("model", {})
    return (
        f"{environment['gpu'] or 'CPU'}, torch {environment['versions']['torch']}, commit {commit_of(environment)}, "
        f"{str(environment['date'])[:10]}. {model.get('name')}, head_dim {model.get('head_dim')}; "
        f"{model.get('test_windows')} windows of {model.get('window')} tokens, {_against(record, model)}."
        + _earlier(record.get("resumed", []))
    )


def _against(record: Record, model: Record) -> str:
    perplexity = f"perplexity {model.get('perplexity', 0):.4f} with exact"
    if record["kind"] == "weights_accuracy":
        return f"{perplexity} weights and activations"
    return f"calibrated on {model.get('calibration_windows')} others; {perplexity} K and V"


def _earlier(runs: Sequence[Record]) -> str:
    """The commits of runs that a record was resumed from; "" for none."""
    commits = dict.fromkeys(commit_of(run) for run in runs)
    return f" The record was resumed: its other rows are of commit {' and '.join(commits)}." if runs else ""
