"""The kernel families and the configurations that ship: what bundles hold and what the gates compile."""

from __future__ import annotations

import importlib

from cute_kernels.runtime.spec import KernelSpec

ROOMS = (
    "attention",
    "gemm",
    "gemm.experts",
    "gemm.experts.router",
    "gemm.layer",
    "kv_cache",
    "mla",
    "mla.cache",
    "norm",
)
"""The packages under `cute_kernels` that ship kernels: each has a `compile` module that lists them."""


def shipped_specs() -> list[KernelSpec]:
    """Every shipped configuration of every family, each family's in its own order.

    A family takes part by having `compile.shipped_specs() -> list[KernelSpec]`. Neither this nor the modules it
    imports need the DSL or a GPU. Raises ValueError if two specs share a symbol.
    """
    specs: list[KernelSpec] = []
    owners: dict[str, KernelSpec] = {}
    for room in ROOMS:
        for spec in importlib.import_module(f"cute_kernels.{room}.compile").shipped_specs():
            other = owners.setdefault(spec.symbol, spec)
            if other is not spec:
                raise ValueError(f"{spec.symbol} is the symbol of two configurations: {other.config}, {spec.config}")
            specs.append(spec)
    return specs
