"""The public call on CPU tensors, and the operator behind it under torch.compile."""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import cute_kernels
from cute_kernels.attention import decode_attention, decode_attention_splits, ops
from cute_kernels.attention.call import Given
from cute_kernels.attention.options import NO_OPTIONS
from cute_kernels.attention.reference import combine
from tests.attention import strategies
from tests.attention.cases import ALL_FORMATS, FORMATS, Call, assert_close, assert_is, make_call, poison_unseen
from tests.attention.oracle import oracle
from tests.observed import calls_of

every_format = pytest.mark.parametrize("kv_format", FORMATS)

# One call for each thing that may be asked for, and one for all of them.
EVERYTHING: dict[str, Any] = {
    "q_len": 3, "v_head_dim": 128, "page_size": 16, "cache_layout": "HND", "window_size": 20, "softcap": 9.0,
    "sinks": True, "alibi": True, "attn_bias": "bf16",
}  # fmt: skip
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "queries": ("bf16", {"q_len": 4}),
    "not causal": ("bf16", {"q_len": 4, "causal": False}),
    "pages": ("int4_g4", {"page_size": 16}),
    "heads first": ("bf16", {"cache_layout": "HND"}),
    "window": ("bf16", {"window_size": 9}),
    "cap": ("bf16", {"softcap": 9.0}),
    "sinks": ("bf16", {"sinks": True}),
    "slopes": ("bf16", {"alibi": True}),
    "bias": ("bf16", {"attn_bias": "fp32"}),
    "head_dims": ("bf16", {"v_head_dim": 96}),
    "pair": (("int8_token_head", "int4_g2"), {}),
    "scales": (("int8_channel", "e4m3_head"), {}),
    "everything": (("int8_tensor", "e5m2"), EVERYTHING),
}
everything_asked = pytest.mark.parametrize(("kv_format", "asked"), ASKED.values(), ids=list(ASKED))


def small_call(kv_format: str | tuple[str, str] = "int4_g4", **options: Any) -> Call:
    return make_call(kv_format, [0, 1, 17, 40], num_kv_heads=2, group=3, head_dim=64, **options)


def test_the_package_offers_it():
    assert cute_kernels.decode_attention is decode_attention


# -- results -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(strategies.calls())
def test_it_is_the_oracle_rounded_to_the_dtype_of_q(arguments):
    call = make_call(**arguments)
    out, lse = call.run(return_lse=True)
    assert (out.shape[:3], out.dtype) == (call.q.shape[:3], call.q.dtype)
    assert (lse.shape, lse.dtype) == (call.q.shape[:3], torch.float32)
    assert_is(call, out, lse, oracle(call))


@every_format
def test_an_empty_request_gives_zero_and_minus_infinity(kv_format):
    out, lse = small_call(kv_format).run(return_lse=True)
    assert not out[0].any() and torch.all(lse[0] == -math.inf)
    assert out[1:].isfinite().all() and lse[1:].isfinite().all()


@pytest.mark.parametrize(
    ("kv_format", "head_dims", "width", "name"),
    [
        ("int4_g4", (80, 80), 20, "k_cache"),
        ("int8_g8", (96, 96), 12, "k_cache"),
        (("bf16", "int4_g8"), (96, 80), 10, "v_cache"),
    ],
)
def test_rows_that_no_kernel_reads_are_refused_on_a_cpu(kv_format, head_dims, width, name):
    call = make_call(kv_format, [3], num_kv_heads=1, group=1, head_dim=head_dims[0], v_head_dim=head_dims[1])
    wanted = rf"^kv_format: got int\d_g\d for {name}, want .*: groups of {width} columns .* are no multiple of 8"
    with pytest.raises(ValueError, match=wanted):
        call.run()


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


def opcheck(call: Call, **options: Any) -> None:
    torch.library.opcheck(
        torch.ops.cute_kernels.decode_attention.default,
        (*call.tensors, *call.format_names),
        {"softmax_scale": None, "num_splits": None} | call.options | options,
    )


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_the_operator_passes_opcheck(kv_format):
    opcheck(small_call(kv_format))


def test_the_operator_passes_opcheck_with_numbers():
    opcheck(small_call("int4_g4"), softmax_scale=0.2, num_splits=3)


@everything_asked
def test_the_operator_passes_opcheck_with_whatever_is_asked(kv_format, asked):
    opcheck(small_call(kv_format, **asked))


@pytest.mark.parametrize("device", ["meta", "fake"])
@everything_asked
def test_shapes_and_dtypes_without_data(device, kv_format, asked):
    call = small_call(kv_format, **asked)
    want, want_lse = call.run(return_lse=True)

    def bodiless(move):
        tensors = [move(tensor) for tensor in call.tensors]
        options = {key: move(x) if isinstance(x, torch.Tensor) else x for key, x in call.options.items()}
        return decode_attention(*tensors, kv_format=kv_format, return_lse=True, **options)

    if device == "meta":
        out, lse = bodiless(lambda tensor: tensor.to("meta"))
    else:
        with torch._subclasses.FakeTensorMode() as mode:
            out, lse = bodiless(mode.from_tensor)
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert (lse.shape, lse.dtype) == (want_lse.shape, want_lse.dtype)


@everything_asked
def test_the_operator_is_the_call(kv_format, asked):
    call = small_call(kv_format, **asked)
    through = torch.ops.cute_kernels.decode_attention(*call.tensors, *call.format_names, **call.options)
    for got, want in zip(through, call.run(return_lse=True), strict=True):
        assert torch.equal(got, want)


def attend(call: Call, **options):
    """What a model does around the call, so that there is something to trace."""

    def step(q, k_cache, v_cache, seq_lens):
        out, lse = decode_attention(
            q * 0.5, k_cache, v_cache, seq_lens, kv_format=call.kv_format, return_lse=True, **options
        )
        return out + 1.0, lse * 2.0

    return step


# One format through the real compiler is enough, and one of each dtype of a cache through the tracer: both cost
# seconds, and the operator is opaque to them.
TRACED = ("bf16", "fp16", "int4_g4", "e5m2")


@pytest.mark.parametrize(("kv_format", "backend"), [*((name, "aot_eager") for name in TRACED), ("int4_g4", "inductor")])
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


@everything_asked
def test_whatever_is_asked_compiles_without_graph_breaks(kv_format, asked):
    torch.compiler.reset()
    call = small_call(kv_format, **asked)
    given = {name: value for name, value in call.options.items() if isinstance(value, torch.Tensor)}
    fixed = {name: value for name, value in call.options.items() if name not in given}

    def step(tensors, given):
        out, lse = decode_attention(*tensors, kv_format=kv_format, return_lse=True, **given, **fixed)
        return out + 1.0, lse * 2.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(call.tensors, given), step(call.tensors, given), strict=True):
        assert torch.equal(got, want)


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
    poison_unseen(clean)
    assert torch.equal(clean.run(), want)


def test_sinks_that_are_a_parameter_do_not_leave_the_short_way():
    call = small_call("bf16", sinks=True)
    parameter = torch.nn.Parameter(call.options["sinks"])
    assert ops.path_of(Given(*call.tensors, "bf16", options={"sinks": parameter})) is ops.reference
    assert torch.equal(call.run(sinks=parameter), call.run())


def test_other_kinds_of_tensors_do():
    call = small_call("bf16", sinks=True)
    with torch._subclasses.FakeTensorMode() as mode:
        options = {"sinks": mode.from_tensor(call.options["sinks"])}
        assert ops.path_of(Given(*call.tensors, "bf16", options=options)) is ops.dispatch


def test_the_public_call_hands_on_complete_options_in_their_order():
    call = small_call("bf16", sinks=True)
    with calls_of(ops.reference) as calls:
        call.run()
        call.run(sinks=None)
        torch.ops.cute_kernels.decode_attention(*call.tensors, "bf16", "bf16", attn_bias=None, causal=False)
    seen = [one.arguments["given"].options for one in calls]
    assert list(seen[0]) == list(NO_OPTIONS) and seen[1] is None
    assert all(seen[0][name] == default for name, default in NO_OPTIONS.items() if name != "sinks")


# -- what decides a plan -----------------------------------------------------------------------------------------------


def test_options_that_differ_in_what_is_checked_have_different_keys():
    table = torch.zeros(3, 4, dtype=torch.int32)
    sinks = torch.zeros(8)
    different: list[Any] = [
        {"block_table": table},
        {"block_table": table[:, :3]},
        {"block_table": table[:, :3].contiguous()},
        {"block_table": table.long()},
        {"sinks": sinks},
        {"alibi_slopes": sinks},
        {"window_size": 4},
        {"softcap": 4},
        {"window_size": 5},
    ]
    keys = [ops.options_key(NO_OPTIONS | options) for options in different]
    assert len(set(keys)) == len(different)
    again = torch.nn.Parameter(torch.ones(8))
    assert ops.options_key(NO_OPTIONS | {"sinks": again}) == keys[4]
