"""What decode means: the reference against an oracle that reads the cache's bytes itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import blocks
from cute_kernels.mla.reference import apply_sinks, mla_decode_reference, sparse_mla_decode_reference
from tests.mla.cases import FORMATS, assert_near, make_dense, make_sparse

every_format = pytest.mark.parametrize("kv_format", FORMATS)
SHARP, SINGLE = 1e-12, 2e-5  # float64, and float32 after accumulators of 576 products


@settings(max_examples=40, deadline=None)
@given(
    kv_format=st.sampled_from(FORMATS),
    lengths=st.lists(st.integers(0, 19), min_size=1, max_size=4),
    q_len=st.integers(1, 4),
    num_heads=st.integers(1, 5),
    page_size=st.integers(1, 9),
    padding=st.sampled_from([0, 16, 48]),
    causal=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_dense_decode_is_the_oracle(kv_format, lengths, q_len, num_heads, page_size, padding, causal, seed):
    call = make_dense(
        kv_format, lengths, q_len=q_len, num_heads=num_heads, page_size=page_size, padding=padding, seed=seed
    )
    out, lse = mla_decode_reference(*call.tensors, kv_format=kv_format, causal=causal, compute_dtype=torch.float64)
    wanted_out, wanted_lse = call.oracle(causal=causal)
    assert_near(out, wanted_out, SHARP)
    assert_near(lse, wanted_lse, SHARP)


@settings(max_examples=60, deadline=None)
@given(
    kv_format=st.sampled_from(FORMATS),
    shape=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "q_len": st.integers(1, 3),
            "num_heads": st.integers(1, 4),
            "topk": st.integers(0, 13),
            "num_pages": st.integers(1, 4),
            "page_size": st.integers(1, 6),
            "padding": st.sampled_from([0, 32]),
            "length": st.booleans(),
            "sinks": st.booleans(),
            "extra": st.none() | st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 4)),
            "extra_length": st.booleans(),
            "seed": st.integers(0, 2**20),
        }
    ),
)
def test_sparse_decode_is_the_oracle(kv_format, shape):
    call = make_sparse(kv_format, **shape)
    found = sparse_mla_decode_reference(*call.tensors, kv_format=kv_format, **call.options, compute_dtype=torch.float64)
    for ours, wanted in zip(found, call.oracle(), strict=True):
        assert_near(ours, wanted, SHARP)


@every_format
def test_single_precision_is_near(kv_format):
    dense = make_dense(kv_format, [0, 1, 40], q_len=3)
    for ours, wanted in zip(mla_decode_reference(*dense.tensors, kv_format=kv_format), dense.oracle(), strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours, wanted, SINGLE)
    sparse = make_sparse(kv_format, sinks=True, length=True, extra=(5, 2, 7), extra_length=True)
    found = sparse_mla_decode_reference(*sparse.tensors, kv_format=kv_format, **sparse.options)
    for ours, wanted in zip(found, sparse.oracle(), strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours, wanted, SINGLE)


@pytest.mark.parametrize("kv_format", ["mla_bf16", "mla_fp16"])
def test_16_bit_tokens_of_512_columns(kv_format):
    dense = make_dense(kv_format, [9, 3], head_dim=512)
    out, _ = mla_decode_reference(*dense.tensors, kv_format=kv_format, compute_dtype=torch.float64)
    assert_near(out, dense.oracle()[0], SHARP)


def test_the_scale_is_that_of_the_columns_unless_given():
    call = make_dense("mla_fp8", [9])
    out, _ = mla_decode_reference(*call.tensors, kv_format="mla_fp8", softmax_scale=0.2, compute_dtype=torch.float64)
    assert_near(out, call.oracle(scale=0.2)[0], SHARP)


def test_scales_that_are_no_powers_of_two_are_honoured():
    call = make_sparse("mla_fp8", topk=9)
    scales = call.cache[..., 512:528].contiguous().view(torch.float32)
    call.cache[..., 512:528] = (scales * 1.2345).view(torch.uint8)
    out, lse, _ = sparse_mla_decode_reference(
        *call.tensors, kv_format="mla_fp8", **call.options, compute_dtype=torch.float64
    )
    wanted = call.oracle()
    assert_near(out, wanted[0], SHARP)
    assert_near(lse, wanted[1], SHARP)


def test_small_blocks_give_the_same():
    dense, sparse = make_dense("mla_fp8", [5, 30], q_len=4), make_sparse("mla_model1", extra=(4, 2, 3))
    before = mla_decode_reference(*dense.tensors, kv_format="mla_fp8", compute_dtype=torch.float64)
    options = {"kv_format": "mla_model1", "compute_dtype": torch.float64}
    chosen = sparse_mla_decode_reference(*sparse.tensors, **options, **sparse.options)
    with blocks.at_most(1):
        after = mla_decode_reference(*dense.tensors, kv_format="mla_fp8", compute_dtype=torch.float64)
        again = sparse_mla_decode_reference(*sparse.tensors, **options, **sparse.options)
    for first, second in zip((*before, *chosen), (*after, *again), strict=True):
        torch.testing.assert_close(first, second, rtol=SHARP, atol=SHARP)


def test_a_token_that_is_chosen_twice_counts_twice():
    call = make_sparse("mla_bf16", batch=1, q_len=1, num_heads=1, topk=3)
    call.cache.copy_(torch.randn(call.cache.shape))
    once = torch.tensor([[[4, 7, -1]]], dtype=torch.int32)
    twice = torch.tensor([[[4, 7, 4]]], dtype=torch.int32)
    results = [
        sparse_mla_decode_reference(call.q, call.cache, indices, kv_format="mla_bf16", compute_dtype=torch.float64)
        for indices in (once, twice)
    ]
    shares = []
    for out, lse, _ in results:
        scores = call.cache.view(-1, 576)[[4, 7]].double() @ call.q[0, 0, 0].double() * 576**-0.5
        shares.append((torch.exp(scores - lse[0, 0, 0]), out))
    assert math.isclose(float((shares[1][0] * torch.tensor([2.0, 1.0])).sum()), 1.0, rel_tol=1e-12)
    assert not torch.allclose(shares[0][1], shares[1][1])


def test_sinks():
    out, lse = torch.ones(2, 3, 512), torch.tensor([[0.0, 1.0, torch.inf], [2.0, 3.0, 4.0]])
    sinks = torch.tensor([0.0, torch.inf, -torch.inf])
    kept = apply_sinks(out, lse, sinks)[..., 0]
    assert kept[0].tolist() == [0.5, 0.0, 0.0]
    assert kept[1].tolist() == [pytest.approx(1 / (1 + math.exp(-2))), 0.0, 1.0]


def test_default_dtypes_and_devices_of_the_caller_do_not_matter():
    dense, sparse = make_dense("mla_fp8", [3, 9], q_len=2), make_sparse("mla_model1", sinks=True, length=True)
    options = {"kv_format": "mla_model1", **sparse.options}

    def both() -> tuple[torch.Tensor, ...]:
        chosen = sparse_mla_decode_reference(*sparse.tensors, **options)
        return *mla_decode_reference(*dense.tensors, kv_format="mla_fp8"), *chosen

    wanted = both()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = both()
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, theirs)
