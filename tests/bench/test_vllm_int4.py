"""vLLM's own INT4 attention as a peer: how its pages are read, what is refused, and what the README shows of it."""

from __future__ import annotations

import pytest
import torch

from bench import vllm_int4
from bench.timing import Clock, Protocol, Timing, ticking
from bench.vllm_int4 import Engine, VllmCache
from bench.workloads import DecodeShape
from cute_kernels.kv_cache.vllm_rows import vllm_transform
from layouts.kv import ZeroPointRow

SHAPE = DecodeShape(3, seq_len=128)
DIM = SHAPE.head_dim


def fill(cache: VllmCache) -> None:
    """As vLLM does: K and V rotated, then rows of codes with a scale behind them."""
    transform, form = vllm_transform(1, DIM), ZeroPointRow(DIM)
    tokens = cache.pages.shape[0] * cache.pages.shape[1]
    k, v = (torch.randn(tokens, 1, DIM) for _ in "kv")
    cache.k.copy_(form.quantize(transform.keys(k)).view_as(cache.k))
    cache.v.copy_(form.quantize(transform.values(v)).view_as(cache.v))


def rotated(cache: VllmCache, q: torch.Tensor) -> torch.Tensor:
    """vLLM's algebra: q times signs and an unnormalised Hadamard matrix, divided by head_dim; the output back."""
    signs = vllm_transform(1, DIM).k_factor
    assert signs is not None
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < DIM:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs, form = signs.sign().double(), ZeroPointRow(DIM)
    k, v = (form.dequantize(rows.flatten(0, 1)).double().view(SHAPE.batch, -1, DIM) for rows in (cache.k, cache.v))
    scores = torch.einsum("bhd,btd->bht", (q.double() * signs) @ hadamard, k) * DIM**-0.5 / DIM
    return torch.einsum("bht,btd->bhd", scores.softmax(-1), v) @ hadamard * signs / DIM


def ways(factor: float = 1.0):
    def made(cache: VllmCache, q: torch.Tensor, out: torch.Tensor):
        for name, us in (("slow", 20.0), ("fast", 10.0)):

            def call() -> None:
                out.copy_(factor * rotated(cache, q))

            call.us = us  # type: ignore[attr-defined]
            yield name, call

    return made


def measured(engine: Engine) -> dict:
    def in_turn(calls, flush, protocol):
        return {name: Timing(call.us, call.us, call.us, protocol.samples) for name, call in calls.items()}

    with ticking(Clock(in_turn, lambda call, warmup: call)):
        return vllm_int4.vllms(SHAPE, lambda: None, Protocol(samples=3), "cpu", engine)


def test_scales_lie_behind_the_codes_of_their_rows():
    cache = vllm_int4.empty_cache(SHAPE, 16, "cpu")
    fill(cache)
    for rows, words in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        behind = rows[..., DIM // 2 :].contiguous().view(torch.float32).squeeze(-1)
        assert torch.equal(behind, words) and bool((words > 0).all())


def test_the_fastest_way_that_is_right_speaks_for_vllm():
    found = measured(Engine(fill, ways()))
    assert found["us"]["median_us"] == 10.0 and found["way"] == f"pages of {vllm_int4.PAGE_SIZES[0]}, fast"
    assert found["error"] < 5e-3 and len(found["ways"]) == 2 * len(vllm_int4.PAGE_SIZES)


@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_a_wrong_output_is_not_timed(factor: float):
    with pytest.raises(RuntimeError, match="vLLM's output, .*pages of 16, slow: relative error"):
        measured(Engine(fill, ways(factor)))
