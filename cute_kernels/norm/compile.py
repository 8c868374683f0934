"""Compiles configurations into functions; no other module of norm starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.norm.arguments import norm_arguments
from cute_kernels.norm.config import ORDERED, SCALED, VECTOR, NormConfig, launch_shape
from cute_kernels.runtime.spec import KernelSpec, check_config

# Hidden sizes of models; rows of other lengths share their kernels or compile on first use.
SHIPPED_COLUMNS = {"rms": (512, 1024, 2048, 4096, 8192, 16384), "layer": (1024, 4096, 8192)}
INPUT_COLUMNS = (2048, 4096, 8192)  # of models whose layers are in act-order, or have scales of their inputs


@dataclass(frozen=True, eq=False)
class NormSpec(KernelSpec):
    """One norm kernel; the compiled function takes :func:`.arguments.norm_arguments` and launches on torch's current
    stream."""

    config: NormConfig
    family: ClassVar[str] = "norm"

    def compile(self, arch: str) -> Any:
        return compile_norm(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles: usual hidden sizes, in bf16. Others compile on demand."""
    makes_inputs = [
        NormConfig("rms", "bf16", *launch_shape(n), has_residual=has_residual, inputs=inputs)
        for n in INPUT_COLUMNS
        for has_residual in (False, True)
        for inputs in (ORDERED, SCALED)
    ]
    configs = dict.fromkeys(
        NormConfig(kind, "bf16", *launch_shape(n), has_residual=has_residual, has_bias=kind == "layer")
        for kind, sizes in SHIPPED_COLUMNS.items()
        for n in sizes
        for has_residual in (False, True)
    )
    return [NormSpec(config) for config in (*configs, *makes_inputs)]


def compile_norm(config: NormConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from cute_kernels.norm.kernel import NormKernel

    check_config(config)
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.dtype]
    shape = (cute.sym_int(), cute.sym_int(divisibility=VECTOR))
    out = make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
    return norm_arguments(config).compile(NormKernel(config).launch, {"out": out}, arch, *options)
