"""From a configuration to a compiled function, of tiles whose CTAs have a share of the rows each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.gemm.arguments import TILES, compile_kernel
from cute_kernels.gemm.wgmma.compile import WgmmaSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.shares_config import SharesWgmma


@dataclass(frozen=True, eq=False)
class SharesSpec(WgmmaSpec):
    """One weight-only GEMM kernel whose CTAs have shares: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[SharesWgmma]

    def compile(self, arch: str) -> Any:
        from cute_kernels.gemm.wgmma.shares import SharesKernel

        return compile_kernel(SharesKernel, self.config, TILES, arch)
