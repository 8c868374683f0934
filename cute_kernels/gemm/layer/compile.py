"""From a configuration to a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import compile_kernel
from cute_kernels.gemm.layer.arguments import LAYER_PRODUCTS
from cute_kernels.gemm.layer.config import LayerProductsConfig, config_for
from cute_kernels.runtime.spec import KernelSpec

SHIPPED_ROWS, SHIPPED_K = (1,), 14_336  # of Llama-3-8B's layers; others compile on demand


@dataclass(frozen=True, eq=False)
class LayerProductsSpec(KernelSpec):
    """One kernel of several products: takes `LAYER_PRODUCTS`, on torch's current stream."""

    config: LayerProductsConfig
    family: ClassVar[str] = "layer_products"

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
