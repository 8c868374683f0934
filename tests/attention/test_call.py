"""A checked call says everything that kernels need, in one form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_kernels.attention.call import AttentionCall, make_call
from cute_kernels.attention.checks import head_dim_of_row
from cute_kernels.formats.kv import FORMATS, HEAD_DIMS, format_of
from cute_kernels.formats.scores.features import Features
from tests.attention import cases


def checked(kv_format: Any = "bf16", lengths: tuple[int, ...] = (40, 3), **options: Any) -> AttentionCall:
    call = cases.make_call(kv_format, lengths, num_kv_heads=2, group=3, head_dim=64, **options)
    return make_call(*call.tensors, kv_format=kv_format, **call.options)


def test_shapes_by_name():
    call = checked(q_len=4, v_head_dim=128)
    assert (call.batch, call.q_len, call.num_q_heads, call.num_kv_heads, call.group) == (2, 4, 6, 2, 3)
    assert (call.head_dim, call.k.head_dim, call.v.head_dim) == (64, 64, 128)
    assert call.out_shape == (2, 4, 6, 128)
    assert (call.max_seq_len, call.page_size, call.num_blocks) == (40, 40, 2)
    paged = checked(page_size=16)
    assert (paged.max_seq_len, paged.page_size, paged.num_blocks) == (48, 16, 2 * 3 + 3)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["bf16", ("int4_g4", "e4m3_token_head")])
def test_strides_in_bytes_lead_to_every_row(page_size, cache_layout, kv_format):
    call = checked(kv_format, page_size=page_size, cache_layout=cache_layout)
    for operand in (call.k, call.v):
        cache = operand.cache
        for block, token, head in itertools.product(range(call.num_blocks), (0, 1, call.page_size - 1), (0, 1)):
            row = cache[block, head, token] if call.head_major else cache[block, token, head]
            want = row.data_ptr() - cache.data_ptr()
            got = block * operand.block_stride + token * operand.token_stride + head * operand.head_stride
            assert got == want


def test_strides_do_not_trust_those_of_dimensions_of_one():
    call = cases.make_call("bf16", [3], head_dim=64)
    cache = call.k_cache.repeat(1, 2, 1, 1)[:, :3]
    assert cache.is_contiguous() and cache.stride(0) == 6 * 64
    made = make_call(call.q, cache, cache, call.seq_lens, kv_format="bf16")
    assert made.k.block_stride == 3 * 64 * 2


@pytest.mark.parametrize(
    ("kv_format", "shape", "strides"),
    [
        ("int8_tensor", (), (0, 0)),
        ("int8_tensor", (1,), (0, 0)),
        ("e4m3_head", (2,), (1, 0)),
        ("e4m3_head", (2, 1), (1, 0)),
        ("int8_channel", (2, 64), (64, 1)),
    ],
)
def test_scales_of_every_granularity_are_found_by_head_and_column(kv_format, shape, strides):
    call = cases.make_call(kv_format, [3], num_kv_heads=2, head_dim=64)
    scale = torch.rand(shape)
    made = make_call(*call.tensors, kv_format=kv_format, k_scale=scale, v_scale=scale)
    for operand in (made.k, made.v):
        assert operand.scale is not None and operand.scale.tensor is scale
        assert (operand.scale.head_stride, operand.scale.channel_stride) == strides


def test_a_scale_may_be_a_part_of_a_larger_one():
    call = cases.make_call("int8_head", [3], num_kv_heads=2, head_dim=64)
    scales = torch.rand(2, 5)
    made = make_call(*call.tensors, kv_format="int8_head", k_scale=scales[:, 1], v_scale=scales[:, 2:3])
    assert made.k.scale and made.v.scale
    assert made.k.scale.head_stride == made.v.scale.head_stride == 5
    assert made.k.scale.tensor.data_ptr() == scales[:, 1].data_ptr()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((40,), (0, 0, 0, 1)),
        ((1,), (0, 0, 0, 0)),
        ((), (0, 0, 0, 0)),
        ((6, 1), (0, 0, 1, 0)),
        ((2, 1, 6, 40), (240, 0, 40, 1)),
        ((2, 4, 6, 40), (960, 240, 40, 1)),
        ((4, 1, 40), (0, 40, 0, 1)),
    ],
)
def test_a_bias_repeats_with_stride_zero(shape, strides):
    call = cases.make_call("bf16", [40, 3], num_kv_heads=2, group=3, head_dim=64, q_len=4)
    made = make_call(*call.tensors, kv_format="bf16", attn_bias=torch.zeros(shape))
    assert made.bias is not None and made.bias.strides == strides


def test_a_bias_may_be_strided():
    call = cases.make_call("bf16", [40, 3], num_kv_heads=2, group=3, head_dim=64)
    bias = torch.zeros(2, 6, 1, 80)[..., ::2].transpose(1, 2)
    made = make_call(*call.tensors, kv_format="bf16", attn_bias=bias)
    assert made.bias is not None and made.bias.strides == (480, 0, 80, 2)


def test_a_block_table_may_be_a_part_of_a_wider_one():
    call = cases.make_call("bf16", [40, 3], head_dim=64, page_size=16)
    table = torch.full((7, 9), -1, dtype=torch.int32)
    table[:2, :3] = call.options["block_table"]
    out = call.with_options(block_table=table[:2, :3]).run()
    assert torch.equal(out, call.run())


# -- features ----------------------------------------------------------------------------------------------------------


def test_a_plain_call_has_none():
    assert checked().features == Features()
    assert Features().name == ""


@pytest.mark.parametrize(
    ("options", "wanted", "name"),
    [
        ({"q_len": 2}, Features(queries=True, causal=True), "queries_causal"),
        ({"q_len": 2, "causal": False}, Features(queries=True), "queries"),
        ({"causal": False}, Features(), ""),
        ({"q_len": 2, "causal": False, "window_size": 5}, Features(queries=True, causal=True, window=True),
         "queries_causal_window"),
        ({"window_size": 39}, Features(window=True), "window"),
        ({"window_size": 40}, Features(), ""),
        ({"softcap": 3.0}, Features(soft_cap=True), "soft_cap"),
        ({"sinks": True}, Features(sinks=True), "sinks"),
        ({"alibi": True}, Features(alibi=True), "alibi"),
        ({"attn_bias": "fp32"}, Features(bias="fp32"), "bias_fp32"),
        ({"attn_bias": "bf16"}, Features(bias="bf16"), "bias_bf16"),
        ({"page_size": 16}, Features(paged=True), "paged"),
        ({"page_size": 16, "cache_layout": "HND", "sinks": True}, Features(sinks=True, paged=True, head_major=True),
         "sinks_paged_head_major"),
    ],
)  # fmt: skip
def test_features_are_what_changes_the_kernel(options, wanted, name):
    """Of what hides nothing there is no feature: a window as wide as the cache, causal with one query."""
    assert checked(**options).features == wanted
    assert wanted.name == name and (not name or name.isidentifier())


def test_a_window_implies_causal_even_where_it_hides_nothing_itself():
    call = checked(q_len=2, causal=False, window_size=1000)
    assert call.causal and call.window is None


def test_a_bias_has_a_dtype_that_kernels_read():
    with pytest.raises(ValueError, match="bias: got 'fp16', want None or one of 'fp32', 'bf16'"):
        Features(bias="fp16")


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_size_of_a_row_says_its_head_dim(name):
    form = format_of(name)
    assert [head_dim_of_row(form, form.row_elements(head_dim)) for head_dim in HEAD_DIMS] == list(HEAD_DIMS)
