"""Options beside the plain call, so that none can be slow unseen: of decode attention, of append, of `.linear_options`.

All calls of a shape are CUDA graphs. An option is timed in turn with the plain call and no other, one sample of each
after the other, several times over: what slows the GPU down for a while meets both alike, and so do instruction caches
that have the code of one or both. Among all options several share the plain call's kernel, whose code then stays in
these caches, where that of an option's own kernel does not: 0.1 to 0.3 us of a small call. A figure is the median over
the runs of an option's median less the plain one's. An option may take its own bytes at the rate of `BYTES_PER_US` and
what its `Bar` says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import entry, kernels
from bench.append import AppendShape, bind, make_call
from bench.report import aligned, closing, number
from bench.suites import Bench
from bench.timing import capture, time_cold_in_turn
from bench.workloads import DecodeInputs, DecodeShape, make_inputs
from cute_kernels import append_and_decode
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.kv_cache import CacheTransform, Rope
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.runtime import KernelSpec

RUNS = 5
BYTES_PER_US = 4.6e6  # what streaming kernels reach on an H200
WIDE_TOKENS = 131072  # what an engine's block tables have columns for
PAGE_SIZE = 16
CAP = 30.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Bar:
    """What an option may take beside its own bytes: a share of the plain call, or microseconds if those are more."""

    share: float
    us: float = 0.0

    def allowed_us(self, plain_us: float) -> float:
        return max(self.share * plain_us, self.us)


READS = Bar(0.03)  # of an option that reads or computes something
PLACES = Bar(0.01, 0.3)  # of one that changes nothing but where things lie
STEP_BAR, APPEND_BAR = Bar(0.01, 0.2), Bar(0.0, 0.3)  # of a cache's transform


@dataclass(frozen=True)
class Option:
    """What is timed beside a plain call.

    Attributes:
        call: the same work with the option.
        own_bytes: that the option has to read or write, more than the plain call.
        bar: what it may take besides.
        plain: name of the call that it is compared with; its own where others are compared with it.
    """

    call: Call
    own_bytes: int = 0
    bar: Bar = READS
    plain: str = "plain"

    def allowed_us(self, plain_us: float) -> float:
        """More than the plain call, at most."""
        return self.own_bytes / BYTES_PER_US + self.bar.allowed_us(plain_us)


Make = Callable[[Any, str], dict[str, Option]]
"""Of a shape and the name of a format."""


def decode_shapes(batches: Iterable[int]) -> list[DecodeShape]:
    """Of Llama-3-8B's heads, 8k tokens a request in pages."""
    return [DecodeShape(batch, num_q_heads=32, num_kv_heads=8, page_size=PAGE_SIZE) for batch in batches]


def decode_options(inputs: DecodeInputs) -> dict[str, Option]:
    """By name; "plain" and what others are compared with have no bytes of their own."""
    shape, device = inputs.shape, inputs.q.device
    tokens = inputs.options["block_table"].shape[1] * shape.page_size
    half = replace(inputs, seq_lens=inputs.seq_lens // 2)

    def with_(changed: DecodeInputs = inputs, **options: Any) -> Call:
        return entry.bind(changed, **options)

    def bias(dtype: torch.dtype, heads: int) -> Option:
        values = torch.randn(shape.batch, 1, heads, tokens, device=device).to(dtype)
        return Option(with_(attn_bias=values), own_bytes=values.nbytes)

    heads = torch.arange(1, shape.num_q_heads + 1, device=device)
    return {
        "plain": Option(with_()),
        "half the tokens": Option(with_(half), plain="half the tokens"),
        "attn_bias fp32": bias(torch.float32, shape.num_q_heads),
        "attn_bias bf16": bias(torch.bfloat16, shape.num_q_heads),
        "attn_bias fp32 for all heads": bias(torch.float32, 1),
        "softcap": Option(with_(softcap=CAP)),
        "alibi_slopes": Option(with_(alibi_slopes=2.0 ** (-8.0 * heads / shape.num_q_heads))),
        "sinks": Option(with_(sinks=torch.randn(shape.num_q_heads, device=device))),
        "window of half the tokens": Option(with_(window_size=shape.seq_len // 2), plain="half the tokens"),
        "block table for 128k": Option(with_(block_table=_wide(inputs, apart=False)), bar=PLACES),
        "part of such a table": Option(with_(block_table=_wide(inputs, apart=True)), bar=PLACES),
        "K and V in one tensor": Option(with_(_in_one_tensor(inputs)), bar=PLACES),
        "q of a fused projection": Option(with_(replace(inputs, q=_fused(inputs.q))), bar=PLACES),
        "lse": Option(with_(return_lse=True)),
        **({} if format_of(format_pair(inputs.kv_format)[0]).in_blocks else _step_options(inputs)),
    }


def transforms(num_kv_heads: int, head_dim: int, device: Any) -> dict[str, CacheTransform]:
    """Of a kind that calibration makes: K centred; rotated as well, with random signs; V, too."""
    generator = torch.Generator(device).manual_seed(0)
    center, other = (torch.randn(num_kv_heads, head_dim, generator=generator, device=device) for _ in range(2))
    signs = other.sign() * 2.0**-0.5
    return {
        "K centred": CacheTransform(center),
        "K centred and rotated over 32": CacheTransform(center, k_rotation=32),
        "K centred and rotated": CacheTransform(center, k_rotation=head_dim),
        "K centred and rotated, factors of V": CacheTransform(center, None, head_dim, 1 + other.abs()),
        "K centred, scaled and rotated, V as well": CacheTransform(center, signs, head_dim, signs, head_dim),
    }


def _step_options(inputs: DecodeInputs) -> dict[str, Option]:
    """Append and attention in one call, over caches with transforms."""
    shape, device = inputs.shape, inputs.q.device
    size = (shape.batch, shape.q_len, shape.num_kv_heads, shape.head_dim)
    new, rope = torch.randn(size, device=device).to(inputs.q.dtype), Rope(shape.head_dim, theta=500000.0)
    given = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache, "seq_lens": inputs.seq_lens, "rope": rope,
             "kv_format": inputs.kv_format, **inputs.options}  # fmt: skip

    def step(**options: Any) -> Call:
        return lambda: append_and_decode(inputs.q, new, new, **(given | options))

    found = {"append_and_decode": Option(step(), plain="append_and_decode")}
    changes = transforms(shape.num_kv_heads, shape.head_dim, device)
    for name, transform in changes.items():
        found[f"{name}: step"] = Option(step(transform=transform), plain="append_and_decode", bar=STEP_BAR)
    found["step with a softcap"] = Option(step(softcap=CAP), plain="append_and_decode")
    capped = step(softcap=CAP, transform=changes["K centred and rotated"])
    found["K centred and rotated: step with a softcap"] = Option(capped, plain="step with a softcap", bar=STEP_BAR)
    return found


def _wide(inputs: DecodeInputs, apart: bool) -> torch.Tensor:
    """The block table with columns for `WIDE_TOKENS`; ``apart``: the columns that are used, of such a table."""
    table = inputs.options["block_table"]
    wide = torch.full(
        (table.shape[0], WIDE_TOKENS // inputs.shape.page_size), -1, dtype=torch.int32, device=table.device
    )
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]] if apart else wide


def _in_one_tensor(inputs: DecodeInputs) -> DecodeInputs:
    both = torch.stack((inputs.k_cache, inputs.v_cache), dim=1)
    return replace(inputs, k_cache=both[:, 0], v_cache=both[:, 1])


def _fused(q: torch.Tensor) -> torch.Tensor:
    """The same queries as a part of rows that hold K and V, too."""
    rows = torch.zeros(*q.shape[:2], q.shape[2] * 3 // 2, q.shape[3], dtype=q.dtype, device=q.device)
    rows[:, :, : q.shape[2]] = q
    return rows[:, :, : q.shape[2]]


def append_options(shape: AppendShape, kv_format: str, device: str = "cuda") -> dict[str, Option]:
    call = make_call(shape, kv_format, device)
    assert call.q is not None
    dtype, size = call.k.dtype, call.k.shape[2]

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=device)

    biases = {"q_bias": ones(call.num_q_heads * size), "k_bias": ones(call.num_kv_heads * size)}
    biases["v_bias"] = ones(call.num_kv_heads * size)
    norms = {"q_norm": ones(size), "k_norm": ones(size)}
    both = torch.zeros(call.num_pages, 2, *call.k_cache.shape[1:], dtype=call.k_cache.dtype, device=device)
    assert call.seq_lens is not None and call.block_table is not None
    table, last = call.block_table, call.seq_lens.long() - 1
    found = {
        "plain": Option(bind(call)),
        "qkv_bias": Option(bind(call._replace(**biases)), own_bytes=sum(x.nbytes for x in biases.values())),
        "q_norm and k_norm": Option(bind(call._replace(**norms))),
        "bias and norms": Option(bind(call._replace(**biases, **norms))),
        "no rope": Option(bind(call._replace(rope=None))),
        "new q_out": Option(bind(call._replace(q_out=None))),
        "K and V in one tensor": Option(bind(call._replace(k_cache=both[:, 0], v_cache=both[:, 1])), bar=PLACES),
        "q, k and v apart": Option(
            bind(call._replace(q=call.q.contiguous(), k=call.k.contiguous(), v=call.v.contiguous())), bar=PLACES
        ),
    }
    for name, transform in transforms(call.num_kv_heads, size, device).items():
        found[name] = Option(bind(_with(call, {"transform": transform})), bar=APPEND_BAR)
    if shape.suite == "decode":
        page, row = last // call.page_size, last % call.page_size
        slots = table.gather(1, page[:, None])[:, 0].long() * call.page_size + row
        positions = {"slot_mapping": slots, "block_table": None, "seq_lens": None, "position_ids": last}
        found["slots and positions"] = Option(bind(_with(call, positions)), own_bytes=2 * slots.nbytes)
        found |= _steps_of(call)
    return found


def _steps_of(call: AppendCall) -> dict[str, Option]:
    """An append's tokens in one launch with attention over their requests: in its caches, and in head-major ones."""
    heads_first = [cache.transpose(1, 2).contiguous() for cache in (call.k_cache, call.v_cache)]
    found = _steps_over(call, (call.k_cache, call.v_cache), "NHD", "append_and_decode")
    return found | _steps_over(call, heads_first, "HND", "append_and_decode, heads first")


def _steps_over(call: AppendCall, caches: Iterable[torch.Tensor], layout: str, plain: str) -> dict[str, Option]:
    """``plain``: the name of the step over caches of rows as they come."""
    assert call.q is not None and call.seq_lens is not None
    k_cache, v_cache = caches
    given = {"k_cache": k_cache, "v_cache": v_cache, "cache_layout": layout, "seq_lens": call.seq_lens,
             "block_table": call.block_table, "kv_format": (call.k_format, call.v_format), "rope": call.rope,
             "k_scale": call.k_scale, "v_scale": call.v_scale}  # fmt: skip
    new = [x[:, None] for x in (call.q, call.k, call.v)]

    def step(**options: Any) -> Call:
        return lambda: append_and_decode(*new, **(given | options))

    found = {plain: Option(step(), plain=plain)}
    for name, transform in transforms(call.num_kv_heads, call.k.shape[2], call.k.device).items():
        found[f"{name}: {plain}"] = Option(step(transform=transform), plain=plain, bar=STEP_BAR)
    return found


def _with(call: AppendCall, changes: Mapping[str, Any]) -> AppendCall:
    return call._replace(**changes)


def measure(bench: Bench, options: Mapping[str, Option]) -> dict[str, dict[str, Any]]:
    """By name: median us, what it takes more than what it is compared with, and how much that may be."""
    graphs = {name: capture(option.call) for name, option in options.items()}
    found = {}
    for name, option in options.items():
        pair = {each: graphs[each] for each in (option.plain, name)}
        times = [time_cold_in_turn(pair, bench.flush, bench.protocol) for _ in range(RUNS)]
        runs = [{each: timing.median_us for each, timing in run.items()} for run in times]
        plain, us = (statistics.median(run[each] for run in runs) for each in (option.plain, name))
        more = statistics.median(run[name] - run[option.plain] for run in runs)
        allowed = option.allowed_us(plain)
        found[name] = {
            "us": us,
            "plain_us": plain,
            "more_us": more,
            "allowed_us": allowed,
            "met": more <= allowed,
            "than": option.plain,
        }
    return found


def run_decode(bench: Bench, batches: Iterable[int], formats: Iterable[str]) -> None:
    """A row for each shape and format under the record's key "options"."""
    formats = tuple(formats)
    cases = [(paged_for(name, shape), name) for shape in decode_shapes(batches) for name in formats]
    run_cases(bench, cases, lambda shape, name: decode_options(make_inputs(shape, name)))


def paged_for(kv_format: str, shape: DecodeShape) -> DecodeShape:
    """The shape in pages that hold whole blocks of a format."""
    return replace(shape, page_size=max(shape.page_size, format_of(kv_format).block_tokens))


def run_append(bench: Bench, chosen: Iterable[AppendShape], formats: Iterable[str]) -> None:
    formats = tuple(formats)
    run_cases(bench, [(shape, name) for shape in chosen for name in formats], append_options)


def run_cases(
    bench: Bench, cases: Iterable[tuple[Any, str]], make: Make, check: Callable[[dict[str, Option]], None] | None = None
) -> None:
    """A row for each (shape, name of a format) of the options that ``make`` makes; their kernels are compiled first.

    check: of the options of a case, raises WrongOutput where a result is not right.
    """
    rows: list[dict[str, Any]] = []
    cases = list(cases)

    def needed() -> list[KernelSpec]:
        calls = (lambda c=case: [option.call for option in make(*c).values()] for case in cases)
        return kernels.needed_by_cases(calls)

    bench.attempt("kernels", lambda: kernels.make_ready(needed(), bench.say))

    def one(shape: Any, kv_format: str) -> None:
        options = make(shape, kv_format)
        if check is not None:
            check(options)
        rows.append({"name": shape.name, "kv_format": kv_format, "options": measure(bench, options)})
        bench.recorder.set("options", rows)

    for shape, kv_format in cases:
        bench.attempt(f"options: {kv_format} {shape.name}", lambda s=shape, f=kv_format: one(s, f))


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table."""
    cells = [["format", "shape", "option", "us", "more", "at most", ""]]
    for row in record.get("options", []):
        for name, option in row["options"].items():
            times = [number(option[key], 2) for key in ("us", "more_us", "allowed_us")]
            judged = "" if name in ("plain", option["than"]) else "ok" if option["met"] else "NOT MET"
            cells.append([row["kv_format"], row["name"], name, *times, judged])
    return "\n".join([f"{record['environment']['gpu']}", "", *aligned(cells), *closing(record)])
