"""From a configuration to a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.linear.arguments import SOURCES, compile_kernel
from cute_kernels.linear.layer_products.arguments import LAYER_PRODUCTS
from cute_kernels.linear.layer_products.config import LayerProductsConfig
from cute_kernels.runtime.spec import KernelSpec

# Modules of the room that its kernels are made of as well.
SHARED = ("epilogue.py", "config.py", "wgmma/resident_rows.py", "wgmma/limb_rows.py", "wgmma/limbs.py")


@dataclass(frozen=True, eq=False)
class LayerProductsSpec(KernelSpec):
    """One kernel of several products: takes `LAYER_PRODUCTS`, on torch's current stream."""

    config: LayerProductsConfig
    family: ClassVar[str] = "linear"

    def source_roots(self) -> tuple[Path, ...]:
        room = Path(__file__).resolve().parents[1]
        return *super().source_roots(), *(room / name for name in SHARED), *SOURCES

    def compile(self, arch: str) -> Any:
        return compile_layer_products(self.config, arch)


def compile_layer_products(config: LayerProductsConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a"); needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.linear.layer_products.kernel import LayerProductsKernel

    return compile_kernel(LayerProductsKernel, config, LAYER_PRODUCTS, arch, *options)
