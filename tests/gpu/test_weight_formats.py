"""Weight formats that are no plain integers, on the GPU: each kernel that serves them against fp64.

One of each kind is taken; a format from elsewhere has these tests by being registered, as
`tests.weight_formats.codebook` is.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_kernels import grouped_linear, quantize_experts, quantize_weight, quantized_linear
from cute_kernels.formats.weights import (
    FP8,
    FP8_BLOCK,
    MXFP8,
    ShiftedFormat,
    WeightFormat,
    integers,
    registered_formats,
    shifted,
    weight_format,
)
from cute_kernels.formats.weights.fp4 import MOST_FOLDED, MXFP4, MXFP4_ANY, NVFP4
from cute_kernels.gemm import pack_weight
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.experts import choice as experts_choice
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight, padded_shape
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import MmaSync, ScaledSums
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.specs import products_needed_by
from tests.weight_formats import codebook

pytestmark = pytest.mark.gpu

CUDA = "cuda"
N, K = 200, 520  # tails of both
ROWS = (1, 5, 16, 64, 300)
LIMB_CASES = ((1, 4096, 4096), (5, 4096, 4096), (8, 8192, 8192), (3, 28672, 4096), (16, 28672, 4096))  # rows, N, K
HALF_GROUP_CASES = ((1, 4096, 4096), (4, 8192, 8192), (3, 28672, 4096), (2, 4096, 14336))  # of NVFP4
FP8_CASES = ((1, 8192, 8192), (5, 4096, 4096), (8, 4096, 4096), (3, 28672, 4096), (8, 28672, 4096))  # of FP8_BLOCK
E4M3_LIMBS = 1e-4
EXPERTS, PLACES = 4, (6, 900)
LIMB_EXPERTS, LIMB_EXPERTS_K = (MXFP4, NVFP4, FP8, FP8_BLOCK), 1024
# Of FP8 a scale a row, blocks of both kinds, and fp16 once.
ELSEWHERE = [form for form in registered_formats() if form.codes_name not in ("w4", "w8", "w4f", "w8f", "e4m3")]
ELSEWHERE.remove(MXFP4_ANY)  # which has a test of its own
ELSEWHERE += [shifted(*sizes) for sizes in ((4, 128), (4, 64), (4, 16), (8, 32))]
ELSEWHERE += [integers(4, 16), integers(8, 16, zero_points=True)]
CASES = [(form, dtype) for form in ELSEWHERE for dtype, name in DTYPES.items() if name in form.dtypes]
CASES += [(form, torch.bfloat16) for form in (FP8, FP8_BLOCK, MXFP8)]
HALF = (FP8_BLOCK, torch.float16)
every_format = pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(form: WeightFormat, dtype: torch.dtype, n: int = N, k: int = K) -> PackedWeight:
    return quantize_weight(random(n, k), format=form, dtype=dtype)


@pytest.mark.parametrize("form", registered_formats(), ids=str)
def test_weights_quantised_on_the_gpu_are_those_quantised_on_the_cpu(form: WeightFormat):
    """Of numbers with few bits, whose quotients often lie between two scales or codes."""
    w = random(N, K).bfloat16().float()
    found, wanted = quantize_weight(w.cuda(), format=form), quantize_weight(w, format=form)
    for name in ("codes", "scales", "zeros"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8)), name


def problem_of(form: WeightFormat, dtype: torch.dtype, m: int, n: int = N, k: int = K, **options: Any) -> LinearProblem:
    return LinearProblem(m, n, k, padded_shape((n, k), form.group_size)[1], form, DTYPES[dtype], **options)


def limb_problem(form: WeightFormat, m: int, n: int, k: int) -> LinearProblem:
    return problem_of(form, torch.bfloat16, m, n, k)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: list[KernelSpec] = []
    for form, dtype in CASES:
        problems = [problem_of(form, dtype, m) for m in ROWS]
        problems += [problem_of(form, dtype, 5, batch_invariant=True), problem_of(form, dtype, 16, 4096, 4096)]
        found += [GemmSpec(chosen(problem).config) for problem in problems]
        for places in PLACES:
            found += products_needed_by(lambda: grouped(form, dtype, places, "cpu"))  # noqa: B023
    found += [GemmSpec(chosen(limb_problem(form, *case)).config) for form in (MXFP4, MXFP4_ANY) for case in LIMB_CASES]
    found += [GemmSpec(chosen(limb_problem(NVFP4, *case)).config) for case in HALF_GROUP_CASES]
    found += [GemmSpec(chosen(limb_problem(FP8_BLOCK, *case)).config) for case in FP8_CASES]
    for form in LIMB_EXPERTS:
        found += products_needed_by(lambda: grouped(form, torch.bfloat16, 12, "cpu", LIMB_EXPERTS_K))  # noqa: B023
    more = (HALF, (MXFP4_ANY, torch.bfloat16))
    found += [GemmSpec(chosen(problem_of(*each, m)).config) for each in more for m in ROWS]
    return list(dict.fromkeys(found))


def seen(weight: PackedWeight, problem: LinearProblem) -> torch.Tensor:
    """W in fp64 as the tensor cores see it: rounded in tiles of warpgroups, unless scales multiply sums."""
    config = chosen(problem).config
    exact = weight.dequantize(torch.float64)
    rounds = isinstance(weight.format, ShiftedFormat)
    if isinstance(config, WgmmaConfig):
        rounds = not config.limbs and (rounds or not isinstance(config.mainloop, (MmaSync, ScaledSums)))
    rounds = rounds and weight.group_size is not None
    return exact.to(weight.dtype).double() if rounds else exact


def tolerance_of(problem: LinearProblem) -> float:
    """The relative error of fp32 results. Tensor cores add E4M3 products of 32 inputs at a time, with some 14 bits."""
    config = chosen(problem).config
    return E4M3_LIMBS if isinstance(config, WgmmaConfig) and config.limbs and problem.format.bytes_in_e4m3 else 3e-5


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert float((found.double().cpu() - wanted).norm() / wanted.norm()) < tolerance


def test_there_is_a_format_from_a_file_of_its_own():
    assert codebook.CODEBOOK in ELSEWHERE


@every_format
@pytest.mark.parametrize("m", ROWS)
def test_products_are_those_of_fp64(form, dtype, m):
    weight, x = weight_of(form, dtype), random(m, K, seed=m).to(dtype)
    found = quantized_linear(x.to(CUDA), weight.to(CUDA), out_dtype=torch.float32)
    problem = problem_of(form, dtype, m)
    assert_near(found, x.double() @ seen(weight, problem).T, tolerance_of(problem))


@pytest.mark.parametrize(("form", "dtype"), [*CASES, HALF], ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_one_hot_rows_return_the_weights_bit_by_bit(form, dtype, m):
    weight = weight_of(form, dtype)
    inputs = (torch.arange(m) * 7 + 3) % K
    x = torch.zeros(m, K, dtype=dtype)
    x[torch.arange(m), inputs] = 1
    found = quantized_linear(x.to(CUDA), weight.to(CUDA))
    assert torch.equal(found.cpu(), weight.dequantize(dtype)[:, inputs].T)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("most", [MOST_FOLDED, 252])
def test_every_scale_of_mxfp4_returns_the_weights_bit_by_bit(most, m):
    """From subnormal numbers of bf16 to the largest ones. A weight with scales beyond 2 is of another format."""
    generator = torch.Generator().manual_seed(m)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, most + 1, (N, -(-K // 32)), dtype=torch.uint8, generator=generator)
    scales[3, :3] = torch.tensor([0, 1, most])
    weight = pack_weight("mxfp4", codes, scales)
    assert (weight.format is MXFP4_ANY) == (most > MOST_FOLDED)
    inputs = (torch.arange(m) * 7 + 3) % K
    x = torch.zeros(m, K, dtype=torch.bfloat16)
    x[torch.arange(m), inputs] = 1
    found = quantized_linear(x.to(CUDA), weight.to(CUDA))
    assert torch.equal(found.cpu(), weight.dequantize()[:, inputs].T)


@pytest.mark.parametrize(("m", "n", "k"), LIMB_CASES)
@pytest.mark.parametrize("most", [MOST_FOLDED, 252])
def test_limbs_in_e4m3_return_weights_bit_by_bit_and_sums_of_fp64(most, m, n, k):
    """One-hot rows by scales of all sizes, then rows of normal and of very different inputs."""
    generator = torch.Generator().manual_seed(m)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, most + 1, (n, k // 32), dtype=torch.uint8, generator=generator)
    weight = pack_weight("mxfp4", codes, scales).to(CUDA)
    config = chosen(limb_problem(weight.format, m, n, k)).config
    assert isinstance(config, WgmmaConfig) and config.limbs
    inputs = ((torch.arange(m) * 647 + 3) % k).to(CUDA)
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=CUDA)
    x[torch.arange(m), inputs] = 1
    assert torch.equal(quantized_linear(x, weight), weight.dequantize()[:, inputs].T)
    assert_sums_in_limbs(MXFP4, m, n, k)


@pytest.mark.parametrize(("m", "n", "k"), FP8_CASES)
def test_codes_that_are_e4m3_have_sums_of_fp64_in_limbs(m, n, k):
    config = chosen(limb_problem(FP8_BLOCK, m, n, k)).config
    assert isinstance(config, WgmmaConfig) and config.limbs
    assert_sums_in_limbs(FP8_BLOCK, m, n, k)


def assert_sums_in_limbs(form: WeightFormat, m: int, n: int, k: int) -> None:
    """Rows of normal and of very different inputs."""
    weight = weight_of(form, torch.bfloat16, n, k)
    dense, weight = weight.dequantize(torch.float64), weight.to(CUDA)
    for x, most_error in (
        (random(m, k), E4M3_LIMBS),
        (random(m, k) * random(m, k, seed=1).mul(2).exp(), 4 * E4M3_LIMBS),
    ):
        x = x.bfloat16()
        found = quantized_linear(x.to(CUDA), weight, out_dtype=torch.float32)
        assert_near(found, x.double() @ dense.T, most_error)


@pytest.mark.parametrize(("m", "n", "k"), HALF_GROUP_CASES)
def test_groups_of_half_an_mma_return_weights_bit_by_bit_and_sums_of_fp64(m, n, k):
    """One-hot rows by scales of all sizes in both levels, each row with an input of either group of an MMA."""
    generator = torch.Generator().manual_seed(m)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    weight = pack_weight("nvfp4", codes, scales, random(n, seed=m).abs()).to(CUDA)
    config = chosen(limb_problem(weight.format, m, n, k)).config
    assert isinstance(config, WgmmaConfig) and config.limbs
    for first in (3, 16 + 3):
        inputs = ((torch.arange(m) * 5 * 32 + first) % k).to(CUDA)
        x = torch.zeros(m, k, dtype=torch.bfloat16, device=CUDA)
        x[torch.arange(m), inputs] = 1
        assert torch.equal(quantized_linear(x, weight), weight.dequantize()[:, inputs].T)
    assert_sums_in_limbs(NVFP4, m, n, k)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp8"])
def test_given_fp8_weights_are_those_of_torch_and_nan_stays_in_its_feature(name, m):
    """Scales of a checkpoint's sizes, zero and the least among them, codes of all numbers."""
    form = weight_format(name)
    codes = torch.randint(0, 256, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(m))
    codes = torch.where(codes & 0x7F == 0x7F, 3, codes)
    codes[9, K - 1] = 0x7F
    groups = -(-K // (form.group_size or K))
    scales = 1e-3 * random(N, groups).abs()
    scales[4] = 0
    if name == "mxfp8":
        scales = (scales.log2().round() + 127).clamp(0, 254).to(torch.uint8)
    weight = pack_weight(name, codes, scales)
    inputs = (torch.arange(m) * 7 + 3) % K
    x = torch.zeros(m, K, dtype=torch.bfloat16)
    x[torch.arange(m), inputs] = 1
    found = quantized_linear(x.to(CUDA), weight.to(CUDA)).cpu()
    wanted = weight.dequantize()[:, inputs].T.clone()
    wanted[:, 9] = torch.nan
    assert torch.equal(found.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@every_format
def test_large_products_and_batch_invariant_ones_are_right(form, dtype):
    weight = weight_of(form, dtype, 4096, 4096)
    x = random(16, 4096, seed=1).to(dtype)
    found = quantized_linear(x.to(CUDA), weight.to(CUDA), out_dtype=torch.float32)
    problem = problem_of(form, dtype, 16, 4096, 4096)
    assert_near(found, x.double() @ seen(weight, problem).T, 3e-5)
    weight, x = weight_of(form, dtype), random(5, K, seed=2).to(dtype).to(CUDA)
    together = quantized_linear(x, weight.to(CUDA), batch_invariant=True)
    alone = [quantized_linear(row, weight.to(CUDA), batch_invariant=True) for row in x.split(1)]
    assert torch.equal(together, torch.cat(alone))


def grouped(
    form: WeightFormat, dtype: torch.dtype, places: int, device: str, k: int = K, x: torch.Tensor | None = None
):
    """(result, x, weights, offsets) of a grouped product of experts with different numbers of rows, one with none."""
    w = torch.stack([random(N, k, seed=i) for i in range(EXPERTS)])
    weights = quantize_experts(w, format=form, dtype=dtype)
    ends = [0, places // 6, places // 6, places // 2, places]
    offsets = torch.tensor(ends, dtype=torch.int32)
    x = random(places, k, seed=places).to(dtype) if x is None else x
    found = grouped_linear(x.to(device), weights.to(device), offsets.to(device), out_dtype=torch.float32)
    return found, x, weights, ends


@pytest.mark.parametrize("form", LIMB_EXPERTS, ids=str)
def test_experts_of_few_rows_are_multiplied_in_limbs(form):
    """An expert has more rows than an entry. One-hot rows return weights, to the last bits of fp32."""
    dtype, places, k = torch.bfloat16, 12, LIMB_EXPERTS_K
    layout = experts_choice.chosen(GroupedProblem(places, EXPERTS, N, k, k, form, "bf16"))
    assert isinstance(layout, RangeLayout)
    inputs = (torch.arange(places) * 67 + 3) % k
    hot = torch.zeros(places, k, dtype=dtype)
    hot[torch.arange(places), inputs] = 1
    for x, most in ((hot, 1e-7), (None, E4M3_LIMBS)):
        found, x, weights, ends = grouped(form, dtype, places, CUDA, k, x)
        for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
            wanted = x[begin:end].double() @ weights[expert].dequantize(torch.float64).T
            assert begin == end or float((found[begin:end].double().cpu() - wanted).norm() / wanted.norm()) <= most


@every_format
@pytest.mark.parametrize("places", PLACES)
def test_experts_are_multiplied_as_fp64_has_it(form, dtype, places):
    found, x, weights, ends = grouped(form, dtype, places, CUDA)
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        exact = weights[expert].dequantize(torch.float64)
        wanted = (x[begin:end].double() @ exact.T, x[begin:end].double() @ exact.to(dtype).double().T)
        rows = found[begin:end].double().cpu()
        most = E4M3_LIMBS if form.bytes_in_e4m3 else 3e-5
        assert min(float((rows - one).norm() / one.norm()) for one in wanted) < most
