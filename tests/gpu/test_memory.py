"""What a call on a GPU writes, and where: no row of nobody's, no memory of its inputs; scales in debug mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, append_kv, arguments
from tests.attention.cases import make_call as make_decode
from tests.extend.cases import make_call as make_extend
from tests.extend.other_rows import KINDS, assert_other_rows_stay

pytestmark = pytest.mark.gpu

CUDA = "cuda"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_no_request_stay_as_they_are(kind):
    assert_other_rows_stay(kind, CUDA)


def test_out_in_place_of_q_is_refused_though_calls_like_it_were_served():
    decode = make_decode("bf16", [40, 9], num_kv_heads=2, group=4, head_dim=64, device=CUDA)
    extend = make_extend("bf16", [3, 5], [40, 9], head_dim=64, device=CUDA)
    for call in (decode, extend):
        call.run()
        call.run(out=torch.empty_like(call.q))
        before = call.q.clone()
        with pytest.raises(ValueError, match="out: got memory that q takes too"):
            call.run(out=call.q)
        assert torch.equal(call.q, before)


def test_one_tensor_is_no_cache_of_both_though_calls_like_it_were_served():
    caches = [torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    new, lengths = (
        torch.ones(2, 2, 64, dtype=torch.bfloat16, device=CUDA),
        torch.ones(2, dtype=torch.int32, device=CUDA),
    )
    append_kv(new, new.clone(), *caches, kv_format="bf16", seq_lens=lengths)
    with pytest.raises(ValueError, match="v_cache: got memory that k_cache takes too"):
        append_kv(new, new.clone(), caches[0], caches[0], kv_format="bf16", seq_lens=lengths)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_are_looked_at_in_debug_mode(scale):
    call = make_decode("int8_tensor", [40, 9], num_kv_heads=2, group=4, head_dim=64, device=CUDA)
    wrong: Any = {"k_scale": torch.tensor(scale, device=CUDA)}
    call.run(**wrong)  # is not looked at
    with arguments.checking_values(), pytest.raises(ValueError, match="k_scale: got .*, want positive finite numbers"):
        call.run(**wrong)


def test_tokens_without_a_place_go_nowhere_in_debug_mode_too():
    """Tokens behind those of all requests, and the first ones of a request that has fewer than come."""
    caches = [torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    new = torch.ones(6, 2, 64, dtype=torch.bfloat16, device=CUDA)
    lengths = torch.tensor([1, 3], dtype=torch.int32, device=CUDA)
    ends = torch.tensor([0, 1, 4], dtype=torch.int32, device=CUDA)
    with arguments.checking_values():
        append_kv(new, new.clone(), *caches, kv_format="bf16", seq_lens=lengths, cu_seqlens=ends)
        for cache in caches:
            assert [int(count) for count in cache.sum((1, 2, 3))] == [128, 3 * 128]
            cache.zero_()
        q, k, v = (torch.ones(2, 3, heads, 64, dtype=torch.bfloat16, device=CUDA) for heads in (4, 2, 2))
        out, lse = append_and_decode(q, k, v, caches[0], caches[1], lengths, kv_format="bf16", return_lse=True)
    assert [int(count) for count in caches[1].sum((1, 2, 3))] == [128, 3 * 128]
    assert not out[0, :2].any() and torch.all(lse[0, :2] == -torch.inf) and torch.all(out[0, 2] == 1)
