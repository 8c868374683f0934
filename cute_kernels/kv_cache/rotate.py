"""`Rotator`, RoPE on rows that several lanes share. It computes angles once per token, then rotates rows in registers.

A lane has a run of columns. Interleaved pairs lie in one lane. The columns of a half-split pair lie ``rotary_dim / 2``
apart: in lanes at a fixed distance, in registers known at compile time. If the distance is a whole number of lanes, a
column takes one shuffle; otherwise it takes two, from the lanes above and below.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from cute_kernels.device import numbers, ptx

TURN_PER_UNIT = 2.0**-32 * 6.283185307179586  # radians of the upper word of a phase


class Rotator:
    """Rotates rows of ``head_dim`` columns that several lanes share; see the module's docstring.

    Args:
        style: "none", "half" or "interleaved".
        rotary_dim: number of columns that are rotated.
        head_dim: number of columns of a row.
        lanes: number of lanes that share a row.
        runs: number of runs of columns that a lane has: 1, or 2 (one in each half of the row, which form whole pairs).
    """

    def __init__(self, style: str, rotary_dim: int, head_dim: int, lanes: int, runs: int = 1):
        self.lanes = lanes
        self.count = head_dim // lanes
        self.interleaved = style == "interleaved"
        self.rotary_dim = rotary_dim
        self.half = rotary_dim // 2
        self.whole = rotary_dim == head_dim
        self.distance = self.half // self.count  # in lanes, if `even`
        self.even = self.half % self.count == 0
        # Both columns of each pair in one lane: neighbours, or the lane's two runs.
        self.halves = runs == 2
        self.num_angles = 0 if style == "none" else self.count // (2 if self.interleaved or self.halves else 1)

    def make_angles(self, cos, sin, steps, position: Int32, factor: Float32, lane: Int32) -> None:
        """Fills ``cos`` and ``sin`` with cosines and sines times ``factor``: one of each for each column of the lane,
        or for each pair if the lane has whole pairs.

        steps: the result of `load_steps`.

        If the columns of a pair lie in different lanes, the first column's sine is negated. Columns that are not
        rotated get any angle.
        """
        # The sign of a position is that of its sine; what is left needs the upper 32 bits of a product modulo 2**64.
        size = Uint32(cutlass.max(position, -position))
        sin_factor = cutlass.select_(position < 0, -factor, factor)
        if not self.interleaved and self.even and not self.halves:
            sin_factor = cutlass.select_(lane < self.distance, -sin_factor, sin_factor)
        for i in range(self.num_angles):
            low, high = steps[2 * i], steps[2 * i + 1]
            phase = (Uint64(low) * Uint64(size) >> 32).to(Uint32) + high * size
            angle = numbers.multiply(numbers.to_float(phase.to(Int32)), Float32(TURN_PER_UNIT))
            cos[i] = numbers.cosine(angle) * factor
            sine = numbers.sine(angle) * sin_factor
            if not self.interleaved and not self.even and not self.halves:
                sine = cutlass.select_(self._column(lane, i) < self.half, -sine, sine)
            sin[i] = sine

    def _column(self, lane: Int32, i: int):
        return lane * self.count + i

    def load_steps(self, phase_steps: Int64, lane: Int32) -> list[Any]:
        """Starts loading the turns per position of the lane's angles. Returns two words for each angle: low, then
        high."""
        words: list[Any] = []
        if self.half % self.num_angles == 0:  # a run of whole lanes
            base = phase_steps + Int64(cutlass.min(self._pair(lane, 0), self.half - self.num_angles)) * 8
            vector = 2 if self.num_angles % 2 == 0 else 1
            for i in range(0, self.num_angles, vector):
                words += ptx.load_global_words(base, 8 * i, 2 * vector)
        else:
            for i in range(self.num_angles):
                words += ptx.load_global_words(phase_steps + Int64(self._pair(lane, i)) * 8, 0, 2)
        return words

    def _pair(self, lane: Int32, i: int):
        """Returns the index of the pair to which the lane's i-th angle belongs; any index for columns that are not
        rotated.
        """
        if self.interleaved or self.halves:
            return cutlass.min(lane * self.num_angles + i, self.half - 1)
        column = self._column(lane, i)
        index = cutlass.select_(column < self.half, column, column - self.half)
        return cutlass.min(index, self.half - 1)

    def rotate(self, values, cos, sin, lane: Int32) -> None:
        """Rotates the lane's columns in place. All lanes of the warp have to call it."""
        turned: list[Any] = []
        if self.interleaved:
            for i in range(self.num_angles):
                a, b = values[2 * i], values[2 * i + 1]
                turned.append(ptx.fma(a, cos[i], -(b * sin[i])))
                turned.append(ptx.fma(b, cos[i], a * sin[i]))
        elif self.halves:
            first, second = ([values[half * self.num_angles + i] for i in range(self.num_angles)] for half in range(2))
            pairs = list(enumerate(zip(first, second, strict=True)))
            turned += [ptx.fma(a, cos[i], -(b * sin[i])) for i, (a, b) in pairs]
            turned += [ptx.fma(b, cos[i], a * sin[i]) for i, (a, b) in pairs]
        else:
            for i in range(self.count):
                turned.append(ptx.fma(values[i], cos[i], self._partner(values, i, lane) * sin[i]))
        for i in range(self.count):
            if self.whole:
                values[i] = turned[i]
            else:
                values[i] = cutlass.select_(self._column(lane, i) < self.rotary_dim, turned[i], values[i])

    def _partner(self, values, i: int, lane: Int32):
        """Returns the value of the partner of the lane's i-th column: the other column of the same pair."""
        if self.even and self.whole:
            return cute.arch.shuffle_sync_bfly(values[i], offset=self.distance)
        base = cute.arch.lane_idx() - lane
        if self.even:
            source = cutlass.select_(lane < self.distance, lane + self.distance, lane - self.distance)
            return cute.arch.shuffle_sync(values[i], base + (source & (self.lanes - 1)))
        column = self._column(lane, i)
        above, below = (i + self.half) // self.count, (i - self.half) // self.count
        high = cute.arch.shuffle_sync(values[(i + self.half) % self.count], base + ((lane + above) & (self.lanes - 1)))
        low = cute.arch.shuffle_sync(values[(i - self.half) % self.count], base + ((lane + below) & (self.lanes - 1)))
        return cutlass.select_(column < self.half, high, low)
