"""`ExpertSpec`, a kernel of experts with its configuration, as the runtime compiles and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import TILES_KERNEL, CompiledAs, code_of, compile_kernel
from cute_kernels.gemm.experts.arguments import LIMB_TILES, TILES
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class ExpertSpec(KernelSpec):
    """One kernel of experts' products, or of the sum after them.

    It takes the arguments that `kernel` declares, as `cute_kernels.gemm.spec.GemmSpec` does. If a configuration names
    the kernel of dense tiles, that of grouped tiles is compiled instead.
    """

    config: StreamConfig | WgmmaConfig | CombineConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:
        product = isinstance(self.config, StreamConfig | WgmmaConfig)
        return f"grouped_{self.config.name}" if product else self.config.name

    @property
    def kernel(self) -> CompiledAs:
        """The kernel that the configuration is compiled as."""
        config = self.config
        kernel = config.kernel()
        if kernel.made_by == TILES_KERNEL.made_by and isinstance(config, WgmmaConfig):
            takes = LIMB_TILES if config.mainloop.scaled_rows else TILES
            return CompiledAs("cute_kernels.gemm.experts.wgmma.kernel:grouped_tiles_kernel", takes)
        return kernel

    def check(self) -> None:
        """Raises ValueError as `KernelSpec.check` does. Also raises it for tiles that grouped products do not support:
        tiles cut along rows, tiles whose parts of K are computed one after the other, and tiles with multicast.
        """
        super().check()
        config = self.config
        if isinstance(config, WgmmaConfig):
            cut = config.reduction.cuts_rows or config.reduction.sequential
            if cut or config.multicast > 1:
                raise ValueError(f"config: got tiles that are cut or multicast, want whole ones of one CTA ({config})")

    def policies(self) -> tuple[object, ...]:
        return (self.kernel.made_by, *code_of(self.config))

    def compile(self, arch: str) -> Any:
        return compile_kernel(self.config, self.kernel, arch)
