"""Cache formats whose recorded step is slower than that of a format of more bytes: what pages have to say.

A format is smaller to hold more tokens or to read them faster. Where a record shows neither gain nor par, users are to
know: `tests/bench/test_slower_formats.py` compares what is found here with a table of docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.record import RESULTS, load
from bench.workloads import HEADS_FIRST
from cute_kernels.formats.kv import format_of
from cute_kernels.mla import formats as mla_formats

RECORDS = (
    "e2e_steps.json",
    "e2e_steps_default.json",
    "e2e_steps_caches.json",
    "e2e_steps_shard.json",
    "e2e_steps_h100.json",
    "e2e_gpt_oss.json",
    "e2e_vllm33.json",
    "e2e_vllm_h100.json",
    "decode_apart.json",
    "decode_heads.json",
)
NOISE = 1.03  # of a run
HEAD_DIM, LATENT = 128, 576
ENGINES = {"fp8": "e4m3_tensor", "auto": "bf16"}  # what engines call a format


@dataclass(frozen=True)
class Step:
    """One recorded step: ms a token of ``where``, with a cache in ``kv``."""

    where: str
    kv: str
    ms: float


@dataclass(frozen=True)
class Slower:
    """``kv`` takes ``ratio`` of the time of ``than``, which has more bytes, in the record's step ``where``."""

    kv: str
    than: str
    ratio: float
    where: str


def steps_of(record: dict[str, Any]) -> list[Step]:
    """The steps of a record that says what cache they had: of models, by the library; and of a layer's attention alone.

    `where` is the same for the same model or layer, weights, batch and context. A layer's attention counts in the
    faster layout of its cache, since a user chooses the layout.
    """
    found = []
    for row in record["rows"]:
        how = row.get("how", row)
        if how.get("sdpa") or "kv" not in how or how.get("plugin") == "off":
            continue
        where = f"{row['model']}, {how['weights']}, {row['batch']} x {row['context']}"
        own = how["kv"] + (f",{how['v']}" if how.get("v") else "")  # of K, and of V where it has another
        kv: str = (how.get("kv_format") or own).replace(",", " + ")
        found.append(Step(where, ENGINES.get(kv, kv), row.get("ms") or row["tpot_ms"]))
    alone: dict[tuple[str, ...], Step] = {}
    for row in record.get("steps", ()):
        kv = " + ".join(dict.fromkeys(row["formats"][:2]))  # of K, of V; what follows says how rows are turned
        case = row["name"].removesuffix(HEADS_FIRST)
        step = Step(f"attention, {case}", kv, row["graph_us"]["median_us"] / 1000)
        key = (case, *row["formats"])
        alone[key] = min(alone.get(key, step), step, key=lambda one: one.ms)
    return found + list(alone.values())


def row_bytes(kv: str) -> int:
    """Bytes of a token of one KV head of 128 columns, or of a latent of 576."""
    if kv.startswith("mla_"):
        return mla_formats.format_of(kv).row_bytes(LATENT)
    names = kv.split(" + ")
    return sum(format_of(name).row_bytes(HEAD_DIM) for name in (names[0], names[-1]))


def slower(steps: Sequence[Step]) -> list[Slower]:
    """Each format beside each of more bytes in the same step, where it is slower by more than a run's noise."""
    return [
        Slower(one.kv, other.kv, one.ms / other.ms, one.where)
        for one in steps
        for other in steps
        if one.where == other.where and row_bytes(one.kv) < row_bytes(other.kv) and one.ms > NOISE * other.ms
    ]


def found_in(names: Iterable[str] = RECORDS) -> list[Slower]:
    """All of the records that there are, each by itself."""
    return [one for name in names for one in slower(steps_of(load(RESULTS / name)))]
