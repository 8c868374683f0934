"""What makes limbs of scaled or reordered rows: what it is compiled for, and launched with. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.gemm.arguments import matrix_arguments
from cute_kernels.gemm.wgmma.config import LimbBlocksConfig
from cute_kernels.gemm.wgmma.mainloops import ORDERED, SCALED
from cute_kernels.gemm.wgmma.results import one_of

FACTORED_LIMB_BLOCKS = matrix_arguments(("out", "factors"), ("rows", "groups"))
"""`LIMB_BLOCKS`, and the address of [k] factors of x's dtype, or of the int32 numbers of x's inputs; on 16 bytes."""


@dataclass(frozen=True)
class FactoredLimbsConfig:
    """As `LimbBlocksConfig`. dtype: of x. kind: what rows meet, `mainloops.SCALED` or `ORDERED`."""

    dtype: str = "bf16"
    kind: str = SCALED

    @property
    def blocks(self) -> LimbBlocksConfig:
        """What makes limbs of rows as they are."""
        return LimbBlocksConfig(self.dtype)

    @property
    def num_threads(self) -> int:
        return self.blocks.num_threads

    @property
    def name(self) -> str:
        return f"{self.blocks.name}_{self.kind}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        return self.blocks.can_implement() or one_of(self.kind, (SCALED, ORDERED), "kind")
