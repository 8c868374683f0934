"""Merging attention states on a GPU: against fp64, empty parts, large tensors, streams, graphs, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels import merge_states
from cute_kernels.attention.compile import shipped_specs
from cute_kernels.attention.merge_states import launch
from cute_kernels.runtime import KernelSpec
from tests.attention.cases import Call, assert_close, make_call
from tests.attention.states import State, fp64, random_states
from tests.gpu.specs import decode_spec

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FORMATS = ("bf16", "int4_g4")
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@every_dtype
@pytest.mark.parametrize(
    "shape",
    [(5, 3, 64), (2, 3, 4, 80), (1, 1, 1, 8), (0, 2, 4, 64), (512, 1, 8, 128), (33, 16, 7, 192), (9, 2, 3, 256)],
)
def test_it_is_the_fp64_average(dtype, shape):
    a, b = random_states(shape, dtype, CUDA)
    out, lse = merge_states(*a, *b)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (shape, dtype, shape[:-1], torch.float32)
    want, want_lse = fp64(a, b)
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)


@every_dtype
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_empty_parts(dtype, empty):
    """+inf is what MLA decode gives for a query without keys."""
    a, b = random_states((4, 3, 64), dtype, CUDA)
    b.lse[1:].fill_(empty)
    a.lse[2:].fill_(-math.inf)
    b.out[1:], a.out[2:] = math.nan, math.inf
    for out, lse in (merge_states(*a, *b), merge_states(*b, *a)):
        assert torch.equal(out[1], a.out[1]) and torch.equal(lse[1], a.lse[1])
        assert not out[2:].any() and torch.all(lse[2:] == -math.inf)
        assert out[0].isfinite().all()


def test_scores_beyond_the_range_of_exp():
    a, b = random_states((4, 3, 64), torch.float32, CUDA)
    far = State(b.out, b.lse + 1e4)
    out, lse = merge_states(*a, *far)
    assert torch.equal(out, b.out) and torch.equal(lse, far.lse)


def test_more_rows_than_32_bits_have_bytes():
    """Only the last rows are filled."""
    rows = 2**31 // 128 // 2 + 64  # of 256 bytes: 2 GiB and 16 KiB a tensor
    a, b = (
        State(torch.empty(rows, 1, 128, dtype=torch.bfloat16, device=CUDA), torch.zeros(rows, 1, device=CUDA))
        for _ in "ab"
    )
    small = random_states((64, 1, 128), torch.bfloat16, CUDA)
    for whole, part in zip((a, b), small, strict=True):
        whole.out[-64:], whole.lse[-64:] = part.out, part.lse
    out, lse = merge_states(*a, *b)
    want, want_lse = merge_states(*small[0], *small[1])
    assert torch.equal(out[-64:], want) and torch.equal(lse[-64:], want_lse)


def context(kv_format: str, lengths: list[int], device: str = CUDA) -> Call:
    return make_call(kv_format, lengths, num_kv_heads=2, group=4, max_seq_len=1000, device=device)


def specs() -> list[KernelSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    merges = [spec for spec in shipped_specs() if getattr(spec.config, "states", False)]
    return [*merges, *(decode_spec(context(name, [1000, 700, 640], "cpu")) for name in FORMATS)]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_parts_of_a_context_make_the_whole(kv_format):
    call = context(kv_format, [1000, 700, 640])
    first = call.with_lengths([640, 640, 640]).run(return_lse=True)
    rest = context(kv_format, [360, 60, 0])
    rest.q.copy_(call.q)
    for part, whole in ((rest.k_cache, call.k_cache), (rest.v_cache, call.v_cache)):
        part[:, :360] = whole[:, 640:]
    assert_close(call, *merge_states(*first, *rest.run(return_lse=True)))


def test_it_runs_on_the_callers_stream():
    a, b = random_states((512, 1, 8, 128), torch.bfloat16, CUDA)
    want = merge_states(*a, *b)[0].float() * 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        doubled = merge_states(*a, *b)[0].float() * 2
    stream.synchronize()
    assert torch.equal(doubled, want)


def test_it_is_captured_in_graphs():
    a, b = random_states((16, 1, 8, 128), torch.bfloat16, CUDA)
    merge_states(*a, *b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = merge_states(*a, *b)
    other = random_states((16, 1, 8, 128), torch.bfloat16, CUDA, seed=1)
    for old, new in zip((*a, *b), (*other[0], *other[1]), strict=True):
        old.copy_(new)
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip((out, lse), merge_states(*a, *b), strict=True))


def test_the_operator_passes_opcheck():
    a, b = random_states((4, 3, 64), torch.bfloat16, CUDA)
    torch.library.opcheck(torch.ops.cute_kernels.merge_states.default, (*a, *b))


def test_what_the_kernel_cannot_take_is_named():
    a, b = random_states((4, 3, 64), torch.bfloat16, CUDA)
    merge_states(*a, *b)
    room = torch.zeros(4 * 3 * 64 + 8, dtype=torch.bfloat16, device=CUDA)
    for bad, message in (
        ({"out_b": b.out.cpu()}, "out_b: got a tensor on cpu, want it on cuda:0, where out_a is"),
        ({"lse_b": b.lse.half()}, r"lse_b: got dtype torch\.float16, want torch\.float32"),
        ({"lse_b": b.lse[:3]}, r"lse_b: got shape \[3, 3\], want \[4, 3\]"),
        (
            {"out_b": b.out.transpose(0, 1).contiguous().transpose(0, 1)},
            "out_b: got strides",
        ),
        ({"out_b": room[1:-7].view(4, 3, 64)}, "out_b: got a tensor that starts 2 bytes past a multiple of 16"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            launch(tuple(({"out_a": a.out, "lse_a": a.lse, "out_b": b.out, "lse_b": b.lse} | bad).values()))
