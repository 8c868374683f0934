"""From a configuration to a compiled function, of tiles as work ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.gemm.arguments import TILES, compile_kernel
from cute_kernels.gemm.wgmma.compile import WgmmaSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.ranges_config import RangesWgmma


@dataclass(frozen=True, eq=False)
class RangesSpec(WgmmaSpec):
    """One weight-only GEMM kernel in work ranges: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[RangesWgmma]

    def compile(self, arch: str) -> Any:
        from cute_kernels.gemm.wgmma.ranges import RangesKernel

        return compile_kernel(RangesKernel, self.config, TILES, arch)
