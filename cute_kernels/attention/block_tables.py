"""The configuration of the kernel that makes the tables of chosen blocks. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features


@dataclass(frozen=True)
class BlockTablesConfig:
    """The configuration of the kernel's only variant. cta_entries: entries of a row of pages that a CTA finds, one each
    thread."""

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_block_tables"
    use: ClassVar[Use] = "decode"
    format_names: ClassVar[tuple[str, ...]] = ()
    features: ClassVar[Features] = PLAIN
    name: ClassVar[str] = "block_tables"
    cta_entries: int = 128

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        fits = self.cta_entries in range(32, 1025, 32)
        return None if fits else f"cta_entries {self.cta_entries} is not 32 to 1024 in whole warps"
