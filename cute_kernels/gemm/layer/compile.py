"""The kernels of a layer in one launch that ship."""

from __future__ import annotations

from cute_kernels.gemm.layer.config import config_for
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.spec import KernelSpec

SHIPPED_ROWS, SHIPPED_K = (1,), 14_336  # of Llama-3-8B's layers; others compile on demand


def shipped_specs() -> list[KernelSpec]:
    """Lists the kernels that bundles hold and the gates compile."""
    configs = (config_for(rows, SHIPPED_K) for rows in SHIPPED_ROWS)
    return [GemmSpec(config) for config in configs if config is not None]
