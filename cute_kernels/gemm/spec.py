"""`GemmSpec`, a kernel of weight-only products with its configuration, as the runtime compiles and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import CompiledAs, code_of, compile_kernel
from cute_kernels.gemm.layer.config import LayerProductsConfig
from cute_kernels.gemm.operands.fp8_config import RowsConfig
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.gemm.wgmma.results import Dsmem
from cute_kernels.runtime.spec import KernelSpec, one_of


@dataclass(frozen=True, eq=False)
class GemmSpec(KernelSpec):
    """One kernel of weight-only products, or of a step before them.

    The compiled kernel takes the arguments that `kernel` declares: a torch tensor, then addresses and numbers. It runs
    on torch's current stream.
    """

    config: StreamConfig | WgmmaConfig | LayerProductsConfig | RowsConfig
    family: ClassVar[str] = "linear"

    @property
    def kernel(self) -> CompiledAs:
        """The kernel that the configuration is compiled as."""
        return self.config.kernel()

    def check(self) -> None:
        """Raises ValueError as `KernelSpec.check` does, and if the reduction is one that `ResidentKernel` would
        ignore.
        """
        super().check()
        config = self.config
        if isinstance(config, WgmmaConfig) and isinstance(config.mainloop, ResidentLimbs):
            if reason := one_of(config.reduction.made_by, (Dsmem.made_by,), "a reduction of resident limbs"):
                raise ValueError(f"config: {reason} ({config})")

    def policies(self) -> tuple[object, ...]:
        return (self.kernel.made_by, *code_of(self.config))

    def compile(self, arch: str) -> Any:
        return compile_kernel(self.config, self.kernel, arch)
