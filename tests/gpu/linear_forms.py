"""Formats of weights that tests of compiled calls and of modules share, and numbers of as many rows as have kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cute_kernels import PackedWeight
from cute_kernels.gemm import linear_reference, quantized_linear
from cute_kernels.gemm.reference import prepare_input
from tests.gpu.test_linear import CUDA, is_rounded
from tests.linear.cases import known, problem_of

BF16, FP16 = torch.bfloat16, torch.float16
N, K = 200, 520  # whole tiles of neither
ROWS = (1, 8, 16, 100)
MORE_ROWS = (2, 3, 5, 9, 17, 24, 33, 40)
EVERY_ROWS = (*ROWS, *MORE_ROWS)


@dataclass(frozen=True)
class Form:
    """A format of weights [N, K].

    act_order: whether inputs are permuted. scales_inputs: whether they are multiplied with something first, as AWQ's.
    """

    bits: int
    dtype: torch.dtype
    group: int | None
    zero: bool = False
    act_order: bool = False
    scales_inputs: bool = False

    def pack(self, device: str = CUDA, seed: int = 0) -> PackedWeight:
        generator = torch.Generator().manual_seed(seed)
        perm = torch.randperm(K, generator=generator).int() if self.act_order else None
        scale = (0.5 + torch.rand(K, generator=generator)).to(self.dtype) if self.scales_inputs else None
        codes = known(N, K, self.bits, self.group, self.zero, self.dtype, seed)
        return codes.pack(perm=perm, input_scale=scale).to(device)

    @property
    def cast(self) -> Form:
        """With scales and activations of the other dtype."""
        return replace(self, dtype=BF16 if self.dtype == FP16 else FP16)


PLAIN = {
    "w4": Form(4, BF16, 128),
    "w4 fp16 zero": Form(4, FP16, 32, zero=True),
    "w8 channel zero": Form(8, BF16, None, zero=True),
    "w8 fp16": Form(8, FP16, 64),
}
FORMS = PLAIN | {
    "act-order": Form(4, BF16, 128, zero=True, act_order=True),
    "awq": Form(4, FP16, 128, zero=True, scales_inputs=True),
    "both": Form(8, BF16, 128, act_order=True, scales_inputs=True),
}
plain_forms = pytest.mark.parametrize("form", PLAIN.values(), ids=list(PLAIN))
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


def numbers(*shape: int, dtype: torch.dtype = BF16, device: str = CUDA, seed: int = 0) -> torch.Tensor:
    """Random ones [..., columns], of no other numbers of rows than kernels are found for."""
    assert math.prod(shape[:-1]) in EVERY_ROWS
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(x: torch.Tensor, weight: PackedWeight, **options: Any) -> torch.Tensor:
    """A product in fp64, of W as the tensor cores see it."""
    inputs = prepare_input(x, None, weight.input_scale)
    form = weight.bits, weight.dtype, weight.group_size, weight.zeros is not None
    if not is_rounded(problem_of(x.shape[0], *weight.shape, *form)):
        inputs = inputs.double()  # to whose dtype the reference rounds W
    options |= {"compute_dtype": torch.float64, "out_dtype": torch.float64}
    return linear_reference(inputs, replace(weight, input_scale=None, check_values=False), **options)


def multiply_all(forms: Iterable[Form], **options: Any) -> None:
    """Each number of rows with each format, on the CPU: what only chooses the kernels, whatever else a call has."""
    for form in forms:
        weight = form.pack("cpu")
        for m in EVERY_ROWS:
            quantized_linear(numbers(m, K, dtype=form.dtype, device="cpu"), weight, **options)
