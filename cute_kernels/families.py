"""The kernel families and the configurations that ship: what bundles hold and what the gates compile."""

from __future__ import annotations

import importlib
from pathlib import Path

from cute_kernels.runtime.spec import KernelSpec


def family_rooms() -> list[str]:
    """Names of the packages under `cute_kernels` that compile kernels: those with a `compile` module."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/compile.py"))


def shipped_specs() -> list[KernelSpec]:
    """Every shipped configuration of every family, each family's in its own order.

    A family takes part by having `compile.shipped_specs() -> list[KernelSpec]`. Neither this nor the modules it
    imports need the DSL or a GPU. Raises ValueError if two specs share a symbol.
    """
    specs: list[KernelSpec] = []
    owners: dict[str, KernelSpec] = {}
    for room in family_rooms():
        for spec in importlib.import_module(f"cute_kernels.{room}.compile").shipped_specs():
            other = owners.setdefault(spec.symbol, spec)
            if other is not spec:
                raise ValueError(f"{spec.symbol} is the symbol of two configurations: {other.config}, {spec.config}")
            specs.append(spec)
    return specs
