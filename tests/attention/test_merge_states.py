"""Attention over disjoint sets of keys merges into attention over their union; the kernel compiles as it should."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels
from cute_kernels.attention import merge_states
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec, compile_combine, shipped_specs
from cute_kernels.attention.reference import merge_states_reference
from cute_kernels.runtime import default_cache, native
from tests.attention.cases import Call, assert_close, make_call
from tests.attention.states import State, fp64, random_states
from tools.resources import resource_report


def test_the_package_offers_it():
    assert cute_kernels.merge_states is merge_states


# -- cascades ----------------------------------------------------------------------------------------------------------


def keys_of(call: Call, start: list[int], stop: list[int]) -> Call:
    """The same queries over a part of each request's keys, moved to the front of a cache of its own."""
    caches = []
    for cache in (call.k_cache, call.v_cache):
        part = torch.full_like(cache, 0xFF if cache.dtype == torch.uint8 else torch.nan)
        for request, (first, last) in enumerate(zip(start, stop, strict=True)):
            part[request, : last - first] = cache[request, first:last]
        caches.append(part)
    lengths = torch.tensor([b - a for a, b in zip(start, stop, strict=True)], dtype=torch.int32)
    return Call(call.q, caches[0], caches[1], lengths, call.kv_format, {"causal": False})


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    data=st.data(),
    kv_format=st.sampled_from(["bf16", "int4_g2"]),
    q_len=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_parts_of_a_context_make_the_whole(lengths, data, kv_format, q_len, seed):
    """Cut anywhere, into three, of which any may be empty; the parts' outputs are fp32, as those of a cascade."""
    call = make_call(kv_format, lengths, num_kv_heads=2, group=2, head_dim=64, q_len=q_len, causal=False, seed=seed)
    cuts = [sorted(data.draw(st.integers(0, length)) for _ in range(2)) for length in lengths]
    bounds = [[0] * len(lengths), [a for a, _ in cuts], [b for _, b in cuts], lengths]
    parts = [keys_of(call, start, stop).reference() for start, stop in itertools.pairwise(bounds)]
    first, second, third = ((out.float(), lse.float()) for out, lse in parts)
    out, lse = merge_states(*merge_states(*first, *second), *third)
    assert_close(call, out, lse)
    again, lse = merge_states(*first, *merge_states(*second, *third))
    assert_close(call, again, lse)


def test_a_prefix_that_requests_share_is_attended_to_once():
    call = make_call("bf16", [50, 33, 41], num_kv_heads=2, group=2, head_dim=64, causal=False)
    for cache in (call.k_cache, call.v_cache):
        cache[1:, :32] = cache[0, :32]
    # All queries of the batch are queries of one request that has the prefix alone.
    queries = call.q.transpose(0, 1).contiguous()
    shared = Call(queries, call.k_cache[:1, :32].contiguous(), call.v_cache[:1, :32].contiguous(),
                  torch.tensor([32], dtype=torch.int32), "bf16", {"causal": False})  # fmt: skip
    prefix, prefix_lse = (x.transpose(0, 1).contiguous() for x in shared.run(return_lse=True))
    rest = keys_of(call, [32] * 3, [50, 33, 41]).run(return_lse=True)
    assert_close(call, *merge_states(prefix, prefix_lse, *rest))


def test_sinks_come_after_the_merge():
    call = make_call("bf16", [50, 3], num_kv_heads=2, group=2, head_dim=64, causal=False)
    parts = [keys_of(call, *bounds).run(return_lse=True) for bounds in (([0, 0], [20, 3]), ([20, 3], [50, 3]))]
    out, lse = merge_states(*parts[0], *parts[1])
    sinks = torch.tensor([0.5, -math.inf, 3.0, 1.0])
    assert_close(call.with_options(sinks=sinks), (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).bfloat16(), lse)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3, 64), (2, 3, 4, 80), (1, 1, 1, 8), (0, 2, 4, 64)])
def test_it_is_the_fp64_average(dtype, shape):
    a, b = random_states(shape, dtype)
    out, lse = merge_states(*a, *b)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (shape, dtype, shape[:-1], torch.float32)
    want, want_lse = fp64(a, b)
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_an_empty_part_changes_nothing_whatever_its_output_holds(dtype, empty):
    """+inf is what MLA decode, as FlashMLA, gives for a query without keys."""
    a, b = random_states((4, 3, 64), dtype)
    b.lse.fill_(empty)
    for content in (0.0, math.nan, math.inf):
        b.out.fill_(content)
        for merged in (merge_states(*a, *b), merge_states(*b, *a)):
            assert torch.equal(merged[0], a.out) and torch.equal(merged[1], a.lse)


@pytest.mark.parametrize("lse_a, lse_b", [(-math.inf, -math.inf), (math.inf, -math.inf), (math.inf, math.inf)])
def test_two_empty_parts_are_empty(lse_a, lse_b):
    a, b = random_states((4, 3, 64), torch.bfloat16)
    a.lse.fill_(lse_a)
    b.lse.fill_(lse_b)
    out, lse = merge_states(*a, *b)
    assert not out.any() and torch.all(lse == -math.inf)


def test_scores_beyond_the_range_of_exp():
    a, b = random_states((4, 3, 64), torch.float32)
    far = State(b.out, b.lse + 1e4)
    out, lse = merge_states(*a, *far)
    assert torch.equal(out, b.out) and torch.equal(lse, far.lse)
    both = merge_states(a.out, a.lse + 1e4, *far)
    torch.testing.assert_close(both[0], merge_states(*a, *b)[0], rtol=2e-3, atol=2e-3)  # of lse's own rounding


def test_the_order_of_the_parts_does_not_matter():
    a, b = random_states((4, 3, 64), torch.bfloat16)
    for one, other in zip(merge_states(*a, *b), merge_states(*b, *a), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_reference_computes_in_fp64_too():
    a, b = random_states((4, 3, 64), torch.bfloat16)
    out, lse = merge_states_reference(*a, *b, compute_dtype=torch.float64)
    want, want_lse = fp64(a, b)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


# -- bad input ---------------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    a, b = random_states((2, 1, 4, 64), torch.bfloat16)
    return {"out_a": a.out, "lse_a": a.lse, "out_b": b.out, "lse_b": b.lse} | changes


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("list", {"lse_a": [0.0]}, TypeError, r"lse_a: got list, want a torch\.Tensor"),
    ("int", {"out_a": torch.zeros(2, 1, 4, 64, dtype=torch.int32)}, TypeError, r"out_a: got dtype torch\.int32, want"),
    ("2d", {"out_a": torch.zeros(4, 64)}, ValueError, r"out_a: got 2 dimensions, want 3 or 4: \[\.\.\., num_heads"),
    ("narrow", {"out_a": torch.zeros(2, 1, 4, 3)}, ValueError, "out_a: got rows of 12 bytes, want a multiple of 16"),
    ("other-dtype", {"out_b": torch.zeros(2, 1, 4, 64)}, TypeError,
     r"out_b: got dtype torch\.float32, want torch\.bfloat16"),
    ("other-shape", {"out_b": torch.zeros(2, 2, 4, 64).bfloat16()}, ValueError,
     r"out_b: got shape \[2, 2, 4, 64\], want \[2, 1, 4, 64\]"),
    ("lse-bf16", {"lse_a": torch.zeros(2, 1, 4).bfloat16()}, TypeError,
     r"lse_a: got dtype torch\.bfloat16, want torch\.float32"),
    ("lse-shape", {"lse_b": torch.zeros(2, 4, 1)}, ValueError, r"lse_b: got shape \[2, 4, 1\], want \[2, 1, 4\]"),
    ("strided", {"out_b": torch.zeros(2, 1, 64, 4).bfloat16().transpose(2, 3)}, ValueError, "out_b: got strides"),
    ("elsewhere", {"lse_b": torch.zeros(2, 1, 4, device="meta")}, ValueError,
     "lse_b: got a tensor on meta, want it on cpu, where out_a is"),
    ("huge", {"out_a": torch.empty(1 << 21, 1, 128, 128, dtype=torch.bfloat16, device="meta")}, ValueError,
     r"out_a: got shape \[2097152, 1, 128, 128\], want at most \d+ times 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_argument_is_named_with_what_came_and_what_is_wanted(changes, error, message):
    from cute_kernels.attention.merge_states import check_states

    with pytest.raises(error, match=f"^{message}"):
        check_states(**arguments(**changes))
    if "meta" not in {str(getattr(value, "device", "")) for value in changes.values()}:
        with pytest.raises(error, match=f"^{message}"):
            merge_states(**arguments(**changes))


# -- the operator ------------------------------------------------------------------------------------------------------


def test_the_operator_passes_opcheck():
    torch.library.opcheck(torch.ops.cute_kernels.merge_states.default, tuple(arguments().values()))


def test_it_compiles_without_graph_breaks():
    torch.compiler.reset()

    def step(out_a, lse_a, out_b, lse_b):
        out, lse = merge_states(out_a * 2, lse_a, out_b, lse_b)
        return out + 1, lse

    tensors = tuple(arguments().values())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*tensors), step(*tensors), strict=True):
        assert torch.equal(got, want)


def test_a_parameter_is_as_good_as_a_tensor():
    given = arguments()
    wrapped = torch.nn.Parameter(given["out_a"], requires_grad=False)
    assert torch.equal(merge_states(**given | {"out_a": wrapped})[0], merge_states(**given)[0])


# -- the kernel --------------------------------------------------------------------------------------------------------


def test_a_configuration_that_cannot_be_says_why():
    with pytest.raises(ValueError, match="dtype 'fp8' is not one of 'bf16', 'fp16', 'fp32'"):
        compile_combine(CombineConfig("fp8", states=True), "sm_90a")
    with pytest.raises(ValueError, match="ndim 2 is not one of 3, 4"):
        compile_combine(CombineConfig("bf16", 2, states=True), "sm_90a")
    with pytest.raises(ValueError, match="dtype 'fp32' is not one of 'bf16', 'fp16'"):
        compile_combine(CombineConfig("fp32"), "sm_90a")


def test_specs_have_names_of_their_own():
    symbols = [spec.symbol for spec in shipped_specs() if isinstance(spec.config, CombineConfig)]
    assert len(set(symbols)) == len(symbols) == 7 and all(symbol.isidentifier() for symbol in symbols)


@pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_it_compiles_to_wide_accesses_and_no_spills(dtype):
    (kernel,) = resource_report(default_cache().artifact(AttentionSpec(CombineConfig(dtype, states=True)), "sm_90a"))
    assert kernel.stack_bytes == kernel.spill_store_bytes == kernel.spill_load_bytes == 0
    assert kernel.registers <= 40  # of 128 threads: 12 CTAs to an SM
    assert kernel.opcodes["STG"] == 3  # a log-sum-exp, and columns in one store, or after a loop of no parts
