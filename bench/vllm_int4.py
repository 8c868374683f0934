"""vLLM's own attention over `int4_per_token_head` caches (Triton) beside `int4_g1`: `python -m bench.vllm_int4`.

Both caches take as many bytes. vLLM's call is what its engine makes for a step of decoding, in a CUDA graph: q is
rotated, attention reads the pages, parts are summed, the output is rotated back. Its page sizes and both of its ways,
with a request's tokens in segments and without, are tried; the fastest speaks for it. Its output is compared with
fp64 attention over the rows that it wrote. Needs vLLM 0.26 and a GPU.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.entry import Entry
from bench.peers import relative_error
from bench.record import RESULTS, Recorder, load
from bench.report import number
from bench.suites import TOLERANCE, reference_rows
from bench.timing import ColdL2, Protocol, capture, time_cold
from bench.workloads import DecodeShape, main_shapes, make_inputs
from cute_kernels.kv_cache.vllm_rows import vllm_transform
from layouts.kv import ZeroPointRow

BATCHES = (1, 32, 128, 512)
PAGE_SIZES = (16, 64)
SEGMENTS = 16  # of a request, where vLLM cuts it: NUM_PAR_SOFTMAX_SEGMENTS of its backend
OURS = "int4_g1"
SCALE_BYTES = 4
CHECKED = 4
AGREEMENT = 0.1
"""Relative error (norm) that vLLM's output must stay under: it multiplies in TF32, and values average out over many
tokens, to a hundredth. Over 8192 it gave 0.048; a wrong rotation gives 1.4."""


@dataclass
class VllmCache:
    """vLLM's pages, each request's one after the other.

    Attributes:
        pages: uint8 [pages, page_size, num_kv_heads, K's row and V's row]. k, v: views of the rows.
        k_scale, v_scale: fp32 views [pages, page_size, num_kv_heads] of the words behind the codes.
        table: int32 [batch, pages of a request].
    """

    pages: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    table: torch.Tensor


def empty_cache(shape: DecodeShape, page_size: int, device: str) -> VllmCache:
    """Pages as vLLM 0.26's `TritonAttentionBackend.get_kv_cache_shape` has them."""
    row = shape.head_dim // 2 + SCALE_BYTES
    count = shape.batch * shape.seq_len // page_size
    pages = torch.zeros(count, page_size, shape.num_kv_heads, 2 * row, dtype=torch.uint8, device=device)
    k, v = pages.split(row, -1)
    words = pages.view(torch.float32)
    last = row // SCALE_BYTES
    table = torch.arange(count, dtype=torch.int32, device=device).view(shape.batch, -1)
    return VllmCache(pages, k, v, words[..., last - 1], words[..., 2 * last - 1], table)


def fill(cache: VllmCache, chunk: int = 1 << 18) -> None:
    """Gaussian K and V, rotated and quantised by vLLM."""
    from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4

    heads, head_dim = cache.k.shape[2], 2 * (cache.k.shape[3] - SCALE_BYTES)
    slots = torch.arange(cache.pages.shape[0] * cache.pages.shape[1], device=cache.pages.device)
    for part in slots.split(chunk):
        k, v = (torch.randn(len(part), heads, head_dim, dtype=torch.bfloat16, device=part.device) for _ in "kv")
        scales = {"k_scale_cache": cache.k_scale, "v_scale_cache": cache.v_scale}
        reshape_and_cache_int4(k, v, cache.k, cache.v, part, **scales)


def expected(cache: VllmCache, q: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """fp64 attention of some requests over what the cache holds."""
    heads, head_dim = cache.k.shape[2], q.shape[-1]
    transform = vllm_transform(heads, head_dim, device=q.device)
    form = ZeroPointRow(head_dim)
    outs = []
    for request in requests.tolist():
        pages = cache.table[request].long()
        k, v = (form.dequantize(rows[pages].flatten(0, 1).contiguous()) for rows in (cache.k, cache.v))
        k, v = transform.original_keys(k).double(), transform.restore(v).double()
        own = q[request].double().view(heads, -1, head_dim)
        weights = (torch.einsum("hgd,thd->hgt", own, k) * head_dim**-0.5).softmax(-1)
        outs.append(torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1))
    return torch.stack(outs)


def ways(cache: VllmCache, q: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """A step of decoding as vLLM's Triton backend calls it: with requests cut into segments, and whole ones."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    batch, heads, head_dim = q.shape
    tokens = cache.table.shape[1] * cache.pages.shape[1]
    parts = [torch.empty(batch, heads, SEGMENTS, *more, device=q.device) for more in ((head_dim,), (), ())]
    given = {
        "q": q,
        "k": cache.k,
        "v": cache.v,
        "out": out,
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=q.device),
        "max_seqlen_q": 1,
        "seqused_k": torch.full((batch,), tokens, dtype=torch.int32, device=q.device),
        "max_seqlen_k": tokens,
        "softmax_scale": head_dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": cache.table,
        "softcap": 0.0,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
        "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD,
        "k_scale_cache": cache.k_scale,
        "v_scale_cache": cache.v_scale,
    }
    names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    cut = {"seq_threshold_3D": batch, "num_par_softmax_segments": SEGMENTS, **dict(zip(names, parts, strict=True))}
    yield f"{SEGMENTS} segments", lambda: unified_attention(**given, **cut)
    yield "whole requests", lambda: unified_attention(**given)


@dataclass(frozen=True)
class Engine:
    """vLLM's part: what writes K and V into its pages, and its ways to attend over them."""

    fill: Callable[[VllmCache], None] = fill
    ways: Callable[[VllmCache, torch.Tensor, torch.Tensor], Iterator[tuple[str, Callable[[], object]]]] = ways


def vllms(
    shape: DecodeShape, flush: Callable[[], None], protocol: Protocol, device: str, engine: Engine | None = None
) -> dict[str, Any]:
    """The fastest of vLLM's ways: its time, its name, its error; times of all.

    Raises:
        RuntimeError: an output is not what the rows in the cache give.
    """
    engine = engine or Engine()
    best: dict[str, Any] = {}
    all_us: dict[str, float] = {}
    q = torch.randn(shape.batch, shape.num_q_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    requests = torch.linspace(0, shape.batch - 1, min(CHECKED, shape.batch), device=device).long()
    for page_size in PAGE_SIZES:
        cache = empty_cache(shape, page_size, device)
        engine.fill(cache)
        want = expected(cache, q, requests)
        out = torch.full_like(q, torch.nan)
        for way, call in engine.ways(cache, q, out):
            label = f"pages of {page_size}, {way}"
            out.fill_(torch.nan)
            call()
            error = relative_error(out[requests], want)
            if not error <= AGREEMENT or not bool(torch.isfinite(out).all()):
                raise RuntimeError(f"vLLM's output, {shape.name}, {label}: relative error {error:.2e}")
            timing = time_cold(capture(call), flush, protocol)
            all_us[label] = timing.median_us
            if not best or timing.median_us < best["us"]["median_us"]:
                best = {"us": timing.as_dict(), "way": label, "error": error}
    return {**best, "ways": all_us}


def ours(shape: DecodeShape, flush: Callable[[], None], protocol: Protocol, device: str) -> dict[str, Any]:
    """This package's attention over as many bytes."""
    inputs = make_inputs(shape, OURS, device=device)
    rows, want = reference_rows(inputs)
    out = torch.full_like(inputs.q, torch.nan)
    call = Entry().bind(inputs, out=out)
    call()
    error = relative_error(out[rows], want)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{OURS}, {shape.name}: relative error {error:.2e}")
    return {"us": time_cold(call, flush, protocol).as_dict(), "error": error}


def run(recorder: Recorder, flush: Callable[[], None], protocol: Protocol, device: str = "cuda") -> None:
    """A row for each batch of the README's table."""
    import vllm

    recorder.set("vllm", vllm.__version__)
    for shape in main_shapes(BATCHES):
        row = {"suite": "vllm_int4", "name": shape.name, "shape": shape.as_dict(), "kv_format": "int4_per_token_head"}
        row |= {"vllm": vllms(shape, flush, protocol, device), "ours": ours(shape, flush, protocol, device)}
        recorder.add_row(row)
        print(text({**recorder.data, "rows": [row]}), flush=True)
        torch.cuda.empty_cache()


def text(record: dict[str, Any]) -> str:
    """A line for each row."""
    return "\n".join(
        f"{row['name']}: vLLM {record['vllm']} {number(row['vllm']['us']['median_us'])} us ({row['vllm']['way']}), "
        f"{OURS} {number(row['ours']['us']['median_us'])} us"
        for row in record["rows"]
    )


def note(record: dict[str, Any]) -> str:
    """Where and how vLLM's times were measured, for a footnote."""
    environment, samples = record["environment"], record["rows"][0]["vllm"]["us"]["samples"]
    ways = "; ".join(f"{row['shape']['batch']}: {row['vllm']['way']}" for row in record["rows"])
    return (
        f"{environment['gpu']}, {str(environment['date'])[:10]}: vLLM {record['vllm']} with `int4_per_token_head`, "
        f"with the time of its rotations of q and of the output; measured, median of {samples} calls of a CUDA graph "
        f"with a cold L2; for each number of requests vLLM's fastest way ({ways})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "vllm_int4.json")
    options = parser.parse_args(arguments)
    run(Recorder(options.json, kind="vllm_int4"), ColdL2(), Protocol())
    print(text(load(options.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
