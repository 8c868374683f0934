"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm import deferred_choice, tuned
from cute_kernels.gemm import schedule as few_rows
from cute_kernels.gemm.arguments import STREAM, compile_kernel
from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.inputs import compile as inputs
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many_rows
from cute_kernels.gemm.wgmma.config import LimbBlocksConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_compile import DeferredNormSpec
from cute_kernels.gemm.wgmma.long_config import LongWgmma
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync, ResidentLimbs
from cute_kernels.gemm.wgmma.ranges_config import RangesWgmma
from cute_kernels.gemm.wgmma.shares_config import SharesWgmma
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
    rooms = (few_rows, many_rows, invariant, tuned)
    configs = [config for room in rooms for config in room.shipped_configs()]
    products = dict.fromkeys(spec for config in configs for spec in specs_of(config))
    norms = [DeferredNormSpec(config) for config in deferred_choice.shipped_configs()]
    return [*products, *norms, *inputs.shipped_specs()]


def spec_of(config: LinearConfig | WgmmaConfig) -> KernelSpec:
    """The kernel of a configuration of the kernel for few rows, of that for many, or of the portable one."""
    from cute_kernels.gemm.portable.compile import PortableSpec
    from cute_kernels.gemm.wgmma.compile import ResidentSpec, WgmmaSpec
    from cute_kernels.gemm.wgmma.long_compile import LongSpec
    from cute_kernels.gemm.wgmma.ranges_compile import RangesSpec
    from cute_kernels.gemm.wgmma.scale_pairs_compile import ScalePairsSpec, has_scale_pairs
    from cute_kernels.gemm.wgmma.shares_compile import SharesSpec

    if isinstance(config, LinearConfig):
        return LinearSpec(config)
    if isinstance(config.mainloop, ResidentLimbs):
        return ResidentSpec(config)
    if isinstance(config.mainloop, LongWgmma):
        return LongSpec(config)
    if isinstance(config.mainloop, SharesWgmma):
        return SharesSpec(config)
    if isinstance(config.mainloop, RangesWgmma):
        return RangesSpec(config)
    if has_scale_pairs(config):
        return ScalePairsSpec(config)
    return PortableSpec(config) if isinstance(config.mainloop, PortableMmaSync) else WgmmaSpec(config)


def specs_of(config: LinearConfig | WgmmaConfig) -> list[KernelSpec]:
    """All kernels that a product of a configuration launches."""
    return [*limb_specs(config), spec_of(config)]


def limb_specs(config: LinearConfig | WgmmaConfig) -> list[KernelSpec]:
    """What makes limbs of x for a configuration that takes them."""
    from cute_kernels.gemm.wgmma.compile import LimbBlocksSpec

    makes_limbs = getattr(config, "makes_limbs_before", False)
    return [LimbBlocksSpec(LimbBlocksConfig(config.dtype))] if makes_limbs else []


def compile_linear(config: LinearConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.kernel import LinearKernel

    return compile_kernel(LinearKernel, config, STREAM, arch, *options)
