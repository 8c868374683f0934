"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import TILES, compile_kernel
from cute_kernels.gemm.portable.config import PortableConfig
from cute_kernels.runtime.device import PORTABLE_ARCHS
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class PortableSpec(KernelSpec):
    """One weight-only GEMM kernel for sm_80 and later.

    The function takes what :mod:`cute_kernels.gemm.arguments` has: x as a torch tensor, then addresses and integers.
    It runs on torch's current stream.
    """

    config: PortableConfig
    family: ClassVar[str] = "linear"
    archs: ClassVar[tuple[str, ...]] = tuple(PORTABLE_ARCHS.values())

    def compile(self, arch: str) -> Any:
        return compile_portable(self.config, arch)


def compile_portable(config: PortableConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch``, "sm_80" or later, with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.portable.kernel import PortableKernel

    return compile_kernel(PortableKernel, config, TILES, arch, *options)
