"""The portable weight-only linear kernel, on a Hopper: every format against fp64, exactness, tails, repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.gemm.launch import launch
from cute_kernels.gemm.plan import make_tile_plan
from cute_kernels.gemm.portable.compile import PortableSpec
from cute_kernels.gemm.portable.config import PortableConfig
from cute_kernels.gemm.portable.schedule import make_portable_schedule, portable_schedules
from cute_kernels.gemm.reference import linear_reference, out_features
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import CUDA, FORMATS, TOLERANCE, activations, assert_near, every_format
from tests.linear.cases import Known, known, problem_of

pytestmark = pytest.mark.gpu

FORMAT_ROWS = (1, 16, 70)
SHAPES = [  # (m, n, k) of the tests below that take 4-bit bf16 weights in groups of 128
    *((m, 200, 520) for m in (1, 33, 130)),
    *((m, 4096, 2048) for m in (4, 64, 300)),
    (5, 65, 1),
]


def portable_config(problem: LinearProblem) -> PortableConfig:
    config = make_portable_schedule(problem).config
    assert isinstance(config.mainloop, PortableMmaSync)
    return config


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found = [problem_of(m, n, k) for m, n, k in SHAPES] + [problem_of(16, 512, 4096)]
    for param in FORMATS:
        form: Any = param.values
        found += [problem_of(m, 200, 520, *form) for m in FORMAT_ROWS]
    return list(dict.fromkeys(PortableSpec(portable_config(problem)) for problem in found))


def run(weight: PackedWeight, x: torch.Tensor, bias=None, residual=None, activation=None, out_dtype=None, **options):
    n, k = weight.shape
    out_dtype = out_dtype or x.dtype
    out = torch.full((x.shape[0], out_features(n, activation)), torch.nan, dtype=out_dtype, device=CUDA)
    return launch(
        x, weight.codes, weight.scales, weight.zeros, bias, residual, weight.format, n, k,
        activation, out_dtype, options.get("batch_invariant", False), out, portable=True,
    )  # fmt: skip


def exact_product(x: torch.Tensor, reference: Known) -> torch.Tensor:
    """x W^T in fp64 with W as the tensor cores see it: rounded, where a scale is not a whole row's."""
    dense = reference.dense.to(CUDA)
    if reference.group_size:
        dense = dense.to(reference.scales.dtype).double()
    return x.double() @ dense.T


@every_format
def test_products_are_those_of_fp64(bits, dtype, group, zero):
    reference = known(200, 520, bits, group, zero, dtype)
    weight = reference.pack().to(CUDA)
    for m in FORMAT_ROWS:
        x = activations(m, 520, dtype, m)
        assert_near(run(weight, x, out_dtype=torch.float32), exact_product(x, reference), 3e-5)


@every_format
def test_one_hot_rows_return_the_weights_bit_by_bit(bits, dtype, group, zero):
    weight = known(200, 520, bits, group, zero, dtype).pack().to(CUDA)
    rows = torch.eye(520, device=CUDA, dtype=dtype)[:70]
    assert torch.equal(run(weight, rows).T, weight.dequantize(dtype)[:, :70])


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_tails_and_sizes(m, n, k):
    reference = known(n, k, group_size=128)
    weight, x = reference.pack().to(CUDA), activations(m, k, torch.bfloat16)
    found = run(weight, x)
    assert_near(found, exact_product(x, reference), TOLERANCE[torch.bfloat16])
    assert torch.equal(run(weight, x), found)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_parts_of_k_add_up(splits):
    problem = problem_of(16, 512, 4096)
    reference = known(512, 4096, group_size=128)
    weight, x = reference.pack().to(CUDA), activations(16, 4096, torch.bfloat16)
    config = make_portable_schedule(problem).config
    found = [one for one in portable_schedules(problem) if one.splits == splits and one.config == config]
    out = torch.full((16, 512), torch.nan, dtype=torch.bfloat16, device=CUDA)
    plan = make_tile_plan(found[0], 16, x.get_device())
    addresses = (weight.codes.data_ptr(), weight.scales.data_ptr(), 0, 0, 0, out.data_ptr())
    for _ in range(3):  # what a launch leaves in the workspace is the next one's
        plan.run(x, addresses, 512, 0, 0)
        assert_near(out, exact_product(x, reference), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
@pytest.mark.parametrize("m", [1, 33])
def test_epilogues(activation, m):
    reference = known(200, 520, group_size=128)
    weight, x = reference.pack(), activations(m, 520, torch.bfloat16)
    bias = activations(1, 200, torch.bfloat16, 1)[0]
    residual = activations(m, out_features(200, activation), torch.bfloat16, 2)
    given = {"activation": activation, "bias": bias, "residual": residual}
    found = run(weight.to(CUDA), x, **given)
    wanted = linear_reference(
        x.cpu(), weight, bias.cpu(), residual=residual.cpu(), activation=activation, out_dtype=torch.float32
    )
    assert_near(found, wanted.to(CUDA).double(), TOLERANCE[torch.bfloat16])


def test_rows_do_not_depend_on_how_many_there_are():
    weight, x = known(200, 520, group_size=128).pack().to(CUDA), activations(130, 520, torch.bfloat16)
    alone = run(weight, x[:1].clone(), batch_invariant=True)
    assert torch.equal(run(weight, x, batch_invariant=True)[:1], alone)
