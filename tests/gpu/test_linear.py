"""Weight-only linear layers on a GPU: every format against fp64, exactness, tails, epilogues, repeats, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import quantized_linear, rms_norm
from cute_kernels.arguments import row_stride
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.inputs.config import ROOMS
from cute_kernels.gemm.inputs.launch import input_rows
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import make_product
from cute_kernels.gemm.reference import linear_reference, prepare_input
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.schedule import FEW_ROWS, make_schedule, schedules
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.spec import KernelSpec
from tests.linear.cases import Known, known, launch_product, problem_of

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FORMATS = [
    pytest.param(bits, dtype, group, zero, id=f"w{bits}-{str(dtype)[6:]}-g{group}{'-zero' if zero else ''}")
    for bits in (4, 8)
    for dtype in (torch.bfloat16, torch.float16)
    for group in (32, 64, 128, 256, None)
    for zero in (False, True)
]
every_format = pytest.mark.parametrize("bits, dtype, group, zero", FORMATS)
# Of the largest result; a bf16 is off by up to half of 2**-7 of itself.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5}


SHAPES = [  # (m, n, k, group) of the tests below that take 4-bit bf16 weights
    *((m, 192, 640, 128) for m in (*range(1, 34), 64, 70)),
    *((m, n, k, 32) for m in (3, 16) for n in (1, 257) for k in (1, 65, 129, 2056)),
    *((m, n, k, 32) for m in (7, 8, 16, 32) for n, k in ((130, 320), (1000, 2048), (1024, 512))),
    *((m, n, k, 128) for m in (1, 8, 16, 32) for n, k in ((640, 4096), (4224, 2048), (20_000, 512))),
    *((m, 1000, 2048, 128) for m in (3, 16)),
    *((m, n, k, 32) for m in (4, 5) for n, k in ((256, 512), (128, 264))),
    (40, 1024, 512, 32),
    (6, 14_336, 1024, 128),
    (12, 24_576, 512, 128),
    (3, 128, 72, 64),
    (2, 140_032, 16_384, 128),
]
# (m, n, k) of sums with a residual: few rows, clusters, parts of K, several chunks, several work tiles of a CTA, TMA
# stores, and rows of results that are no whole tiles.
SUMS = [
    *((m, n, 1024) for n in (200, 1000, 8192) for m in (1, 8, 13, 33, 64, 100)),
    *((m, 8192, 1024) for m in (200, 256, 500, 1024, 1500)),
    *((m, 520, 4096) for m in (2, 16, 48, 300)),
    (70, 28_672, 512),
]


def spec_of(problem: LinearProblem) -> KernelSpec:
    """The kernel that `cute_kernels.quantized_linear` takes for a product on an H200."""
    return GemmSpec(chosen(problem).config)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    formats: list[Any] = [param.values for param in FORMATS]
    found = [problem_of(m, n, k, *form) for form in formats for n, k in ((200, 520), (1000, 2048)) for m in (1, 8, 16)]
    found += [problem_of(576, 130, 576, *form) for form in formats]
    for m, n, k, group in SHAPES:
        found += [problem_of(m, n, k, 4, torch.bfloat16, group, zero) for zero in (False, True)]
    chains = [(m, 1024, 1024) for m in (1, 8, 16, 64, 300)]
    found += [problem_of(m, n, k, 4, torch.bfloat16, 128, False) for m, n, k in (*SUMS, *chains)]
    few: list[KernelSpec] = [GemmSpec(make_schedule(one).config) for one in found if one.m <= FEW_ROWS]
    few += [
        GemmSpec(RowsConfig(dtype, makes=INPUTS, room=room, scaled=scaled))
        for dtype in ("bf16", "fp16")
        for room in (0, *ROOMS)
        for scaled in (False, True)
    ]
    return list(dict.fromkeys([*few, *map(spec_of, found)]))


def run(weight: PackedWeight, x: torch.Tensor, **options) -> torch.Tensor:
    return quantized_linear(x, weight, **options)


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def is_rounded(problem: LinearProblem) -> bool:
    """Whether W is rounded to the dtype of x: in tiles of decoded weights, where a scale is not a whole row's."""
    config = chosen(problem).config
    return problem.format.group_size > 0 and isinstance(config, WgmmaConfig) and not config.limbs


def exact_product(x: torch.Tensor, reference: Known) -> torch.Tensor:
    """x W^T in fp64 with W as the tensor cores see it."""
    dense = reference.dense.to(CUDA)
    if is_rounded(reference.problem(x.shape[0])):
        dense = dense.to(reference.scales.dtype).double()
    return x.double() @ dense.T


def sums_tolerance(m: int, reference: Known) -> float:
    """Of fp32 results; the accumulators of a warpgroup's MMAs are of more products each before they are rounded."""
    config = chosen(reference.problem(m)).config
    if isinstance(config, WgmmaConfig):
        return 2e-4 if config.limbs else 3e-5
    return TOLERANCE[torch.float32]


def assert_near(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - exact).abs().max().item()
    assert error <= tolerance * exact.abs().max().item(), error


@every_format
@pytest.mark.parametrize("n, k", [(200, 520), (1000, 2048)])
def test_products_are_those_of_fp64(bits, dtype, group, zero, n, k):
    reference = known(n, k, bits, group, zero, dtype)
    weight = reference.pack().to(CUDA)
    for m in (1, 5, 8, 13, 16):
        x = activations(m, k, dtype, m)
        exact = exact_product(x, reference)
        assert_near(run(weight, x, out_dtype=torch.float32), exact, sums_tolerance(m, reference))
        assert_near(run(weight, x), exact, TOLERANCE[dtype])


@every_format
def test_one_hot_rows_return_the_weights_bit_by_bit(bits, dtype, group, zero):
    weight = known(130, 576, bits, group, zero, dtype).pack().to(CUDA)
    rows = torch.eye(576, device=CUDA, dtype=dtype)
    assert torch.equal(run(weight, rows).T, weight.dequantize(dtype))


@pytest.mark.parametrize("m", [0, 2, 3, 4, 7, 9, 15, 17, 32, 33, 64, 70])
def test_any_number_of_rows(m):
    reference = known(192, 640, group_size=128)
    x = activations(m, 640, torch.bfloat16)
    found = run(reference.pack().to(CUDA), x)
    assert found.shape == (m, 192)
    if m:
        assert_near(found, x.double() @ reference.dense.to(CUDA).T, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("n", [1, 2, 3, 63, 65, 130, 257])
@pytest.mark.parametrize("k", [1, 8, 63, 65, 129, 2056])
@pytest.mark.parametrize("m", [3, 16])
def test_tails(n, k, m):
    reference = known(n, k, group_size=32, zero_point=True)
    x = activations(m, k, torch.bfloat16)
    out = torch.full((m, n), math.nan, device=CUDA, dtype=torch.float32)
    guard = torch.full((m * n + 64,), 7.0, device=CUDA)
    inside = guard[: m * n].view(m, n)
    run(reference.pack().to(CUDA), x, out=out)
    run(reference.pack().to(CUDA), x, out=inside)
    assert_near(out, exact_product(x, reference), sums_tolerance(m, reference))
    assert torch.equal(inside, out) and torch.all(guard[m * n :] == 7.0)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n, k, m", [(130, 320, 7), (1000, 2048, 16), (1024, 512, 40)])
def test_epilogues(activation, out_dtype, n, k, m):
    check_epilogues(known(n, k), m, activation, out_dtype)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("n, k, m", [(14_336, 1024, 6), (24_576, 512, 12)])
def test_epilogues_of_ctas_that_make_limbs_of_large_blocks(activation, n, k, m):
    reference = known(n, k, group_size=128)
    config = chosen(reference.problem(m)).config
    assert isinstance(config, WgmmaConfig) and isinstance(config.mainloop, ResidentLimbs)
    check_epilogues(reference, m, activation, torch.bfloat16)


def check_epilogues(
    reference: Known, m: int, activation: str | None, out_dtype: torch.dtype, batch_invariant: bool = False
) -> None:
    """Products of ``m`` rows with and without bias and residual against those of fp64."""
    weight = reference.pack().to(CUDA)
    n, k = weight.shape
    x = activations(m, k, torch.bfloat16)
    # W is rounded to the dtype of what it is multiplied with.
    wide = x if batch_invariant or is_rounded(reference.problem(m)) else x.double()
    columns = n // 2 if activation == "swiglu" else n
    bias = activations(1, n, torch.bfloat16, 1)[0]
    residual = activations(m, columns, out_dtype, 2)
    for options in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        options = {**options, "activation": activation, "out_dtype": out_dtype}
        exact = linear_reference(wide, weight, compute_dtype=torch.float64, **{**options, "out_dtype": torch.float64})
        out = torch.full((m, columns), math.nan, device=CUDA, dtype=out_dtype)
        found = run(weight, x, out=out, batch_invariant=batch_invariant, **options)
        assert_near(found, exact, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, k", [(1, 8), (1, 8192), (3, 2056), (16, 14_336), (100, 264), (300, 9000), (2, 100_000)])
def test_prepared_rows_are_those_of_torch_bit_for_bit(m, k, dtype):
    """Longer rows than shared memory holds too, in another order, which torch prepares."""
    wide = activations(m, k + 16, dtype)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1)).to(CUDA, torch.int32)
    factors = activations(1, k, dtype, 2)[0]
    for x in (wide[:, 8 : k + 8], wide[:, :k].contiguous(), wide[:1, :k].expand(m, k)):
        for perm, scale in ((None, None), (order, None), (None, factors), (order, factors)):
            make = input_rows(x, row_stride(x), perm, scale)
            assert (make is None) == (perm is not None and k == 100_000)
            if make is not None:
                assert torch.equal(make.make(x, perm, scale), prepare_input(x, perm, scale))


@pytest.mark.parametrize("m", [1, 16, 70])
def test_products_of_prepared_rows(m):
    plain = known(192, 640, group_size=128).pack().to(CUDA)
    perm = torch.randperm(640, generator=torch.Generator().manual_seed(1)).to(CUDA, torch.int32)
    weight = replace(plain, perm=perm, input_scale=activations(1, 640, torch.bfloat16, 3)[0])
    wide = activations(m, 1000, torch.bfloat16)
    for x in (wide[:, :640], wide[:, 8:648], wide[:, 1:641], wide[:, :640].unflatten(0, (m, 1))):
        want = run(plain, prepare_input(x, weight.perm, weight.input_scale))
        assert torch.equal(run(weight, x), want)
        assert torch.equal(run(weight, x), want), "kept"
        want = run(plain, x.contiguous())
        assert torch.equal(run(plain, x), want)
        assert torch.equal(run(plain, x), want), "kept"


def check_back_to_back(chain: Callable[[Callable[[], None]], torch.Tensor]) -> torch.Tensor:
    """What a chain of launches gives with a wait after each, once the same bits came without, 30 times and in a graph.

    chain: calls its argument after each launch.
    """
    want = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(30):
        assert torch.equal(chain(lambda: None), want)
        graph.replay()
        assert torch.equal(found, want)
    return want


@pytest.mark.parametrize("m", [1, 8, 16, 64, 300])
def test_a_launch_that_begins_early_waits_for_the_one_before(m):
    """Of a chain in which each launch reads what the last one wrote, and writes what the one before that read."""
    weight = known(1024, 1024, group_size=128).pack().to(CUDA)
    scale, start = torch.ones(1024, device=CUDA, dtype=torch.bfloat16), activations(m, 1024, torch.bfloat16)
    x, hidden = torch.empty_like(start), start.clone()

    def chain(after) -> torch.Tensor:
        hidden.copy_(start)
        for _ in range(6):
            for step in (
                lambda: rms_norm(hidden, scale, out=x),
                lambda: run(weight, x, residual=hidden, out=hidden),
                lambda: run(weight, hidden, out=x),
                lambda: run(weight, x, out=hidden),
            ):
                step()
                after()
        return hidden.clone()

    check_back_to_back(chain)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_weights_that_have_just_been_written_are_read(m):
    one, other = (known(1024, 1024, group_size=128, seed=seed).pack().to(CUDA) for seed in (0, 1))
    weight = replace(one, codes=one.codes.clone(), scales=one.scales.clone())
    x = activations(m, 1024, torch.bfloat16)
    wanted = [run(each, x) for each in (one, other)]
    for number in range(40):
        weight.scales.copy_((one, other)[number % 2].scales)
        weight.codes.copy_((one, other)[number % 2].codes)
        assert torch.equal(run(weight, x), wanted[number % 2])


@pytest.mark.parametrize("m, n, k", SUMS)
def test_a_residual_is_added_in_fp32_and_the_sum_rounded_once(m, n, k):
    weight = known(n, k, group_size=128).pack().to(CUDA)
    x, bias, residual = (activations(*size, torch.bfloat16, size[0]) for size in ((m, k), (1, n), (m, n)))
    for options in ({}, {"bias": bias[0]}):
        sums = run(weight, x, out_dtype=torch.float32, **options) + residual.float()
        guard = torch.full((m + 1, n), 7.0, device=CUDA, dtype=torch.bfloat16)
        assert torch.equal(run(weight, x, residual=residual, out=guard[:m], **options), sums.bfloat16())
        assert torch.all(guard[m] == 7.0)


def test_a_residual_may_be_the_output():
    weight = known(256, 512).pack().to(CUDA)
    x, residual = activations(5, 512, torch.bfloat16), activations(5, 256, torch.bfloat16, 1)
    wanted = run(weight, x, residual=residual)
    assert run(weight, x, residual=residual, out=residual) is residual
    assert torch.equal(residual, wanted)


def test_padding_does_not_see_nan_behind_the_activations():
    reference = known(128, 72, group_size=64)
    memory = torch.full((3, 200), math.nan, device=CUDA, dtype=torch.bfloat16)
    memory.view(-1)[: 3 * 72] = activations(3, 72, torch.bfloat16).view(-1)
    x = memory.view(-1)[: 3 * 72].view(3, 72)
    assert_near(run(reference.pack().to(CUDA), x), x.double() @ reference.dense.to(CUDA).T, TOLERANCE[torch.bfloat16])


def test_misaligned_activations():
    reference = known(128, 264, group_size=32)
    memory = torch.empty(1 + 5 * 264, device=CUDA, dtype=torch.bfloat16)
    x = memory[1:].view(5, 264)
    x.copy_(activations(5, 264, torch.bfloat16))
    assert_near(run(reference.pack().to(CUDA), x), x.double() @ reference.dense.to(CUDA).T, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("n, k", [(640, 4096), (4224, 2048), (20_000, 512)])
@pytest.mark.parametrize("m", [1, 8])
def test_every_cut_gives_the_same_numbers_each_time(n, k, m):
    """Whatever slices and groups: right, the same bits in every run, and a workspace left as it was.

    Among them CTAs with whole blocks, with many blocks of a slice, and with a part of one.
    """
    reference = known(n, k, group_size=128)
    weight = reference.pack().to(CUDA)
    x = activations(m, k, torch.bfloat16)
    exact = x.double() @ reference.dense.to(CUDA).T
    problem = LinearProblem(m, n, k, k, integers(4), "bf16")
    config = make_schedule(problem).config
    for schedule in schedules(problem, config):
        product = make_product(schedule, m, torch.cuda.current_device())
        words = torch.full((max(1, schedule.workspace_words(m)),), -1, dtype=torch.int32, device=CUDA)
        results = []
        with standing_in(Gpu(workspace=lambda index, stream, num_words, words=words: words.data_ptr())):
            for _ in range(3):
                out = torch.full((m, n), math.nan, device=CUDA, dtype=torch.float32)
                launch_product(product, x, weight, out)
                results.append(out)
        assert_near(results[0], exact, TOLERANCE[torch.float32])
        assert all(torch.equal(results[0], other) for other in results[1:])
        assert torch.all(words == -1)


def test_nan_and_infinity_stay_in_their_rows():
    weight = known(256, 512).pack().to(CUDA)
    x = activations(4, 512, torch.bfloat16)
    clean = run(weight, x)
    x[1, 7], x[2, 300] = math.nan, math.inf
    found = run(weight, x)
    assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert found[1].isnan().all() and not found[2].isfinite().any()


def test_graphs_replay():
    weight = known(1000, 2048, group_size=128).pack().to(CUDA)
    x = activations(16, 2048, torch.bfloat16)
    run(weight, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = run(weight, x)
        second = run(weight, first.new_ones(3, 2048))
    for seed in range(3):
        x.copy_(activations(16, 2048, torch.bfloat16, seed))
        first.fill_(math.nan)
        second.fill_(math.nan)
        graph.replay()
        assert torch.equal(first, run(weight, x))
        assert torch.equal(second, run(weight, torch.ones(3, 2048, device=CUDA, dtype=torch.bfloat16)))


def test_streams_do_not_share_partial_results():
    weight = known(640, 4096, group_size=128).pack().to(CUDA)
    inputs = [activations(8, 4096, torch.bfloat16, seed) for seed in range(4)]
    wanted = [run(weight, x) for x in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            found.append([run(weight, x) for _ in range(20)])
    torch.cuda.synchronize()
    for results, one in zip(found, wanted, strict=True):
        assert all(torch.equal(result, one) for result in results)


def test_weights_beyond_two_to_the_31_elements():
    """The last rows of 140,000 x 16,384, whose codes lie beyond 2**30 bytes and elements beyond 2**31."""
    n, k = 140_032, 16_384
    last = known(64, k, group_size=128)
    tail = last.pack().to(CUDA)
    codes = torch.zeros(n // 64, k // 64, 2048, dtype=torch.uint8, device=CUDA)
    scales = torch.zeros(n // 64, k // 128, 64, dtype=torch.bfloat16, device=CUDA)
    codes[-1:], scales[-1:] = tail.codes, tail.scales
    weight = PackedWeight(codes, scales, None, integers(4), (n, k))
    x = activations(2, k, torch.bfloat16)
    found = run(weight, x)
    assert_near(found[:, -64:], x.double() @ last.dense.to(CUDA).T, TOLERANCE[torch.bfloat16])
    assert not found[:, :-64].any()
