"""One thread with Python's integers: for device code that finds places and shares of work, and moves no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.backend import Meanings

WORD = (1 << 32) - 1


def stand_in(value: object) -> Any:
    """``value``, be it a number, a list or a test's double, for a kernel that asks for one of the DSL's."""
    return value


class PlainThread:
    """A scalar is a Python number. modules, arch: as in :class:`Meanings`, what else is put in place."""

    def __init__(self, modules: Mapping[Any, Mapping[str, Any]] | None = None, arch: Mapping[str, Any] | None = None):
        self.modules = modules or {}
        self.arch = {"make_warp_uniform": lambda value: value, **(arch or {})}

    def meanings(self) -> Meanings:
        return Meanings(
            instructions=self,
            arch=self.arch,
            cutlass={
                "min": min,
                "max": max,
                "select_": lambda condition, chosen, other: chosen if condition else other,
                "range": lambda *bounds, unroll=1: range(*bounds),
                "range_constexpr": range,
            },
            scalars={"Int32": int, "Int64": int, "Uint32": int, "Float32": float, "const_expr": bool},
            modules=self.modules,
        )

    def multiply_high_u32(self, a: int, b: int) -> int:
        """The upper half of a product of two words."""
        assert 0 <= a <= WORD and 0 <= b <= WORD
        return a * b >> 32

    def pinned(self, value: int) -> int:
        return value
