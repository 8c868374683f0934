"""From a configuration to a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import SOURCES, compile_kernel
from cute_kernels.gemm.layer.arguments import LAYER_PRODUCTS
from cute_kernels.gemm.layer.config import FORMAT, LayerProductsConfig, config_for
from cute_kernels.gemm.wgmma.compile import limb_roots
from cute_kernels.runtime.spec import KernelSpec

MODULES = (
    "arguments", "compile", "config", "exchange", "instructions", "kernel", "loads", "memory", "multiply", "rows",
    "store",
)  # fmt: skip
SHARED = ("config", "epilogue", "work")  # modules of linear layers that kernels are made of as well
SHIPPED_ROWS, SHIPPED_K = (1,), 14_336  # of Llama-3-8B's layers; others compile on demand


@dataclass(frozen=True, eq=False)
class LayerProductsSpec(KernelSpec):
    """One kernel of several products: takes `LAYER_PRODUCTS`, on torch's current stream."""

    config: LayerProductsConfig
    family: ClassVar[str] = "layer_products"

    def source_roots(self) -> tuple[Path, ...]:
        """The modules that say what the kernel is: how it is called changes nothing that is compiled."""
        folder = Path(__file__).resolve().parent
        shared = tuple(folder.parent / f"{name}.py" for name in SHARED)
        return *(folder / f"{name}.py" for name in MODULES), *shared, *limb_roots(), *SOURCES, *FORMAT.sources()

    def compile(self, arch: str) -> Any:
        return compile_layer_products(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile."""
    configs = (config_for(rows, SHIPPED_K) for rows in SHIPPED_ROWS)
    return [LayerProductsSpec(config) for config in configs if config is not None]


def compile_layer_products(config: LayerProductsConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a"); needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.layer.kernel import LayerProductsKernel

    return compile_kernel(LayerProductsKernel, config, LAYER_PRODUCTS, arch, *options)
