"""The kernels of routers, and of sorting, that ship."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.gemm.experts.router.config import IDS, LOGITS, TILE_TOKENS, RouterConfig, lane_experts_of
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.runtime.spec import KernelSpec

SHIPPED_EXPERTS = (128, 256)  # most of models' layers


@dataclass(frozen=True, eq=False)
class RouterSpec(ExpertSpec):
    """One kernel of routers."""

    config: RouterConfig


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles: up to 256 experts in bf16. Others compile on demand."""
    lanes = [lane_experts_of(experts) for experts in SHIPPED_EXPERTS]
    routers = [RouterConfig(lane_experts=count, tile_tokens=tile) for count in lanes for tile in TILE_TOKENS]
    routers += [RouterConfig(weight=LOGITS, lane_experts=count) for count in lanes]
    routers += [RouterConfig(f"int{bits}", IDS) for bits in (32, 64)]
    return [RouterSpec(config) for config in routers]
