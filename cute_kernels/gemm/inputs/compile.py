"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import INPUT_ROWS, compile_kernel
from cute_kernels.gemm.inputs.config import ROOMS, InputRowsConfig
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class InputRowsSpec(KernelSpec):
    """One kernel that prepares rows: takes `INPUT_ROWS`, on torch's current stream."""

    config: InputRowsConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_input_rows(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold: layers of usual width in bf16, and any rows that lie apart. Others compile on demand."""
    prepared = [InputRowsConfig("bf16", room, scaled) for room in (0, *ROOMS[:2]) for scaled in (False, True)]
    return [InputRowsSpec(config) for config in (*prepared, InputRowsConfig("fp16", 0, False))]


def compile_input_rows(config: InputRowsConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.inputs.kernel import InputRowsKernel

    return compile_kernel(InputRowsKernel, config, INPUT_ROWS, arch, *options)
