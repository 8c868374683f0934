"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm import deferred_choice
from cute_kernels.gemm import schedule as few_rows
from cute_kernels.gemm.arguments import STREAM, compile_kernel
from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.inputs import compile as inputs
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many_rows
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_compile import DeferredNormSpec
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class LinearSpec(KernelSpec):
    """One weight-only GEMM kernel.

    The function takes what :mod:`cute_kernels.gemm.arguments` has: x as a torch tensor, then addresses and integers.
    It runs on torch's current stream.
    """

    config: LinearConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_linear(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile; others compile on demand."""
    rooms = (few_rows, many_rows, invariant)
    configs = [config for room in rooms for config in room.shipped_configs()]
    products = dict.fromkeys(map(spec_of, configs))
    norms = [DeferredNormSpec(config) for config in deferred_choice.shipped_configs()]
    return [*products, *norms, *inputs.shipped_specs()]


def spec_of(config: LinearConfig | WgmmaConfig) -> KernelSpec:
    """The kernel of a configuration of the kernel for few rows, or of that for many."""
    from cute_kernels.gemm.wgmma.compile import ResidentSpec, WgmmaSpec

    if isinstance(config, LinearConfig):
        return LinearSpec(config)
    if isinstance(config.mainloop, ResidentLimbs):
        return ResidentSpec(config)
    return WgmmaSpec(config)


def specs_of(config: LinearConfig | WgmmaConfig) -> list[KernelSpec]:
    """All kernels that a product of a configuration launches."""
    return [spec_of(config)]


def compile_linear(config: LinearConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.kernel import LinearKernel

    return compile_kernel(LinearKernel, config, STREAM, arch, *options)
