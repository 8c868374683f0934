"""From a configuration to a compiled function, of tiles whose k blocks are long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cute_kernels.gemm.wgmma.compile import WgmmaSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.long_config import LongWgmma

MODULES = ("long_compile", "long_config")


@dataclass(frozen=True, eq=False)
class LongSpec(WgmmaSpec):
    """One weight-only GEMM kernel of long k blocks: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[LongWgmma]

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return super().source_roots() + tuple(folder / f"{name}.py" for name in MODULES)
