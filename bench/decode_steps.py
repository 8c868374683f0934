"""A layer's decoding step in one call, RoPE, append and attention, over caches of K and V in several formats, and in
both layouts where there are several KV heads.

`python -m bench decode --suite step`. The floor is that of the cache's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.kernels import needed_by, needed_by_cases
from bench.peers import relative_error
from bench.report import Record, about_layouts, closing, in_markdown, number
from bench.suites import TOLERANCE, Bench, WrongOutput
from bench.timing import time_cold, time_graph_cold
from bench.workloads import HEADS_FIRST, DecodeShape, make_inputs
from cute_kernels import append_and_decode, append_kv
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.kv_cache import Rope
from cute_kernels.kv_cache.vllm_rows import vllm_transform
from cute_kernels.runtime import KernelSpec

ROTATED = "rotated"  # K and V as vLLM's int4_per_token_head turns them
FORMATS: tuple[tuple[str, ...], ...] = (
    ("bf16", "bf16"),
    ("e4m3_tensor", "e4m3_tensor"),
    ("int8_token_head", "int8_token_head"),
    ("int8_token_head", "int4_g4"),
    ("e4m3_token_head", "int4_g4"),
    ("e4m3_tensor", "int4_g4"),
    ("int4_g4", "int4_g4"),
    ("int4_g1", "int4_g1", ROTATED),
)  # of K, of V, and what is done to both before
BATCHES = (1, 8, 32, 128)
HEADS = ((32, 8),)  # query heads, KV heads
MORE_HEADS = {128: ((8, 1),)}  # by requests
CHECKED_ROWS = 4


@dataclass(frozen=True)
class CacheStep:
    """The tensors of a step over pages of 64 tokens."""

    shape: DecodeShape
    formats: tuple[Any, Any]
    transform: Any
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    caches: dict[str, Any]

    @staticmethod
    def of(shape: DecodeShape, formats: tuple[str, ...], device: str, filled: bool = True) -> CacheStep:
        """K and V are those of inputs in their formats; filled: as `make_inputs` has it."""
        k_format, v_format, *how = formats
        transform = vllm_transform(shape.num_kv_heads, shape.head_dim, device=device) if how else None
        k, v = (
            make_inputs(shape, name, device, seed=3 + i, filled=filled) for i, name in enumerate((k_format, v_format))
        )
        caches: dict[str, Any] = {"k_cache": k.k_cache, "v_cache": v.v_cache, "seq_lens": k.seq_lens}
        caches |= {name: k.options[name] for name in ("block_table", "cache_layout") if name in k.options}
        for of, name in ((k, "k_scale"), (v, "v_scale")):
            if name in of.options:
                caches[name] = of.options[name]
        size = (shape.batch, 1, shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim)
        fused = torch.randn(size, generator=torch.Generator(device).manual_seed(5), device=device).bfloat16()
        q, new_k, new_v = fused.split((shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads), dim=2)
        return CacheStep(shape, (k_format, v_format), transform, (q, new_k, new_v), caches)

    def bind(self, out: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        given = self.caches | {"kv_format": self.formats, "transform": self.transform}
        rope = Rope(self.shape.head_dim, theta=500000.0)
        return lambda: append_and_decode(*self.new, **given, rope=rope, out=out)

    def queries(self) -> torch.Tensor:
        """The queries as attention takes them, by an append of the same tokens."""
        q, k, v = (x[:, 0] for x in self.new)
        given = self.caches | {"kv_format": self.formats, "transform": self.transform}
        found = append_kv(k, v, q=q, **given, rope=Rope(self.shape.head_dim, theta=500000.0))
        assert found is not None
        return found.unsqueeze(1)

    def reference(self, rows: torch.Tensor) -> torch.Tensor:
        """What the step returns of some requests, in fp64 over the cache that it has appended to."""
        given = self.caches | {name: self.caches[name][rows] for name in ("seq_lens", "block_table")}
        given |= {"kv_format": self.formats, "compute_dtype": torch.float64}
        out = decode_attention_reference(self.queries()[rows], **given)[0]
        return out if self.transform is None else self.transform.restore(out)

    @property
    def cache_bytes(self) -> int:
        return sum(self.shape.cache_bytes(name) // 2 for name in self.formats)


Case = tuple[DecodeShape, tuple[str, ...]]


def cases(batches: Iterable[int] = BATCHES, only: str = "") -> list[Case]:
    """Every cache in each layout at each number of requests whose "FORMATS NAME" has ``only``, a regular expression."""
    sizes = [(batch, *heads) for batch in batches for heads in (*HEADS, *MORE_HEADS.get(batch, ()))]
    plain = [DecodeShape(batch, num_q_heads=q, num_kv_heads=kv, page_size=64) for batch, q, kv in sizes]
    shapes = [one for shape in plain for one in ([shape, shape.heads_first] if shape.num_kv_heads > 1 else [shape])]
    return [(shape, pair) for shape in shapes for pair in FORMATS if re.search(only, f"{_label(pair)} {shape.name}")]


def _label(formats: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(formats))


def run(bench: Bench, chosen: Sequence[Case], seconds: float) -> None:
    """One row per case under the record's key "steps"; after so many seconds the rest is left out, which is said."""
    rows: list[dict[str, Any]] = []

    def work(shape: DecodeShape, pair: tuple[str, ...]) -> None:
        rows.append(measure(bench, CacheStep.of(shape, pair, bench.device)) | {"formats": list(pair)})
        bench.recorder.set("steps", rows)
        bench.say(told(rows[-1]))

    for done, (shape, pair) in enumerate(chosen):
        if bench.recorder.seconds() > seconds:
            bench.say(f"step: {len(chosen) - done} rows are left out after {seconds:.0f} s")
            return
        bench.attempt(f"step: {_label(pair)} {shape.name}", lambda s=shape, p=pair: work(s, p))


def specs(chosen: Iterable[Case], device: str) -> list[KernelSpec]:
    """The kernels of all steps, the append of their check among them."""

    def calls_of(shape: DecodeShape, pair: tuple[str, ...]) -> list[Callable[[], object]]:
        step = CacheStep.of(shape, pair, device, filled=False)
        return [step.bind(), step.queries]

    return needed_by_cases(partial(calls_of, *case) for case in chosen)


def measure(bench: Bench, step: CacheStep) -> dict[str, Any]:
    """Checks a step and times its graph. launches: how many kernels it takes."""
    out = torch.full(step.new[0].shape, torch.nan, dtype=torch.bfloat16, device=bench.device)
    call = step.bind(out)
    call()
    rows = torch.linspace(0, len(out) - 1, min(len(out), CHECKED_ROWS), device=bench.device).long()
    error, finite = relative_error(out[rows], step.reference(rows)), bool(out.isfinite().all())
    if not (error <= TOLERANCE and finite):
        raise WrongOutput(f"relative error {error:.2e} (at most {TOLERANCE:g}), NaN or inf: {not finite}")
    us, floor = time_graph_cold(call, bench.flush, bench.protocol), bench.floor(step.cache_bytes)
    alone = time_cold(call, bench.flush, bench.protocol)  # as the floor is timed: a graph of a launch takes 2.4 us more
    return {
        "name": step.shape.name,
        "shape": step.shape.as_dict(),
        "cache_bytes": step.cache_bytes,
        "error": error,
        "launches": len(needed_by([step.bind()])),
        "us": alone.as_dict(),
        "graph_us": us.as_dict(),
        "floor": {"us": floor.us, "kernel": floor.kernel},
        "floor_ratio": us.median_us / floor.us,
    }


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    us, floor, alone = row["graph_us"]["median_us"], row["floor"]["us"], row.get("us", row["graph_us"])["median_us"]
    head = f"step of {_label(row['formats'])}, {row['name']}"
    ratios = f"{us / floor:.2f} of it, without a graph {alone:.2f} us, {alone / floor:.2f} of it"
    return f"{head}: {us:.2f} us, floor {floor:.2f}, {ratios}, {row['launches']} launches"


def text(record: Record) -> str:
    """The run in lines."""
    return "\n".join([str(record["environment"]["gpu"]), "", *map(told, record.get("steps", [])), *closing(record)])


def markdown(record: Record) -> str:
    """A line for each number of requests and layout: the time of each pair of formats, in brackets the ratio to the
    floor."""
    by_shape: dict[str, dict[str, str]] = {}
    for row in record["steps"]:
        cell = f"**{number(row['graph_us']['median_us'])}** ({number(row['floor_ratio'], 2)})"
        layout = HEADS_FIRST if row["name"].endswith(HEADS_FIRST) else ""
        line = f"{row['shape']['batch']}{_heads(row['shape']['num_kv_heads'])}{layout}"
        by_shape.setdefault(line, {})[_label(row["formats"])] = cell
    names = list(dict.fromkeys(name for cells in by_shape.values() for name in cells))
    lines = [[line, *(cells.get(name, "-") for name in names)] for line, cells in by_shape.items()]
    about = "us; in brackets how many times the floor of the cache's bytes."
    return in_markdown(record, ["requests", *names], lines, about + about_layouts(record["steps"]))


def _heads(kv: int) -> str:
    """What a line says of KV heads that are not the usual ones."""
    return "" if kv == HEADS[0][1] else f" ({kv} KV head{'s' if kv > 1 else ''})"
