"""A recorded accuracy run as text for a terminal and as the first table of docs/accuracy_models.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.report import aligned, commit_of, number

Record = dict[str, Any]

MARK = "<!-- bench:accuracy -->"


def _measured(name: str) -> list[tuple[str, Callable[[Record], str]]]:
    return [
        (f"{name}: error", lambda row: scientific(row[name]["error"])),
        ("KL", lambda row: scientific(row[name]["kl"])),
    ]


COLUMNS: Sequence[tuple[str, Callable[[Record], str]]] = (
    ("K and V", lambda row: row["name"]),
    ("bytes", lambda row: str(row["bytes_per_token"])),
    *_measured("gaussian"),
    *_measured("outliers"),
    *_measured("captured"),
    ("perplexity", lambda row: number(row["perplexity"], 4)),
    ("increase, %", lambda row: f"{row['increase_percent']:+.3f} ± {row['increase_error_percent']:.3f}"),
)


def scientific(value: float) -> str:
    """Two significant digits, as short as they can be written: 0.013, 1.3e-5, 0."""
    if not value:
        return "0"
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def text(record: Record) -> str:
    """The run for a terminal."""
    cells = [[title for title, _ in COLUMNS], *([cell(row) for _, cell in COLUMNS] for row in record["rows"])]
    lines = [_about(record), "", *aligned(cells)]
    decoded = [row for row in record["rows"] if "decoded" in row]
    if decoded:
        worst = max(decoded, key=lambda row: row["decoded"]["difference"])
        lines += [
            "",
            f"decoded through KVCache: {len(decoded)} of {len(record['rows'])}; loss of a window at most "
            f"{worst['decoded']['difference']:.1e} nats off ({worst['name']})",
        ]
    lines += [f"failed: {failure['what']}: {failure['error'][:200]}" for failure in record["failures"]]
    return "\n".join(lines)


def markdown(record: Record) -> str:
    """The run for a document."""
    rows = [[title for title, _ in COLUMNS], ["---", *["---:"] * (len(COLUMNS) - 1)]]
    rows += [[cell(row) for _, cell in COLUMNS] for row in record["rows"]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{_about(record)}\n"


def _about(record: Record) -> str:
    environment, model, corpus = record["environment"], record.get("model", {}), record.get("corpus", {})
    return (
        f"{environment['gpu'] or 'CPU'}, torch {environment['versions']['torch']}, commit {commit_of(environment)}, "
        f"{str(environment['date'])[:10]}. Model: {model.get('num_layers')} layers, "
        f"{model.get('parameters', 0) * 1e-6:.1f} M parameters, head_dim {model.get('head_dim')}, trained "
        f"{model.get('seconds')} s on {model.get('tokens', 0) * 1e-6:.1f} M bytes drawn from "
        f"{corpus.get('train_bytes', 0) * 1e-6:.1f} MB; perplexity {number(model.get('perplexity'), 4)} per byte with "
        "exact K and V."
    )
