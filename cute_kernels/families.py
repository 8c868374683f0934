"""The kernel families and their shipped configurations, which bundles contain and CI compiles."""

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
    """Returns the specs of every family's shipped configurations, family by family.

    Each family has a function `compile.shipped_specs() -> list[KernelSpec]`. Neither the DSL nor a GPU is needed.
    Raises ValueError if two specs share a symbol.
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
