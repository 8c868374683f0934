"""Launches of products whose activations come in limbs of scaled or reordered rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.gemm.arguments import LIMB_TILES
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.factored_limbs_compile import FactoredLimbsSpec
from cute_kernels.gemm.wgmma.factored_limbs_config import FACTORED_LIMB_BLOCKS, FactoredLimbsConfig
from cute_kernels.gemm.wgmma.limb_launch import LimbProduct, block_rows
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.gpu import GPU


@dataclass(frozen=True)
class FactoredLimbProduct(LimbProduct):
    """As `LimbProduct`: what makes limbs takes the address of factors, or of an order, too."""

    def bound(self, numbers: dict[str, int]) -> Callable[..., Any]:
        """As `cute_kernels.gemm.plan.CompiledProduct.bound`; of a norm's numbers there is no use."""
        own = {name: number for name, number in numbers.items() if name in LIMB_TILES.names}
        make = FACTORED_LIMB_BLOCKS.bound(self.make, {"rows": self.rows, "groups": self.groups})
        product = LIMB_TILES.bound(self.function, {**own, "block_rows": self.rows})

        def send(
            x: torch.Tensor,
            codes: int,
            scales: int,
            zeros: int,
            bias: int,
            residual: int,
            out: int,
            workspace: int,
            factors: int,
        ) -> None:
            limbs = GPU.empty(*self.new_blocks)
            place = limbs.data_ptr()
            make(x=x, out=place, factors=factors)
            product(
                x=x, codes=codes, scales=scales, limbs=place, bias=bias, residual=residual, out=out, workspace=workspace
            )

        return send


def factored_limbs_spec(config: WgmmaConfig, kind: str) -> FactoredLimbsSpec:
    """What makes limbs for a configuration of rows that meet factors or another order."""
    return FactoredLimbsSpec(FactoredLimbsConfig(config.dtype, kind))


def factored_limb_product(
    config: WgmmaConfig, function: Callable[..., Any], kind: str, m: int, groups: int, arch: str
) -> FactoredLimbProduct:
    """As `limb_launch.limb_product`, of rows that meet factors or another order: ``kind``, of `FactoredLimbsConfig`."""
    make = load(factored_limbs_spec(config, kind), arch)
    return FactoredLimbProduct(make, function, block_rows(config, m), groups)
