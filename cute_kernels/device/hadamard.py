"""Hadamard transforms of a team's row: butterflies in a lane's registers, then between lanes.

A transform of width w acts on blocks of w neighbouring columns, in natural (Sylvester) order: entry (i, j) of its
matrix is (-1)**popcount(i & j) / sqrt(w). It is its own inverse. Each bit of a column's number is one butterfly step:
in registers where a lane owns both columns, else one xor shuffle and one multiply-add per column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import numbers, ptx


@dataclass(frozen=True)
class Hadamard:
    """The transform of rows whose columns lie in lanes as :class:`cute_kernels.device.rows.Elements` has them.

    Args:
        width: columns of a block, a power of two; 1 changes nothing.
        head_dim, lanes, runs: columns of a row, lanes that share it, runs of columns of a lane; with a width beyond 1
            powers of two, all of them.
    """

    width: int
    head_dim: int
    lanes: int
    runs: int = 1

    @property
    def run_columns(self) -> int:
        """Neighbouring columns of a lane."""
        return self.head_dim // self.lanes // self.runs

    def register_steps(self) -> list[int]:
        """Distances, in the lane's own values, of the steps within lanes."""
        steps = [1 << bit for bit in range(self.run_columns.bit_length() - 1) if 1 << bit < self.width]
        part = self.head_dim // self.runs  # of the row, of which each lane has one run
        apart = [1 << bit for bit in range(self.runs.bit_length() - 1)]
        return steps + [self.run_columns * step for step in apart if part * step < self.width]

    def lane_steps(self) -> list[int]:
        """Distances, in lanes, of the steps between lanes."""
        steps = [1 << bit for bit in range(self.lanes.bit_length() - 1)]
        return [step for step in steps if self.run_columns * step < self.width]

    def apply(self, values, lane: Int32) -> None:
        """Transforms the lane's columns, fp32, in place; all lanes of the warp take part."""
        if self.width == 1:
            return
        count, norm = self.head_dim // self.lanes, 1.0 / math.sqrt(self.width)
        for i in range(count):
            values[i] = numbers.multiply(values[i], Float32(norm))
        for step in self.register_steps():
            for i in range(count):
                if not i & step:
                    low, high = values[i], values[i + step]
                    values[i] = numbers.add(low, high)
                    values[i + step] = numbers.add(low, -high)
        for step in self.lane_steps():
            sign = cutlass.select_((lane & step) != 0, Float32(-1.0), Float32(1.0))
            for i in range(count):
                values[i] = ptx.fma(values[i], sign, cute.arch.shuffle_sync_bfly(values[i], offset=step))
