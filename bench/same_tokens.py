"""The record of `python -m tests.gpu.same_tokens` as a table: greedy tokens beside transformers' own attention, and
what the logits lose with each format of the cache."""

from __future__ import annotations

from typing import Any

from bench.report import in_markdown, number

MARK = "<!-- bench:same-tokens -->"
COLUMNS = {  # of relative errors of logits: the formats that may stand in a column
    "16 bits": ("bf16", "mla_bf16"),
    "FP8": ("e4m3_token_head", "mla_fp8"),
    "INT8": ("int8_token_head",),
    "INT4": ("int4_g4",),
}


def markdown(record: dict[str, Any]) -> str:
    """The record as a Markdown table. Raises ValueError if nothing was compared."""
    rows = record.get("rows", [])
    if not rows:
        raise ValueError("record: got no model, want some")
    lines = []
    for row in sorted(rows, key=lambda row: row["name"]):
        ends = ", ".join(map(str, row["same"]))
        widest = number(max(row["margins"]), 3) if row["margins"] else "-"
        errors = [_error(row["logits"], names) for names in COLUMNS.values()]
        lines.append([row["name"], row["beside"], ends, widest, *errors])
    steps, versions = rows[0]["steps"], record["environment"]["versions"]
    head = ["model", "compared with", f"same tokens, of {steps}", "tie", *COLUMNS]
    requests = f"small random models, 16-bit weights, {len(rows[0]['same'])} requests, one of them padded"
    about = (
        f"transformers {versions['transformers']}; {requests}. tie: how far apart the two tokens were where choices "
        "first differ, at most, in standard deviations of the logits. Then relative errors of logits, given the same "
        "tokens, with caches of these formats."
    )
    return in_markdown(record, head, lines, about)


def _error(errors: dict[str, float], names: tuple[str, ...]) -> str:
    return next((f"{errors[name]:.3f}" for name in names if name in errors), "-")
