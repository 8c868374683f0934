"""From a configuration to a compiled function, of tiles whose k blocks are long."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.gemm.wgmma.compile import WgmmaSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.long_config import LongWgmma


@dataclass(frozen=True, eq=False)
class LongSpec(WgmmaSpec):
    """One weight-only GEMM kernel of long k blocks: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[LongWgmma]
