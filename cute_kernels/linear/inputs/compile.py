"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.linear.arguments import Arguments, compile_kernel
from cute_kernels.linear.inputs.config import GROUP, ROOMS, InputRowsConfig
from cute_kernels.runtime.spec import KernelSpec

ADDRESSES = ("x", "order", "factors", "stride", "codes", "pitch")  # behind the result; distances have 64 bits as well
ARGUMENTS = Arguments(ADDRESSES, ("parts", "runs", "run_bytes"))


@dataclass(frozen=True, eq=False)
class InputRowsSpec(KernelSpec):
    """One kernel that prepares rows: takes what `InputRowsKernel.__call__` describes, on torch's current stream."""

    config: InputRowsConfig
    family: ClassVar[str] = "linear"

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return tuple(folder / f"{name}.py" for name in ("compile", "config", "kernel"))

    def compile(self, arch: str) -> Any:
        return compile_input_rows(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold: layers of usual width in bf16, and any rows that lie apart. Others compile on demand."""
    shapes = ((0, GROUP), (ROOMS[0], 1), (ROOMS[0], GROUP), (ROOMS[1], 1), (ROOMS[1], GROUP), (ROOMS[2], 1))
    return [
        InputRowsSpec(InputRowsConfig("bf16", room, scaled, rows)) for room, rows in shapes for scaled in (False, True)
    ]


def compile_input_rows(config: InputRowsConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.linear.inputs.kernel import InputRowsKernel

    return compile_kernel(InputRowsKernel, config, ARGUMENTS, arch, *options)
