"""Layers of a step as a chain of dependent launches: the bits of a chain whose every launch has ended before the next.

Attention lets the product behind it begin when its tokens are asked for; that must not read what is not written yet.
Kernels compile on first use: some ten small ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, quantize_kv, quantized_linear, rms_norm
from cute_kernels.kv_cache import Rope
from tests.gpu.test_linear import activations, check_back_to_back
from tests.linear.cases import known

pytestmark = pytest.mark.gpu

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 128, 64
HIDDEN, BOTH = Q_HEADS * HEAD_DIM, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
LENGTHS = {
    "one request": (2000,),
    "one token each": (1,) * 5,
    "requests that differ": (1, 700, 64, 3000, 65, 129, 2, 9),
}
LENGTHS |= {"more CTAs than there are SMs": (300,) * 200}


def cache_of(lengths: tuple[int, ...], layout: str) -> dict[str, Any]:
    """Arguments of a step: pages of random rows, each request's in an order of its own."""
    pages = -(-max(lengths) // PAGE)
    count = len(lengths) * pages
    numbers = torch.randn(count * PAGE, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    rows = quantize_kv(numbers, kv_format="int4_g4").view(count, PAGE, KV_HEADS, -1)
    rows = rows.transpose(1, 2).contiguous() if layout == "HND" else rows
    return {
        "k_cache": rows,
        "v_cache": rows.flip(0).contiguous(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(count, device="cuda").to(torch.int32).view(len(lengths), pages),
        "kv_format": "int4_g4",
        "cache_layout": layout,
        "rope": Rope(HEAD_DIM),
    }


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_no_launch_of_a_step_is_overtaken(lengths, layout):
    qkv, out = (
        known(BOTH, HIDDEN, group_size=128).pack().to("cuda"),
        known(HIDDEN, HIDDEN, group_size=128, seed=1).pack(),
    )
    out, caches = out.to("cuda"), [cache_of(lengths, layout) for _ in range(2)]
    start, norm = activations(len(lengths), HIDDEN, torch.bfloat16), activations(1, HIDDEN, torch.bfloat16, 2)[0]

    def chain(after) -> torch.Tensor:
        hidden = start.clone()
        after()
        for layer in range(4):
            x = rms_norm(hidden, norm)
            after()
            heads = quantized_linear(x, qkv).view(len(lengths), 1, -1, HEAD_DIM)
            after()
            q, k, v = heads.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=2)
            attended = append_and_decode(q, k, v, **caches[layer % 2])
            after()
            hidden = quantized_linear(attended.view(len(lengths), -1), out, residual=hidden)
            after()
        return hidden

    assert bool(check_back_to_back(chain).isfinite().all())
