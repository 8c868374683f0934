"""From a configuration to a compiled function, of what makes limbs of scaled or reordered rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import compile_kernel
from cute_kernels.gemm.wgmma.factored_limbs_config import FACTORED_LIMB_BLOCKS, FactoredLimbsConfig
from cute_kernels.gemm.wgmma.mainloops import ORDERED, SCALED
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class FactoredLimbsSpec(KernelSpec):
    """One kernel that makes limbs of scaled or reordered rows: takes `FACTORED_LIMB_BLOCKS`."""

    config: FactoredLimbsConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_factored_limbs(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold."""
    return [FactoredLimbsSpec(FactoredLimbsConfig("bf16", kind)) for kind in (SCALED, ORDERED)]


def compile_factored_limbs(config: FactoredLimbsConfig, arch: str, *options: str) -> Any:
    """As `cute_kernels.gemm.wgmma.compile.compile_wgmma`."""
    from cute_kernels.gemm.wgmma.factored_limbs import FactoredLimbsKernel

    return compile_kernel(FactoredLimbsKernel, config, FACTORED_LIMB_BLOCKS, arch, *options)
