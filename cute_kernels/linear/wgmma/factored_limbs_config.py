"""What makes limbs of scaled or reordered rows: what it is compiled for, and launched with. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.linear.arguments import matrix_arguments
from cute_kernels.linear.wgmma.config import LimbBlocksConfig
from cute_kernels.linear.wgmma.mainloops import ORDERED, SCALED
from cute_kernels.linear.wgmma.results import one_of

FACTORED_LIMB_BLOCKS = matrix_arguments(("out", "factors"), ("rows", "groups"))
"""`LIMB_BLOCKS`, and the address of [k] factors of x's dtype, or of the int32 numbers of x's inputs; on 16 bytes."""


@dataclass(frozen=True)
class FactoredLimbsConfig(LimbBlocksConfig):
    """As `LimbBlocksConfig`. kind: what rows meet, `mainloops.SCALED` or `ORDERED`."""

    kind: str = SCALED

    @property
    def name(self) -> str:
        return f"{super().name}_{self.kind}"

    def can_implement(self) -> str | None:
        return super().can_implement() or one_of(self.kind, (SCALED, ORDERED), "kind")
