"""Scales of a k block's sums: in formats that the package does not know, and in machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import FP8_BLOCK
from cute_kernels.formats.weights.fp8 import FloatFp8
from cute_kernels.formats.weights.integer_decode import IntegerDecoder
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ScaledSums
from cute_kernels.gemm.wgmma.schedule import candidate_configs
from cute_kernels.runtime import default_cache
from tests import golden
from tests.golden.rules import broken
from tests.linear.cases import random_weight
from tests.linear.test_wgmma_products import DTYPES, Machine

ZERO = 128


@dataclass(frozen=True, eq=False)
class Offset(FloatFp8):
    """W = (code - 128) * scale, with fp32 scales."""

    @property
    def codes_name(self) -> str:
        return "offset8"

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        return ((codes.double() - ZERO) * self.numbers_of(scales).unsqueeze(-1)).float()

    def decoder(self, dtype: str, math: Any) -> Any:
        return IntegerDecoder(8, dtype, math)


@dataclass(frozen=True, eq=False)
class Scaling(FloatFp8):
    """FP8 whose only decoder multiplies by the scale."""

    def decoder(self, dtype: str, math: Any) -> Any:
        return self.scaling_decoder(dtype, math)


@pytest.mark.parametrize("kind", [Offset, Scaling])
@pytest.mark.parametrize(("group_size", "block_k"), [(64, 64), (128, 64), (128, 128), (256, 64), (256, 128)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_decoder_has_the_numbers_of_its_rows(kind: Any, group_size: int, block_k: int, dtype: str, run_on):
    form = kind(group_size=group_size)
    steps = 1 if block_k == 64 else 2
    config = WgmmaConfig(form, dtype, tile_m=16, block_k=block_k, num_stages=2, mainloop=ScaledSums(steps))
    assert config.can_implement() is None
    weight = random_weight(form, DTYPES[dtype], config.block_rows, max(group_size, block_k))
    x = torch.randn(config.tile_m, block_k, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    exact = weight.dequantize(torch.float64)[:, :block_k]
    exact = exact.to(weight.dtype).double() if kind is Scaling else exact
    wanted = (x.double() @ exact.T).numpy()
    found = Machine(config, weight, x, run_on).stage(packed=False)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


def test_mmas_of_two_tiles_run_without_a_wait_for_each():
    """Three warpgroups have the fewest registers for the sums of two tiles. ptxas serialised their MMAs."""
    found = candidate_configs(LinearProblem(16, 28672, 4096, 4096, FP8_BLOCK, "bf16"))
    wanted = (16, 2, 3, 1)
    (config,) = (one for one in found if (one.tile_m, one.n_tiles, one.warpgroups, one.cluster) == wanted)
    assert isinstance(config.mainloop, ScaledSums)
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert not list(broken(spec, kernel))
