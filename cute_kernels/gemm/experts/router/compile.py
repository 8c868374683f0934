"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import compile_kernel
from cute_kernels.gemm.experts.router.config import LOGITS, TILE_TOKENS, RouterConfig, lane_experts_of
from cute_kernels.runtime.spec import KernelSpec

SHIPPED_EXPERTS = (128, 256)  # most of models' layers


@dataclass(frozen=True, eq=False)
class RouterSpec(KernelSpec):
    """One kernel of routers: takes what its configuration's `kernel` says, on torch's current stream."""

    config: RouterConfig
    family: ClassVar[str] = "moe"

    def policies(self) -> tuple[object, ...]:
        return (self.config.kernel().made_by,)

    def compile(self, arch: str) -> Any:
        return compile_kernel(self.config, self.config.kernel(), arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile: up to 256 experts in bf16. Others compile on demand."""
    lanes = [lane_experts_of(experts) for experts in SHIPPED_EXPERTS]
    routers = [RouterConfig(lane_experts=count, tile_tokens=tile) for count in lanes for tile in TILE_TOKENS]
    return [
        RouterSpec(config)
        for config in (*routers, *(RouterConfig(weight=LOGITS, lane_experts=count) for count in lanes))
    ]
