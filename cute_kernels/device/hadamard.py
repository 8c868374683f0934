"""`Hadamard`, the Hadamard transform of a row whose columns are spread over several lanes.

A transform of width w acts on blocks of w neighbouring columns, in natural (Sylvester) order: entry (i, j) of its
matrix is (-1)**popcount(i & j) / sqrt(w). The transform is its own inverse. Each bit of a column's index is one
butterfly step. A step between columns of one lane stays in registers. A step between lanes takes one xor shuffle and
one multiply-add per column.
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
    """The Hadamard transform of rows. A row's columns lie in lanes as in :class:`cute_kernels.device.rows.Elements`.

    Args:
        width: number of columns of a block, a power of two; 1 changes nothing.
        head_dim: number of columns of a row.
        lanes: number of lanes that share a row.
        runs: number of runs of columns in a lane. If ``width`` is above 1, head_dim, lanes and runs are powers of two.
    """

    width: int
    head_dim: int
    lanes: int
    runs: int = 1

    @property
    def run_columns(self) -> int:
        """Number of columns in one run of a lane."""
        return self.head_dim // self.lanes // self.runs

    def apply(self, values, lane: Int32) -> None:
        """Transforms the lane's columns, fp32, in place; all lanes of the warp take part.

        Steps go from the lowest bit to the highest. The factor 1 / sqrt(width) comes last.
        :func:`cute_kernels.formats.kv.transforms.rotated` adds in the same order, so its fp32 results are the same.
        """
        if self.width == 1:
            return
        count, run, part = self.head_dim // self.lanes, self.run_columns, self.head_dim // self.runs
        for bit in range(self.width.bit_length() - 1):
            step = 1 << bit  # columns
            if step < run:
                self._within_lane(values, count, step)
            elif step < part:
                self._between_lanes(values, count, step // run, lane)
            else:
                self._within_lane(values, count, run * step // part)
        for i in range(count):
            values[i] = numbers.multiply(values[i], Float32(1.0 / math.sqrt(self.width)))

    def _within_lane(self, values, count: int, distance: int) -> None:
        for i in range(count):
            if not i & distance:
                low, high = values[i], values[i + distance]
                values[i] = numbers.add(low, high)
                values[i + distance] = numbers.add(low, -high)

    def _between_lanes(self, values, count: int, distance: int, lane: Int32) -> None:
        sign = cutlass.select_((lane & distance) != 0, Float32(-1.0), Float32(1.0))
        for i in range(count):
            values[i] = ptx.fma(values[i], sign, cute.arch.shuffle_sync_bfly(values[i], offset=distance))
