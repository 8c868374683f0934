"""The fixed calls that `bench compare` times, by the package's public names alone: one process of one tree's library.

`python compare_rows.py REQUEST` with the tree first on PYTHONPATH. It is run by path, so that the same code calls two
revisions, and imports nothing of `bench`. The request is a JSON object: "tree" and "output" (paths), "rows" (names),
"prepare" (whether each row is only called once, which compiles what it lacks). What is written: an object that has for
each row {"us", "host_us" (None for rows whose host time does not count)} or {"error"}.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cute_kernels

Call = Callable[[], object]

PAGE = 64
HEAD_DIM = 128
MLA_DIM, MLA_V_DIM = 576, 512
FLUSH_BYTES = 256 << 20
SAMPLES, WARMUP = 24, 4
MOST_US = 60_000  # of a row's samples together, beyond which there are fewer of them
FEWEST_SAMPLES = 8
CLOCKS_PER_US, MAX_HEAD_START_US = 2000, 50_000  # of the host before the GPU
LAUNCH_PLACES = 4  # a launch in four takes 0.6 us longer than the others: samples fall evenly on all
HOST_CALLS, HOST_REPEATS = 100, 7
DISTINCT_PAGES = 64  # that a cache repeats: quantising takes longer than what is timed


@dataclass(frozen=True)
class Row:
    """One call. make: its builder, given a device and ``sizes``. host: whether the host's time of it counts."""

    kind: str
    make: Callable[..., Call]
    sizes: dict[str, Any] = field(default_factory=dict)
    host: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.sizes.items())])


def random_of(device: str, *size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)


# -- products ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def weight(device: str, n: int, k: int, bits: int = 4, group: int = 128) -> Any:
    return cute_kernels.quantize_weight(random_of(device, n, k) * k**-0.5, bits, group)


def linear(device: str, *, n: int, k: int, m: int, bits: int = 4, group: int = 128, **options: Any) -> Call:
    x, packed = random_of(device, m, k), weight(device, n, k, bits, group)
    return partial(cute_kernels.quantized_linear, x, packed, out=x.new_empty(m, n), **options)


def with_norm(device: str, *, n: int, k: int, m: int) -> Call:
    """A product that leaves its residual's norm to the next one."""
    x, residual, norm = random_of(device, m, k), random_of(device, m, n), random_of(device, n)
    packed = weight(device, n, k)
    return partial(cute_kernels.quantized_linear_norm, x, packed, residual=residual, norm=norm)


def layer(device: str, *, hidden: int, inner: int, qkv: int, m: int) -> Call:
    """The four products between two attentions."""
    sizes = ((hidden, hidden), (2 * inner, hidden), (hidden, inner), (qkv, hidden))
    weights = [cute_kernels.quantize_weight(random_of(device, n, k) * k**-0.5) for n, k in sizes]
    x, residual, norm = random_of(device, m, hidden), random_of(device, m, hidden), random_of(device, hidden)
    return partial(cute_kernels.quantized_layer, x, *weights, residual=residual, norm=norm, following_norm=norm)


@functools.lru_cache(maxsize=1)
def experts(device: str, count: int, hidden: int, inner: int) -> tuple[Any, Any]:
    gate_up = random_of(device, count, 2 * inner, hidden) * hidden**-0.5
    down = random_of(device, count, hidden, inner) * inner**-0.5
    return (
        cute_kernels.quantize_experts(gate_up, halves_in_turn=True),
        cute_kernels.quantize_experts(down),
    )


def moe(device: str, *, experts_: int, topk: int, hidden: int, inner: int, tokens: int) -> Call:
    gate_up, down = experts(device, experts_, hidden, inner)
    x = random_of(device, tokens, hidden)
    shares, chosen = random_of(device, tokens, experts_, seed=1).float().softmax(-1).topk(topk)
    return partial(cute_kernels.fused_moe, x, gate_up, down, shares, chosen.int(), out=torch.empty_like(x))


# -- attention ---------------------------------------------------------------------------------------------------------


def cache(device: str, fmt: Any, pages: int, heads: int, scale: torch.Tensor | None, seed: int) -> torch.Tensor:
    """[pages, PAGE, heads, row] that repeat the same tokens."""
    distinct = random_of(device, min(pages, DISTINCT_PAGES), PAGE, heads, HEAD_DIM, seed=seed)
    rows = distinct if fmt == "bf16" else cute_kernels.quantize_kv(distinct, kv_format=fmt, scale=scale)
    return rows.repeat(-(-pages // len(rows)), 1, 1, 1)[:pages].contiguous()


def caches(device: str, fmt: str, batch: int, tokens: int, heads: int) -> dict[str, Any]:
    """What attention is given of a cache in pages, in random order."""
    pages = batch * -(-tokens // PAGE)
    scale = torch.tensor(4.0 / 448, device=device) if fmt.endswith("_tensor") else None
    order = torch.randperm(pages, generator=torch.Generator(device).manual_seed(2), device=device, dtype=torch.int32)
    return {
        "k_cache": cache(device, fmt, pages, heads, scale, 3),
        "v_cache": cache(device, fmt, pages, heads, scale, 4),
        "seq_lens": torch.full((batch,), tokens, dtype=torch.int32, device=device),
        "block_table": order.view(batch, -1),
        "kv_format": fmt,
        **({} if scale is None else {"k_scale": scale, "v_scale": scale}),
    }


def decode(
    device: str, *, fmt: str, batch: int, tokens: int, q_heads: int = 32, kv_heads: int = 8, q_len: int = 1
) -> Call:
    q = random_of(device, batch, q_len, q_heads, HEAD_DIM)
    given = caches(device, fmt, batch, tokens, kv_heads)
    return partial(cute_kernels.decode_attention, q, out=torch.empty_like(q), **given)


def extend(
    device: str, *, fmt: str, batch: int, q_len: int, tokens: int, q_heads: int = 32, kv_heads: int = 8, **options: Any
) -> Call:
    q = random_of(device, batch * q_len, q_heads, HEAD_DIM)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
    given = caches(device, fmt, batch, tokens, kv_heads)
    return partial(cute_kernels.extend_attention, q, cu_seqlens_q=ends, out=torch.empty_like(q), **given, **options)


def new_rows(device: str, batch: int, q_heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    fused = random_of(device, batch, q_heads + 2 * kv_heads, HEAD_DIM)
    return fused.split((q_heads, kv_heads, kv_heads), dim=1)


def append(device: str, *, fmt: str, batch: int, tokens: int, q_heads: int = 32, kv_heads: int = 8) -> Call:
    q, k, v = new_rows(device, batch, q_heads, kv_heads)
    given = caches(device, fmt, batch, tokens, kv_heads)
    rope = cute_kernels.Rope(HEAD_DIM, theta=500000.0)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=device)
    return partial(cute_kernels.append_kv, k, v, q=q, q_out=q_out, rope=rope, **given)


def step(device: str, *, fmt: str, batch: int, tokens: int, q_heads: int = 32, kv_heads: int = 8) -> Call:
    q, k, v = (rows[:, None] for rows in new_rows(device, batch, q_heads, kv_heads))
    given = caches(device, fmt, batch, tokens, kv_heads)
    rope = cute_kernels.Rope(HEAD_DIM, theta=500000.0)
    return partial(cute_kernels.append_and_decode, q, k, v, rope=rope, **given)


def mla_cache(device: str, fmt: Any, pages: int) -> torch.Tensor:
    distinct = random_of(device, min(pages, DISTINCT_PAGES), PAGE, MLA_DIM) * 0.1
    rows = cute_kernels.quantize_mla_kv(distinct, kv_format=fmt)
    return rows.repeat(-(-pages // len(rows)), 1, 1)[:pages].contiguous()


def mla(device: str, *, fmt: str, batch: int, heads: int, tokens: int, q_len: int = 1) -> Call:
    q = random_of(device, batch, q_len, heads, MLA_DIM)
    pages = batch * -(-tokens // PAGE)
    table = torch.randperm(pages, device=device, dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    given: dict[str, Any] = {"kv_format": fmt, "block_table": table, "softmax_scale": 0.5}
    out = q.new_empty(batch, q_len, heads, MLA_V_DIM)
    return partial(cute_kernels.mla_decode, q, mla_cache(device, fmt, pages), lengths, out=out, **given)


def sparse_mla(device: str, *, fmt: str, batch: int, heads: int, topk: int, q_len: int = 1) -> Call:
    q = random_of(device, batch, q_len, heads, MLA_DIM)
    pages = max(DISTINCT_PAGES * 8, 2 * topk // PAGE)
    dice = torch.Generator(device).manual_seed(5)
    size = (batch, q_len, topk)
    indices = torch.randint(0, pages * PAGE, size, generator=dice, device=device, dtype=torch.int32)
    given: dict[str, Any] = {"kv_format": fmt, "softmax_scale": 0.5}
    out = q.new_empty(batch, q_len, heads, MLA_V_DIM)
    return partial(cute_kernels.sparse_mla_decode, q, mla_cache(device, fmt, pages), indices, out=out, **given)


def norm(device: str, *, rows: int, hidden: int) -> Call:
    x, residual, scale = random_of(device, rows, hidden), random_of(device, rows, hidden), random_of(device, hidden)
    outs = {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)}
    return partial(cute_kernels.rms_norm, x, scale, residual=residual, **outs)


MIXTRAL = {"experts_": 8, "topk": 2, "hidden": 4096, "inner": 14336}
QWEN3 = {"experts_": 128, "topk": 8, "hidden": 2048, "inner": 768}
LLAMA = {"hidden": 4096, "inner": 14336, "qkv": 6144}

ROWS = (
    *(Row("linear", linear, {"n": 28672, "k": 4096, "m": m}, m == 1) for m in (1, 8, 16, 64, 256, 2048)),
    *(Row("linear", linear, {"n": 4096, "k": 14336, "m": m}) for m in (1, 8, 32)),
    *(Row("linear", linear, {"n": 6144, "k": 4096, "m": m}) for m in (1, 16)),
    Row("linear", linear, {"n": 9216, "k": 4608, "m": 256}),
    *(Row("linear", linear, {"n": 8192, "k": 8192, "m": m, "bits": 8}) for m in (1, 64)),
    Row("linear", linear, {"n": 28672, "k": 4096, "m": 16, "group": 32}),
    Row("linear", linear, {"n": 4096, "k": 14336, "m": 32, "batch_invariant": True}),
    Row("with_norm", with_norm, {"n": 4096, "k": 4096, "m": 32}),
    Row("layer", layer, {**LLAMA, "m": 1}),
    *(Row("moe", moe, {**MIXTRAL, "tokens": tokens}, tokens == 1) for tokens in (1, 32, 512)),
    *(Row("moe", moe, {**QWEN3, "tokens": tokens}) for tokens in (1, 8, 128)),
    *(Row("decode", decode, {"fmt": "int4_g4", "batch": batch, "tokens": 8192}, batch == 1) for batch in (1, 32)),
    Row("decode", decode, {"fmt": "bf16", "batch": 32, "tokens": 8192}),
    Row("decode", decode, {"fmt": "int8_token_head", "batch": 32, "tokens": 8192}),
    Row("decode", decode, {"fmt": "int4_g1", "batch": 128, "tokens": 8192, "q_heads": 8, "kv_heads": 1}),
    Row("decode", decode, {"fmt": "int4_g1", "batch": 32, "tokens": 8192, "q_len": 4}),
    Row("extend", extend, {"fmt": "bf16", "batch": 4, "q_len": 4096, "tokens": 4096}),
    Row("extend", extend, {"fmt": "bf16", "batch": 1, "q_len": 512, "tokens": 8192}, True),
    Row("extend", extend, {"fmt": "int8_token_head", "batch": 1, "q_len": 512, "tokens": 8192}),
    Row("extend", extend, {"fmt": "int4_g4", "batch": 1, "q_len": 2048, "tokens": 32768}),
    Row("extend", extend, {"fmt": "int8_token_head", "batch": 32, "q_len": 17, "tokens": 8192}),
    Row("extend", extend, {"fmt": "e4m3_tensor", "batch": 1, "q_len": 2048, "tokens": 8192, "fp8_products": True}),
    *(Row("append", append, {"fmt": fmt, "batch": 32, "tokens": 1024}, fmt == "bf16") for fmt in ("bf16", "int4_g4")),
    Row("step", step, {"fmt": "int4_g4", "batch": 32, "tokens": 8192}, True),
    Row("mla", mla, {"fmt": "mla_bf16", "batch": 128, "heads": 128, "tokens": 4096}),
    Row("mla", mla, {"fmt": "mla_fp8", "batch": 128, "heads": 16, "tokens": 4096}, True),
    Row("sparse_mla", sparse_mla, {"fmt": "mla_fp8", "batch": 128, "heads": 128, "topk": 2048, "q_len": 2}),
    Row("sparse_mla", sparse_mla, {"fmt": "mla_fp8", "batch": 128, "heads": 16, "topk": 2048}),
    Row("norm", norm, {"rows": 32, "hidden": 4096}, True),
)


# -- timing ------------------------------------------------------------------------------------------------------------


class GpuClock:
    """Times calls with a cold L2 by events, and on the host."""

    def __init__(self) -> None:
        self._buffer = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        """Makes L2 cold by reading: lines that were written would have to be written back meanwhile."""
        torch.sum(self._buffer, dim=0, out=self._sum)

    def cold_us(self, call: Call) -> float:
        """The median of samples that are queued behind a kernel for as long as the host takes to queue them."""
        for _ in range(WARMUP):
            self.flush()
            call()
        samples, round_us = self._samples(call)
        torch.cuda._sleep(int(CLOCKS_PER_US * min(2 * round_us * samples, MAX_HEAD_START_US)))
        pairs = []
        for sample in range(samples):
            for _ in range(sample % LAUNCH_PLACES):
                torch.cuda._sleep(0)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush()
            start.record()
            call()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(1e3 * start.elapsed_time(stop) for start, stop in pairs)

    def _samples(self, call: Call) -> tuple[int, float]:
        """How many samples there are to be, and microseconds that the host takes for one."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.flush()
        call()
        round_us = 1e6 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole_us = 1e6 * (time.perf_counter() - begin)
        return max(FEWEST_SAMPLES, min(SAMPLES, int(MOST_US / whole_us))), round_us

    def host_us(self, call: Call) -> float:
        """The least of repeats of the mean over calls without a synchronisation between them."""
        means = []
        for _ in range(HOST_REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            means.append(1e6 * (time.perf_counter() - begin) / HOST_CALLS)
        torch.cuda.synchronize()
        return min(means)


class OneCall:
    """Calls once: what is missing is compiled."""

    def cold_us(self, call: Call) -> float:
        call()
        return 0.0

    def host_us(self, call: Call) -> float:
        return 0.0


def measure(rows: Iterable[Row], clock: Any, device: str = "cuda") -> dict[str, dict[str, Any]]:
    """What each row takes; a row that fails says why, and the others go on."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        try:
            call = row.make(device, **row.sizes)
            found[row.name] = {"us": clock.cold_us(call), "host_us": clock.host_us(call) if row.host else None}
        except Exception as error:
            found[row.name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=json.loads, metavar="REQUEST", help="a JSON object")
    request: dict[str, Any] = parser.parse_args(arguments).request
    found = Path(str(cute_kernels.__file__)).resolve().parent.parent
    if found != Path(request["tree"]).resolve():
        raise SystemExit(f"cute_kernels was imported from {found}, not from {request['tree']}")
    wanted = set(request["rows"])
    clock = OneCall() if request["prepare"] else GpuClock()
    result = measure([row for row in ROWS if row.name in wanted], clock)
    Path(request["output"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
