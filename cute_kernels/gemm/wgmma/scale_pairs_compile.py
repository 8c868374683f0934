"""From a configuration to a compiled function, of tiles whose scales come in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.gemm.arguments import TILES, compile_kernel
from cute_kernels.gemm.wgmma.compile import WgmmaSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma

SCALE_BYTES = 2  # of scales that ldmatrix moves


def has_scale_pairs(config: WgmmaConfig) -> bool:
    """Whether k blocks have several groups of scales, which `.scale_pairs` loads.

    Not of tiles in parts of rows whose codes are scaled as they are decoded: 0.1 to 0.4 us slower, as measured.
    """
    own = type(config.mainloop) is RegisterWgmma and config.format.scale_bytes == SCALE_BYTES
    return own and config.k_block_groups > 1 and (config.row_parts == 1 or not config.scales_codes)


@dataclass(frozen=True, eq=False)
class ScalePairsSpec(WgmmaSpec):
    """One weight-only GEMM kernel of groups of less than a k block: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[RegisterWgmma]

    def compile(self, arch: str) -> Any:
        from cute_kernels.gemm.wgmma.scale_pairs import ScalePairsKernel

        return compile_kernel(ScalePairsKernel, self.config, TILES, arch)
