"""The simulator's warp, put in place module by module through pytest's monkeypatch.

Tests that use `simulator.running` need none of this; the rooms that still have it move one after the other.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import simulator
from cute_kernels.device import lanes
from simulator.registers import (
    COLUMN,
    LANES,
    ROW,
    Float32,
    Int32,
    Int64,
    Lanes,
    Registers,
    Scalar,
    Uint32,
    bf16_bits,
    bf16_values,
    elements,
    from_halves,
    halves,
    select,
)
from simulator.warp import Access, matrix_fragment, mma

__all__ = [
    "COLUMN",
    "LANES",
    "ROW",
    "Access",
    "Float32",
    "Int32",
    "Int64",
    "Lanes",
    "Registers",
    "Scalar",
    "Uint32",
    "Warp",
    "bf16_bits",
    "bf16_values",
    "elements",
    "from_halves",
    "halves",
    "matrix_fragment",
    "mma",
    "select",
]


class Warp(simulator.Warp):
    """See the module."""

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Puts this warp in place of the GPU behind some modules."""
        arch = SimpleNamespace(shuffle_sync=self.shuffle, shuffle_sync_bfly=self.shuffle_butterfly)
        replaced = {
            "ptx": self,
            "cutlass": SimpleNamespace(min=np.minimum, max=np.maximum, select_=select),
            "cute": SimpleNamespace(make_rmem_tensor=Registers, arch=arch),
            "Int32": Int32,
            "Int64": Int64,
            "Uint32": Uint32,
            "Float32": Float32,
        }
        for module in (lanes, *modules):
            for name in replaced.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, replaced[name])
