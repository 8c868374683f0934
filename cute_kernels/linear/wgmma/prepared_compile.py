"""From a configuration to a compiled function, of tiles behind a launch that makes their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.linear.arguments import TILES, compile_kernel
from cute_kernels.linear.wgmma.compile import WgmmaSpec
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.prepared_config import PreparedWgmma

MODULES = ("prepared_compile", "prepared_config", "prepared_kernel")


@dataclass(frozen=True, eq=False)
class PreparedSpec(WgmmaSpec):
    """One weight-only GEMM kernel whose rows a launch before makes: takes what `WgmmaSpec`'s take."""

    config: WgmmaConfig[PreparedWgmma]

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return super().source_roots() + tuple(folder / f"{name}.py" for name in MODULES)

    def compile(self, arch: str) -> Any:
        return compile_prepared(self.config, arch)


def compile_prepared(config: WgmmaConfig[PreparedWgmma], arch: str, *options: str) -> Any:
    """As `cute_kernels.linear.wgmma.compile.compile_wgmma`."""
    from cute_kernels.linear.wgmma.prepared_kernel import PreparedWgmmaKernel

    return compile_kernel(PreparedWgmmaKernel, config, TILES, arch, *options)
