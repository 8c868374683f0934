"""Benchmark of append_kv: decode beside an empty launch and its bytes' time, prefill beside a copy of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench.report import aligned, number
from bench.suites import Bench, WrongOutput
from bench.timing import empty_launch, time_cold, time_graph_cold, time_host
from bench.workloads import beside_rows, given_scale
from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import Llama3Scaling, Rope, append_kv
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.reference import append_kv_reference

FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "int8_head", "e4m3_head", "e5m2")
BATCHES = (1, 8, 32, 128, 512)
PREFILL_TOKENS = 65536
PREFILL_REQUESTS = 16
PAGE_SIZE = 64
DECODE_LENGTH = 1000  # tokens before the new one
ROPE = Rope(128, theta=500000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
COPY_BYTES = 1 << 30  # the buffer that the bandwidth of a copy is measured on
SAMPLED_TOKENS = 64
TOLERANCE = 4e-3  # relative error (norm) of q in bf16


@dataclass(frozen=True)
class AppendShape:
    """One append: Llama-3-8B's heads by default, a page of 64 tokens."""

    suite: str
    tokens: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def num_bytes(self, kv_format: str) -> int:
        """What must be read and written: q, k and v in bf16, the turned q, and the rows."""
        dense = 2 * self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        return self.tokens * (dense + 2 * self.num_kv_heads * format_of(kv_format).row_bytes(self.head_dim))

    @property
    def name(self) -> str:
        tokens = f"B={self.tokens}" if self.suite == "decode" else f"{self.tokens} tokens"
        return f"{self.suite} {tokens} HQ={self.num_q_heads} HKV={self.num_kv_heads} D={self.head_dim}"


def shapes(suites: Iterable[str], batches: Iterable[int]) -> list[AppendShape]:
    """Decode at each batch, also with one KV head; prefill of 64k tokens, also for MHA."""
    found = []
    if "decode" in suites:
        found += [AppendShape("decode", batch) for batch in batches]
        found += [AppendShape("decode", max(batches), num_q_heads=8, num_kv_heads=1)]
    if "prefill" in suites:
        found += [AppendShape("prefill", PREFILL_TOKENS)]
        found += [AppendShape("prefill", PREFILL_TOKENS, num_q_heads=8, num_kv_heads=1)]
        found += [AppendShape("prefill", PREFILL_TOKENS // 2, num_q_heads=32, num_kv_heads=32)]
    return found


def make_call(shape: AppendShape, kv_format: str, device: str = "cuda") -> AppendCall:
    """Views of one fused QKV tensor, pages in random order."""
    generator = torch.Generator(device).manual_seed(0)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    size = (shape.tokens, heads, shape.head_dim)
    form = format_of(kv_format)
    dtype = torch.bfloat16 if form.is_coded else form.cache_dtype
    fused = torch.randn(size, generator=generator, dtype=dtype, device=device)
    q, k, v = fused.split((shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    decode = shape.suite == "decode"
    batch = shape.tokens if decode else PREFILL_REQUESTS
    new = shape.tokens // batch
    length = DECODE_LENGTH + 1 if decode else new
    max_pages = -(-length // PAGE_SIZE)
    cache = (batch * max_pages, PAGE_SIZE, shape.num_kv_heads, form.row_elements(shape.head_dim))
    table = torch.randperm(batch * max_pages, generator=generator, device=device).view(batch, max_pages)
    scale = given_scale(kv_format, shape.num_kv_heads, shape.head_dim, device)
    return AppendCall(
        k=k,
        v=v,
        k_cache=torch.zeros(cache, dtype=form.cache_dtype, device=device),
        v_cache=torch.zeros(cache, dtype=form.cache_dtype, device=device),
        k_format=kv_format,
        v_format=kv_format,
        rope=ROPE,
        q=q,
        q_out=torch.empty(q.shape, dtype=q.dtype, device=device),
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
        block_table=table.to(torch.int32),
        cu_seqlens=None if decode else torch.arange(batch + 1, dtype=torch.int32, device=device) * new,
        k_scale=scale,
        v_scale=scale,
    )


def bind(call: AppendCall) -> Callable[[], object]:
    """The public call, with nothing left to pass."""
    given = call._asdict()
    given["kv_format"] = (given.pop("k_format"), given.pop("v_format"))
    given["qkv_bias"] = tuple(given.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
    return lambda: append_kv(**given)


def check(call: AppendCall, append: Callable[[], object] | None = None) -> float:
    """Relative error of q against the reference; WrongOutput if it or the rows that K and V decode to are off.

    append: what is checked, if not the public call.
    """
    (append or bind(call))()
    assert call.q is not None and call.q_out is not None
    wanted = call._replace(k_cache=torch.zeros_like(call.k_cache), v_cache=torch.zeros_like(call.v_cache))
    q = append_kv_reference(wanted)
    assert q is not None
    errors = {"q": _error(call.q_out, q)}
    for name, form, scale in zip(("k_cache", "v_cache"), call.formats, (call.k_scale, call.v_scale), strict=True):
        rows, want = (
            form.dequantize(
                getattr(of, name)[:SAMPLED_TOKENS], call.k.shape[2], torch.float32, beside_rows(form, scale)
            )
            for of in (call, wanted)
        )
        errors[name] = _error(rows, want)
    if not all(error <= TOLERANCE for error in errors.values()):
        raise WrongOutput(f"relative errors {errors}, want at most {TOLERANCE:g}")
    return errors["q"]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm().clamp(min=1e-30))


def run(bench: Bench, chosen: Iterable[AppendShape], formats: Iterable[str], peers: bool) -> None:
    """One row per shape and format under the record's key "append"."""
    rows: list[dict[str, Any]] = []
    formats = tuple(formats)
    empty = time_cold(empty_launch, bench.flush, bench.protocol).median_us
    bench.recorder.set("empty_launch_us", empty)
    copy_bytes_per_us = COPY_BYTES / copy_us(bench, COPY_BYTES)
    bench.recorder.set("copy_gb_per_s", round(copy_bytes_per_us * 1e-3, 1))

    def work(shape: AppendShape, kv_format: str) -> None:
        rows.append(_measure(bench, shape, kv_format, empty, copy_bytes_per_us, peers))
        bench.recorder.set("append", rows)

    for shape in chosen:
        for kv_format in formats:
            bench.attempt(f"append: {kv_format} {shape.name}", lambda s=shape, f=kv_format: work(s, f))
    bench.attempt("append: host cost", lambda: _host_cost(bench))


def _measure(
    bench: Bench, shape: AppendShape, kv_format: str, empty: float, copy_bytes_per_us: float, peers: bool
) -> dict[str, Any]:
    call = make_call(shape, kv_format)
    error = check(call)
    work = bind(call)
    num_bytes = shape.num_bytes(kv_format)
    row: dict[str, Any] = {
        "name": shape.name,
        "shape": asdict(shape),
        "kv_format": kv_format,
        "bytes": num_bytes,
        "error": error,
        "us": time_cold(work, bench.flush, bench.protocol).as_dict(),
        "empty_launch_us": empty,
        "bytes_us": num_bytes / copy_bytes_per_us,
    }
    if shape.suite == "decode":
        row["graph_us"] = time_graph_cold(work, bench.flush, bench.protocol).as_dict()
    if peers:
        torch_ops = time_cold(partial(append_kv_reference, call), bench.flush, bench.protocol)
        row["peers"] = {"torch ops": torch_ops.median_us}
    if shape.suite == "prefill":
        row["copy_us"] = copy_us(bench, num_bytes)
    return row


def copy_us(bench: Bench, num_bytes: int) -> float:
    """Microseconds of a device copy that reads and writes ``num_bytes`` together, at least 2."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return time_cold(lambda: target.copy_(source), bench.flush, bench.protocol).median_us


def _host_cost(bench: Bench) -> None:
    call = make_call(AppendShape("decode", 1), "int4_g4")
    given = time_host(bind(call)).median_us
    fresh = time_host(bind(call._replace(q_out=None))).median_us
    bench.recorder.set("append_host_us", {"eager with q_out=": round(given, 3), "eager": round(fresh, 3)})


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table."""
    head = [
        "format",
        "shape",
        "MB",
        "us",
        "min",
        "graph",
        "empty",
        "bytes us",
        "(us - empty) / bytes",
        "copy us",
        "/ copy",
    ]
    cells = [[*head, "torch ops"]]
    for row in record.get("append", []):
        us, copy = row["us"]["median_us"], row.get("copy_us")
        cells.append([
            row["kv_format"],
            row["name"],
            number(row["bytes"] * 1e-6),
            number(us),
            number(row["us"]["min_us"]),
            number(row["graph_us"]["median_us"] if "graph_us" in row else None),
            number(row["empty_launch_us"]),
            number(row["bytes_us"]),
            number((us - row["empty_launch_us"]) / row["bytes_us"], 2),
            number(copy),
            number(us / copy if copy else None, 2),
            number(row.get("peers", {}).get("torch ops")),
        ])  # fmt: skip
    lines = [
        f"{record['environment']['gpu']}: copies {record.get('copy_gb_per_s')} GB/s, read and written",
        "",
        *aligned(cells),
    ]
    lines += ["", f"host cost per call, us: {record.get('append_host_us')}"]
    lines += [
        f"{'ok     ' if bar['met'] else 'NOT MET'} {bar['what']}: {bar['measured']} ({bar['bar']})"
        for bar in record["bars"]
    ]
    lines += [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join(lines)
