"""What extend attention refuses, and in which words: the argument, what came, what is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.attention.extend import extend_attention, pack_tree_mask
from tests.extend.cases import fused, make_call

CALL = make_call("bf16", [3, 2], [9, 12], head_dim=64, page_size=16)


def run(**changed):
    tensors: dict[str, Any] = {
        "q": CALL.q,
        "k_cache": CALL.k_cache,
        "v_cache": CALL.v_cache,
        "seq_lens": CALL.seq_lens,
    }
    return extend_attention(**(tensors | CALL.keywords | changed))


INT = torch.int32
NEW = torch.zeros(5, 2, 64).bfloat16()
WRONG = {
    "q with 4 dimensions": ({"q": CALL.q[None]}, ValueError, "q: got 4 dimensions, want 3"),
    "q in fp32": ({"q": CALL.q.float()}, TypeError, "q: got dtype torch.float32, want"),
    "q with a head_dim": ({"q": CALL.q[..., :32].contiguous()}, ValueError, "q: got head_dim 32, want one of 64"),
    "a part of q's columns": ({"q": CALL.q[..., :32]}, ValueError, "q: got head_dim 32, want one of 64"),
    "q of head_dim 320": (
        {"q": torch.zeros(5, 8, 320).bfloat16()},
        ValueError,
        "q: got head_dim 320, want one of 64, 80, 96, 128, 192, 256, 512",
    ),
    "q, head by head": (
        {"q": CALL.q.transpose(0, 1).contiguous().transpose(0, 1)},
        ValueError,
        "q: got strides .* want the last two dimensions contiguous",
    ),
    "q's columns apart": ({"q": CALL.q.repeat(1, 1, 2)[..., ::2]}, ValueError, "q: got strides .* want the last two"),
    "q between pieces": (
        {"q": torch.zeros(5, 8 * 64 + 4).bfloat16()[:, : 8 * 64].unflatten(1, (8, 64))},
        ValueError,
        "q: got strides .* want queries on multiples of 16 bytes",
    ),
    "new_k's columns apart": (
        {"new_k": NEW.repeat(1, 1, 2)[..., ::2], "new_v": NEW},
        ValueError,
        "new_k: got strides .* want rows contiguous",
    ),
    "new_v between pieces": (
        {"new_k": NEW, "new_v": torch.zeros(5, 2, 68).bfloat16()[..., :64]},
        ValueError,
        "new_v: got strides .* want rows on multiples of 16 bytes",
    ),
    "new_v of one row": (
        {"new_k": NEW, "new_v": NEW[:1].expand(5, -1, -1)},
        ValueError,
        "new_v: got strides .* want rows that do not overlap",
    ),
    "q's heads": ({"q": CALL.q[:, :5].contiguous()}, ValueError, "q: got 5 query heads, want a multiple"),
    "ends' size": (
        {"cu_seqlens_q": torch.tensor([0, 5], dtype=INT)},
        ValueError,
        r"cu_seqlens_q: got shape \[2\], want \[3\]",
    ),
    "ends' dtype": ({"cu_seqlens_q": CALL.cu_seqlens_q.long()}, TypeError, "cu_seqlens_q: got dtype torch.int64, want"),
    "no ends": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: got NoneType, want a torch.Tensor"),
    "ends that fall": (
        {"cu_seqlens_q": torch.tensor([0, 4, 3], dtype=INT)},
        ValueError,
        "cu_seqlens_q: got 4 to 3 for request 1",
    ),
    "ends past q": (
        {"cu_seqlens_q": torch.tensor([0, 4, 6], dtype=INT)},
        ValueError,
        "cu_seqlens_q: got 4 to 6 for request 1, want .* at most 5",
    ),
    "ends that begin late": ({"cu_seqlens_q": torch.tensor([1, 4, 5], dtype=INT)}, ValueError, "cu_seqlens_q: got 1"),
    "a length": ({"seq_lens": torch.tensor([9, 17], dtype=INT)}, ValueError, "seq_lens: got 17 for request 1"),
    "lengths' shape": ({"seq_lens": CALL.seq_lens[None]}, ValueError, r"seq_lens: got shape \[1, 2\], want \[batch\]"),
    "a page": (
        {"block_table": torch.tensor([[0], [9]], dtype=INT)},
        ValueError,
        "block_table: got page 9 for request 1 at position 0",
    ),
    "a window": ({"window_size": 0}, ValueError, "window_size: got 0, want None or an int"),
    "a cap": ({"softcap": -1.0}, ValueError, "softcap: got -1.0, want None or a positive"),
    "a format": (
        {"kv_format": ("int4_channel32", "bf16")},
        ValueError,
        "kv_format: got int4_channel32 for k_cache, want one of",
    ),
    "a mixed pair unpacked": (
        {"kv_format": ("bf16", "int4_g1"), "v_cache": torch.zeros(5, 16, 2, 36, dtype=torch.uint8), "unpack": True},
        ValueError,
        "unpack: got True, want None or False: K in bf16 and V in int4_g1",
    ),
    "rows of groups unpacked": (
        {"kv_format": ("bf16", "int8_g2"), "v_cache": torch.zeros(5, 16, 2, 72, dtype=torch.uint8), "unpack": True},
        ValueError,
        "unpack: got True, want None or False: ",
    ),
    "a mixed pair's V": ({"kv_format": ("bf16", "int4_g1")}, (TypeError, ValueError), "v_cache: got"),
    "an out": ({"out": torch.empty(5, 8, 32, dtype=torch.bfloat16)}, ValueError, r"out: got shape \[5, 8, 32\]"),
    "V's rows": (
        {"v_cache": torch.zeros(5, 16, 2, 128).bfloat16()},
        ValueError,
        "v_cache: got rows of head_dim 128, want 64, that of q",
    ),
    "causal": ({"causal": 1}, TypeError, "causal: got 1, want True or False"),
    "splits": ({"num_splits": 33}, ValueError, "num_splits: got 33, want None or an int from 1 to 32"),
    "a margin": ({"sm_margin": -1}, ValueError, "sm_margin: got -1, want a number of SMs from 0 on"),
    "FP8 products by a word": ({"fp8_products": "yes"}, TypeError, "fp8_products: got 'yes', want True or False"),
    "FP8 products of 16 bits": ({"fp8_products": True}, ValueError, "fp8_products: got True, want False: .*not bf16"),
    "a mask of booleans": (
        {"tree_mask": torch.ones(5, 3, dtype=torch.bool)},
        TypeError,
        "tree_mask: got dtype torch.bool, want torch.int32.*pack_tree_mask",
    ),
    "a mask's rows": (
        {"tree_mask": torch.ones(4, 1, dtype=INT)},
        ValueError,
        r"tree_mask: got shape \[4, 1\], want \[5",
    ),
    "a mask with gaps": ({"tree_mask": torch.ones(5, 4, dtype=INT)[:, ::2]}, ValueError, "tree_mask: got strides"),
    "a mask and a window": (
        {"tree_mask": torch.ones(5, 1, dtype=INT), "window_size": 3},
        ValueError,
        "window_size: got a value beside a tree_mask, want None",
    ),
    "a mask and slopes": (
        {"tree_mask": torch.ones(5, 1, dtype=INT), "alibi_slopes": torch.ones(8)},
        ValueError,
        "alibi_slopes: got a value beside a tree_mask, want None",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    changed, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        run(**changed)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"kv_format": "e4m3_token_head"}, "fp8_products: got True, want False: .* not e4m3_token_head"),
        ({"kv_format": ("e4m3_tensor", "int8_tensor")}, "fp8_products: got True, want False: .* not int8_tensor"),
        ({"head_dim": 64}, "fp8_products: got True, want False: FP8 products want head_dim 128, not 64"),
        ({"unpack": False}, "unpack: got False beside fp8_products, want None or True"),
    ],
)
def test_fp8_products_are_refused_where_they_are_not(options, error):
    given = {"kv_format": "e4m3_tensor", **options}
    call = make_call(given.pop("kv_format"), [3, 2], [9, 12], fp8_products=True, **given)
    with pytest.raises(ValueError, match=error):
        call.run()


def test_no_queries_and_no_requests():
    none = make_call("bf16", [], [], head_dim=64, page_size=None, max_seq_len=4)
    assert none.run().shape == (0, 8, 64)
    empty = replace(CALL, q=CALL.q[:0], cu_seqlens_q=torch.zeros(3, dtype=INT))
    assert empty.run().shape == (0, 8, 64)


TREE = make_call("bf16", [3, 2], [9, 12], head_dim=64, page_size=16, tree=True, num_splits=2)


@pytest.mark.parametrize("call", [CALL, TREE, fused(CALL), fused(make_call("int4_g1", [3, 2], [9, 12], new=True))])
def test_it_can_be_traced(call):
    compiled = torch.compile(lambda q: extend_attention(q, *call.tensors[1:], **call.keywords), fullgraph=True)
    torch.testing.assert_close(compiled(call.q), call.run(), atol=0, rtol=0)


@pytest.mark.parametrize("call", [CALL, TREE])
def test_the_operator_is_what_torch_wants(call):
    options = {name: value for name, value in call.keywords.items() if name not in ("cu_seqlens_q", "kv_format")}
    arguments = (*call.tensors, call.cu_seqlens_q, "bf16", "bf16")
    torch.library.opcheck(torch.ops.cute_kernels.extend_attention.default, arguments, options)


@pytest.mark.parametrize("seen", [torch.ones(3, 4), torch.ones(3, dtype=torch.bool), [[True]]], ids=str)
def test_only_booleans_are_packed(seen):
    with pytest.raises((TypeError, ValueError), match="seen: got"):
        pack_tree_mask(seen)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1"])
def test_parts_of_a_fused_projection_are_taken(kv_format):
    call = make_call(kv_format, [3, 2], [9, 12], new=True)
    apart = fused(call)
    assert not any(x.is_contiguous() for x in (apart.q, apart.options["new_k"], apart.options["new_v"]))
    assert torch.equal(apart.run(), call.run())
    out = apart.run()
    assert out.is_contiguous(), "whatever q is"


def test_a_call_without_bounds_of_requests_is_none_of_decode_attention():
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: got NoneType, want a torch\.Tensor"):
        run(cu_seqlens_q=None)
