"""From a configuration to a compiled function, of many rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.linear.arguments import INPUT_ROWS, compile_kernel
from cute_kernels.linear.inputs.compile import InputRowsSpec
from cute_kernels.linear.inputs.many_config import ManyRowsConfig

MODULES = ("many_compile", "many_config", "many_kernel")


@dataclass(frozen=True, eq=False)
class ManyRowsSpec(InputRowsSpec):
    """One kernel that prepares many rows: takes what `InputRowsSpec`'s take."""

    config: ManyRowsConfig

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return super().source_roots() + tuple(folder / f"{name}.py" for name in MODULES)

    def compile(self, arch: str) -> Any:
        return compile_many_rows(self.config, arch)


def compile_many_rows(config: ManyRowsConfig, arch: str, *options: str) -> Any:
    """As `cute_kernels.linear.inputs.compile.compile_input_rows`."""
    from cute_kernels.linear.inputs.many_kernel import ManyRowsKernel

    return compile_kernel(ManyRowsKernel, config, INPUT_ROWS, arch, *options)
