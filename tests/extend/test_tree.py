"""A tree's mask for a few queries of every request: decode attention's call."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import decode_attention, pack_tree_mask
from tests.attention.cases import make_call

BATCH, Q_LEN = 3, 5


def make_case(**options):
    return make_call("bf16", [9, 5, 70], q_len=Q_LEN, head_dim=64, page_size=16, **options)


def chain() -> torch.Tensor:
    """The mask of tokens that follow each other."""
    seen = torch.ones(Q_LEN, Q_LEN).tril().bool().repeat(BATCH, 1)
    return pack_tree_mask(seen).view(BATCH, Q_LEN, 1)


def run(call, **options):
    arguments = {"kv_format": call.kv_format, "return_lse": True, **call.options, **options}
    return decode_attention(call.q, call.k_cache, call.v_cache, call.seq_lens, **arguments)


def test_a_chain_is_causal():
    call = make_case(sinks=True)
    for mine, want in zip(run(call, tree_mask=chain()), run(call), strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5 if mine.dtype == torch.float32 else 1e-2, rtol=1e-2)


def test_a_full_mask_never_becomes_causal():
    call = make_case()
    call.q.zero_()
    out = torch.empty_like(call.q)
    result, _ = run(call, tree_mask=torch.full_like(chain(), -1), out=out)
    assert result is out
    want, causal = (run(call, causal=causal)[0] for causal in (False, True))
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
    assert (out - causal).abs().max() > 0.1


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"tree_mask": chain()[:2]}, r"tree_mask: got shape \[2, 5, 1\], want \[3, 5, words\]"),
        ({"tree_mask": chain()[0]}, r"tree_mask: got shape \[5, 1\], want"),
        ({"tree_mask": chain(), "attn_bias": torch.zeros(1)}, "attn_bias: got a tensor beside a tree_mask"),
        ({"tree_mask": chain(), "window_size": 9}, "window_size: got a value beside a tree_mask"),
        ({"tree_mask": chain(), "out": torch.empty(3, 4, 8, 64)}, r"out: got shape \[3, 4, 8, 64\], want"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        run(make_case(), **changed)
