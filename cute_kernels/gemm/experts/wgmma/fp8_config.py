"""The configurations of experts' FP8 products where they differ from dense ones. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.gemm.arguments import Kernel
from cute_kernels.gemm.experts.arguments import LIMB_TILES
from cute_kernels.gemm.operands.fp8_config import Fp8TailWgmma


@dataclass(frozen=True)
class GroupedFp8TailWgmma(Fp8TailWgmma):
    """As `Fp8TailWgmma`, on tiles of all experts."""

    def kernel(self) -> Kernel:
        return Kernel("cute_kernels.gemm.experts.wgmma.kernel:grouped_fp8_tail_kernel", LIMB_TILES)
