"""Figures of decode steps: latency per token and tokens per second over the batch, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import PEER_COLOURS, Record, save

COLOURS = {
    "w4, int4_g4": "#0b6e4f",
    "w4, int8_token_head": "#63a46c",
    "w4, bf16": "#b5651d",
    "bf16, bf16 SDPA": "#1f4e8c",
    "w4, bf16 SDPA": "#4c9fc9",
    "bf16, int4_g4": "#c94c4c",
    "w8, int8_token_head": "#8e6c8a",
    "bf16, mla_fp8": "#c94c4c",
    "w4, mla_fp8": "#0b6e4f",
    "w4, mla_bf16": "#b5651d",
}
PANELS_A_ROW = 2
CONTEXT = 8192


def plot_steps(record: Record, folder: Path) -> list[Path]:
    """Writes both figures; returns the files."""
    rows = [row for row in record["rows"] if row["context"] == CONTEXT]
    if not rows:
        return []
    return [
        _plot(rows, record, folder / "step_latency.svg", "ms", "ms per token (dotted: its bytes)"),
        _plot(rows, record, folder / "step_throughput.svg", "tokens_per_s", "tokens per second"),
    ]


def _plot(rows: Sequence[Record], record: Record, path: Path, value: str, label: str) -> Path:
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    others = iter(PEER_COLOURS)
    colours = {case: COLOURS.get(case) or next(others) for case in cases}
    figure, panels = _panels(len(models))
    for panel, model in zip(panels, models, strict=True):
        for case in cases:
            own = sorted((row for row in rows if (row["model"], row["case"]) == (model, case)), key=_batch)
            if own:
                _line(panel, own, value, colours[case], case)
        batches = sorted({row["batch"] for row in rows})
        panel.set_title(model)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(lambda at, _: f"{at:g}")
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xlabel(f"requests of {CONTEXT} tokens")
        panel.grid(True, alpha=0.3)
        panel.set_ylabel(label)
        panel.legend(fontsize=7, loc="lower right")
    return save(figure, record, path)


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    import matplotlib.pyplot as plt

    columns = min(count, PANELS_A_ROW)
    rows = -(-count // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.6 * columns, 4.2 * rows), squeeze=False)
    for panel in panels.flat[count:]:
        panel.remove()
    return figure, list(panels.flat[:count])


def _line(panel: Any, rows: Sequence[Record], value: str, colour: str, label: str) -> None:
    at = [row["batch"] for row in rows]
    panel.plot(at, [row[value] for row in rows], "o-", color=colour, markersize=4, label=label)
    if value == "ms":
        panel.plot(at, [row["floor_ms"] for row in rows], ":", color=colour, linewidth=0.9)


def _batch(row: Record) -> int:
    return row["batch"]
