"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import (
    FACTORED_TILES,
    LIMB_ROWS,
    TILES,
    compile_kernel,
)
from cute_kernels.gemm.wgmma.config import LimbRowsConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.resident_config import ResidentConfig
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class WgmmaSpec(KernelSpec):
    """One weight-only GEMM kernel for many rows.

    The function takes what :mod:`cute_kernels.gemm.arguments` has: x as a torch tensor, then addresses and integers.
    It runs on torch's current stream.
    """

    config: WgmmaConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_wgmma(self.config, arch)


@dataclass(frozen=True, eq=False)
class ResidentSpec(WgmmaSpec):
    """The same of a kernel that makes limbs of x itself, and keeps them."""

    config: ResidentConfig

    def compile(self, arch: str) -> Any:
        return compile_resident(self.config, arch)


@dataclass(frozen=True, eq=False)
class LimbRowsSpec(KernelSpec):
    """The kernel that makes limbs of rows of x: takes what `arguments` has of it."""

    config: LimbRowsConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_limb_rows(self.config, arch)


def compile_limb_rows(config: LimbRowsConfig, arch: str, *options: str) -> Any:
    """As `compile_wgmma`."""
    from cute_kernels.gemm.wgmma.limb_rows import LimbRowsKernel

    return compile_kernel(LimbRowsKernel, config, LIMB_ROWS, arch, *options)


def compile_wgmma(config: WgmmaConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.wgmma.kernel import WgmmaKernel

    return compile_kernel(WgmmaKernel, config, TILES, arch, *options)


def compile_resident(config: ResidentConfig, arch: str, *options: str) -> Any:
    """As `compile_wgmma`."""
    from cute_kernels.gemm.wgmma.resident_kernel import ResidentKernel

    arguments = FACTORED_TILES if config.mainloop.factors else TILES
    return compile_kernel(ResidentKernel, config, arguments, arch, *options)
