"""From a configuration to a compiled function, of tiles whose rows meet factors in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.linear.arguments import FACTORED_TILES, compile_kernel
from cute_kernels.linear.wgmma.compile import WgmmaSpec
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.scaled_config import ScaledWgmma

MODULES = (
    "limb_rows", "row_factors", "scaled_compile", "scaled_config", "scaled_kernel",
    "stages",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ScaledSpec(WgmmaSpec):
    """One weight-only GEMM kernel whose rows meet factors: takes `FACTORED_TILES`."""

    config: WgmmaConfig[ScaledWgmma]

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return super().source_roots() + tuple(folder / f"{name}.py" for name in MODULES)

    def compile(self, arch: str) -> Any:
        return compile_scaled(self.config, arch)


def compile_scaled(config: WgmmaConfig[ScaledWgmma], arch: str, *options: str) -> Any:
    """As `cute_kernels.linear.wgmma.compile.compile_wgmma`."""
    from cute_kernels.linear.wgmma.scaled_kernel import ScaledWgmmaKernel

    return compile_kernel(ScaledWgmmaKernel, config, FACTORED_TILES, arch, *options)
