"""Which table shows a recorded run, by what it is a run of: `python -m bench table`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench import (
    accuracy_report,
    append,
    beside_fp8_report,
    by_format,
    compare,
    decode_steps,
    e2e_steps,
    e2e_transformers,
    e2e_vllm,
    extend,
    linear,
    linear_fp8,
    mla,
    model_accuracy_report,
    moe,
    moe_fp8,
    norm,
    options,
    report,
    same_tokens,
    vllm_int4,
    vllm_rows,
)

Record = dict[str, Any]
Table = tuple[Callable[[Record], str], str | None]
"""What makes the text, and the comment behind which a page holds it; None where no page does."""

OF_KIND: dict[str, Table] = {
    "linear": (linear.markdown, report.MARK_LINEAR),
    "mla": (mla.markdown, report.MARK_MLA),
    "moe": (moe.markdown, report.MARK_MOE),
    "norm": (norm.markdown, None),
    "append": (append.text, None),
    "compare": (compare.text, None),
    "extend": (extend.markdown, None),
    "accuracy": (accuracy_report.markdown, accuracy_report.MARK),
    "model_accuracy": (model_accuracy_report.markdown, model_accuracy_report.MARK),
    "weights_accuracy": (model_accuracy_report.markdown, model_accuracy_report.MARK_WEIGHTS),
    "beside_fp8": (beside_fp8_report.markdown, beside_fp8_report.MARK),
    "same_tokens": (same_tokens.markdown, same_tokens.MARK),
    "vllm_int4": (vllm_int4.text, None),
    "vllm_rows": (vllm_rows.markdown, vllm_rows.MARK),
}


def table_of(record: Record, suite: str) -> Table:
    """Of a run; ``suite``: of decode attention, or which of transformers'. ValueError for what is no benchmark's.

    What makes the text raises ValueError where the record has nothing to show.
    """
    kind = str(record.get("kind", "decode"))
    if "options" in record:
        return options.text, None
    for key, module in (
        ("linear_fp8", linear_fp8),
        ("moe_fp8", moe_fp8),
        ("linear_formats", by_format),
        ("moe_formats", by_format),
    ):
        if key in record:
            return module.text, None
    if "steps" in record and not record["rows"]:
        return decode_steps.text, None
    if kind == "decode":
        return (partial(report.markdown, suite=suite), report.mark(suite)) if record["rows"] else (report.text, None)
    if kind == "e2e":
        if record.get("engine") == "transformers":
            return e2e_transformers.TABLES.get(suite, e2e_transformers.TABLES["main"])
        of_steps = record.get("engine") == "steps"
        return (e2e_steps.markdown, e2e_steps.MARK) if of_steps else (e2e_vllm.markdown, e2e_vllm.MARK)
    if kind not in OF_KIND:
        raise ValueError(f"record: got one of kind {kind!r}, want a run of `python -m bench`")
    return OF_KIND[kind]
