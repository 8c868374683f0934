"""The public call on CPU tensors, and the operator behind it under torch.compile."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels
from cute_kernels.attention import decode_attention, decode_attention_splits
from cute_kernels.attention.reference import combine
from tests.attention.cases import FORMATS, Call, assert_close, make_call, poison_past_lengths

every_format = pytest.mark.parametrize("kv_format", FORMATS)


def small_call(kv_format: str = "int4_g4", **options) -> Call:
    return make_call(kv_format, [0, 1, 17, 40], num_kv_heads=2, group=3, head_dim=64, **options)


def test_the_package_offers_it():
    assert cute_kernels.decode_attention is decode_attention


# -- results -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    kv_format=st.sampled_from(FORMATS),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([64, 128, 256]),
    q_dtype=st.sampled_from(["bf16", "fp16"]),
    spare=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_fp64_reference_rounded_to_the_dtype_of_q(
    kv_format, lengths, num_kv_heads, group, head_dim, q_dtype, spare, seed
):
    call = make_call(
        kv_format,
        lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        q_dtype=q_dtype,
        max_seq_len=max(lengths) + spare,
        seed=seed,
    )
    out, lse = call.run(return_lse=True)
    assert (out.shape, out.dtype) == (call.q.shape, call.q.dtype)
    assert (lse.shape, lse.dtype) == (call.q.shape[:3], torch.float32)
    assert_close(call, out, lse)


@every_format
def test_an_empty_request_gives_zero_and_minus_infinity(kv_format):
    out, lse = small_call(kv_format).run(return_lse=True)
    assert not out[0].any() and torch.all(lse[0] == -math.inf)
    assert out[1:].isfinite().all() and lse[1:].isfinite().all()


def test_an_empty_batch_and_an_empty_cache():
    none = make_call("int4_g1", [], max_seq_len=8)
    out, lse = none.run(return_lse=True)
    assert out.shape == (0, 1, 8, 128) and lse.shape == (0, 1, 8)
    out, lse = make_call("bf16", [0, 0]).run(return_lse=True)
    assert not out.any() and torch.all(lse == -math.inf)


def test_only_the_output_comes_back_unless_the_lse_is_asked_for():
    call = small_call()
    out, _ = call.run(return_lse=True)
    assert torch.equal(call.run(), out)


def test_out_is_written_and_returned():
    call = small_call()
    out = torch.full_like(call.q, torch.nan)
    assert call.run(out=out) is out
    assert torch.equal(out, call.run())
    again, _ = call.run(out=out, return_lse=True)
    assert again is out


def test_the_scale_is_one_over_the_root_of_head_dim_unless_given():
    call = small_call()
    assert torch.equal(call.run(), call.run(softmax_scale=64**-0.5))
    out, lse = call.run(softmax_scale=1, return_lse=True)
    assert_close(call, out, lse, softmax_scale=1.0)


@pytest.mark.parametrize("num_splits", [1, 3, 17])
def test_splits_change_nothing_but_rounding(num_splits):
    call = small_call("bf16")
    assert_close(call, call.run(num_splits=num_splits))


@every_format
def test_splits_and_their_combination(kv_format):
    call = small_call(kv_format)
    out, split_out, split_max, split_sum = decode_attention_splits(*call.tensors, kv_format=kv_format, num_splits=3)
    assert split_out.shape == (4, 3, 6, 64) and split_max.shape == split_sum.shape == (4, 3, 6)
    assert (out.shape, out.dtype) == (call.q.shape, call.q.dtype)
    assert_close(call, combine(split_out, split_max, split_sum).out.unsqueeze(1).to(out.dtype))
    assert_close(call, out)


def test_a_parameter_is_as_good_as_a_tensor():
    call = small_call("bf16")
    wrapped = dataclasses.replace(call, q=torch.nn.Parameter(call.q, requires_grad=False))
    assert torch.equal(wrapped.run(), call.run())


# -- the operator ------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(("softmax_scale", "num_splits"), [(None, None), (0.2, 3)])
def test_the_operator_passes_opcheck(kv_format, softmax_scale, num_splits):
    call = small_call(kv_format)
    torch.library.opcheck(
        torch.ops.cute_kernels.decode_attention.default, (*call.tensors, kv_format, softmax_scale, num_splits)
    )


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_shapes_and_dtypes_without_data(device):
    call = small_call()
    if device == "meta":
        tensors = [tensor.to("meta") for tensor in call.tensors]
        out, lse = decode_attention(*tensors, kv_format="int4_g4", return_lse=True)
    else:
        with torch._subclasses.FakeTensorMode() as mode:
            tensors = [mode.from_tensor(tensor) for tensor in call.tensors]
            out, lse = decode_attention(*tensors, kv_format="int4_g4", return_lse=True)
    assert (out.shape, out.dtype) == (call.q.shape, call.q.dtype)
    assert (lse.shape, lse.dtype) == (call.q.shape[:3], torch.float32)


def attend(call: Call, **options):
    """What a model does around the call, so that there is something to trace."""

    def step(q, k_cache, v_cache, seq_lens):
        out, lse = decode_attention(
            q * 0.5, k_cache, v_cache, seq_lens, kv_format=call.kv_format, return_lse=True, **options
        )
        return out + 1.0, lse * 2.0

    return step


# One format through the real compiler is enough: it costs seconds, and the operator is opaque to it.
@pytest.mark.parametrize(
    ("kv_format", "backend"), [*((name, "aot_eager") for name in FORMATS), ("int4_g4", "inductor")]
)
def test_it_compiles_without_graph_breaks(kv_format, backend):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    torch.compiler.reset()
    call = small_call(kv_format, poison=False)
    step = attend(call, softmax_scale=0.3)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for lengths in ([0, 1, 17, 40], [40, 2, 0, 3]):
        other = call.with_lengths(lengths)
        for got, want in zip(compiled(*other.tensors), step(*other.tensors), strict=True):
            torch.testing.assert_close(got, want)


def test_it_compiles_for_changing_shapes():
    torch.compiler.reset()
    step = attend(small_call("bf16"))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([3, 5], [7, 9, 11], [1, 2, 3, 4]):
        call = make_call("bf16", lengths, num_kv_heads=2, group=3, head_dim=64)
        for got, want in zip(compiled(*call.tensors), step(*call.tensors), strict=True):
            torch.testing.assert_close(got, want)


def test_a_compiled_call_writes_out_too():
    torch.compiler.reset()
    call = small_call()

    def step(q, k_cache, v_cache, seq_lens, out):
        return decode_attention(q, k_cache, v_cache, seq_lens, kv_format="int4_g4", out=out)

    out = torch.full_like(call.q, torch.nan)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*call.tensors, out)
    assert torch.equal(out, call.run())


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, None], ids=["dispatched", "direct"])
def test_a_wrong_out_is_refused_on_every_path(wrap):
    call = small_call("bf16")
    q = torch.nn.Parameter(call.q, requires_grad=False) if wrap else call.q
    with pytest.raises(TypeError, match=r"out: got dtype torch\.float32, want torch\.bfloat16"):
        decode_attention(q, *call.tensors[1:], kv_format="bf16", out=torch.empty(call.q.shape))
    with pytest.raises(ValueError, match=r"out: got shape \[4, 6, 64\], want \[4, 1, 6, 64\]"):
        decode_attention(q, *call.tensors[1:], kv_format="bf16", out=torch.empty_like(call.q[:, 0]))


def test_rows_past_the_length_are_never_looked_at():
    clean = small_call("fp16", poison=False)
    want = clean.run()
    poison_past_lengths(clean)
    assert torch.equal(clean.run(), want)
