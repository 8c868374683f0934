"""Combines attention over disjoint sets of keys on the GPU. Each warp adds up one row of the result, in the order of
parts.

Parts are the splits of an extend launch, or two results of other calls (`merge_states`). The kernel reads all parts
once and writes one result. Lane i holds the weight of part i. A lane adds up four columns over all parts at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.loads import load_float
from cute_kernels.device.softmax import LOWEST
from cute_kernels.device.types import extents

ALL_LANES = (1, 2, 4, 8, 16)
LANE_COLUMNS = 4  # columns that a lane adds up at a time
WARP_COLUMNS = WARP_THREADS * LANE_COLUMNS


@dataclass(frozen=True)
class Parts:
    """The parts to combine, and the destination of the result: addresses and run-time integers.

    Attributes:
        values: address of the first part's values [rows, head_dim].
        sums: address of the first part's log-sum-exps, fp32 [rows].
        value_stride, sum_stride: bytes from one part to the next, in ``values`` and in ``sums``.
        count: number of parts.
        lse: address of fp32 [rows], or 0.
        sinks: address of fp32 [num_heads], or 0.
        rows: number of queries times number of heads.
    """

    values: Int64
    sums: Int64
    value_stride: Int64
    sum_stride: Int64
    count: Int32
    out: Int64
    lse: Int64
    sinks: Int64
    rows: Int32
    num_heads: Int32
    head_dim: Int32


class CombineKernel:
    """The kernel that combines parts, in the variant of a :class:`CombineConfig`."""

    num_warps: ClassVar[int] = 4

    def __init__(self, config: CombineConfig):
        self.config = config
        self.floats = config.dtype == "fp32"
        self.elements = of_name("bf16" if self.floats else config.dtype)  # of 16 bits, where there are some
        self.out_bytes = 4 if self.floats else 2
        self.part_bytes = self.out_bytes if config.states else 4

    def launch(self, given, stream):
        """Launches the kernel; ``given`` has the arguments of :data:`.arguments.COMBINE`."""
        *outer, num_heads, head_dim = extents(given.out)
        rows = num_heads
        for size in outer:
            rows = rows * size
        strides = given.value_stride, given.sum_stride
        results = ptx.address(given.out), given.lse, given.sinks, rows, num_heads, head_dim
        parts = Parts(given.values, given.sums, *strides, given.num_parts, *results)
        self.kernel(parts, given.last).launch(
            grid=(cute.ceil_div(rows, self.num_warps), 1, 1), block=(self.num_warps * WARP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, parts, last: Int64):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        row, own = cute.arch.block_idx()[0] * self.num_warps + warp, parts.rows
        if const_expr(not self.config.states):
            own = Int32(ptx.load_global_words(last, 0, 1)[0])
            own = cutlass.min(cutlass.max(own, 0), parts.rows // parts.num_heads) * parts.num_heads
        if row < own:
            self.combine(parts, row, lane)

    @cute.jit
    def combine(self, parts, row: Int32, lane: Int32):
        log_sum = Float32(-inf)
        if lane < parts.count:
            address = parts.sums + parts.sum_stride * Int64(lane) + Int64(row) * 4
            log_sum = ptx.load_global_words(address, 0, 1, constant=False)[0].bitcast(Float32)
            if const_expr(self.config.states):  # MLA decode returns +inf for a query without keys
                log_sum = cutlass.select_(log_sum == inf, Float32(-inf), log_sum)
        # Not -inf: differences of two of them would be NaN.
        reference = ptx.fmax(lane_max(log_sum, ALL_LANES), Float32(LOWEST))
        weight = ptx.exp2((log_sum - reference) * ptx.LOG2_E if self.config.states else log_sum - reference)
        total = lane_sum(weight, ALL_LANES)
        nothing = total == 0.0
        denominator = total
        if const_expr(not self.config.states):
            if parts.sinks != 0:
                sink = load_float(parts.sinks + Int64(row % parts.num_heads) * 4)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -reference))
        share = cutlass.select_(nothing, Float32(0.0), weight * ptx.reciprocal(denominator))
        for first in cutlass.range(0, parts.head_dim, WARP_COLUMNS, unroll=1):
            self.add_up(parts, row, lane, share, first)
        if (parts.lse != 0) & (lane == 0):
            log_total = ptx.log2(total)
            lse = reference + log_total * ptx.LN_2 if self.config.states else (reference + log_total) * ptx.LN_2
            ptx.store_global(parts.lse + Int64(row) * 4, [cutlass.select_(nothing, Float32(-inf), lse)])

    @cute.jit
    def add_up(self, parts, row: Int32, lane: Int32, share, first: Int32):
        """Adds up 128 columns of a row over all parts, from column ``first`` on, and stores them; four columns a lane.
        share: in lane i, the normalised weight of part i.
        """
        column = first + lane * LANE_COLUMNS
        exists = column < parts.head_dim
        place = Int64(row) * parts.head_dim + cutlass.select_(exists, column, first)
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        address = parts.values + place * self.part_bytes
        for number in cutlass.range(parts.count, unroll=4):
            values = self.load(address + parts.value_stride * Int64(number))
            part = cute.arch.shuffle_sync(share, number)
            for k in cutlass.range_constexpr(LANE_COLUMNS):
                added = ptx.fma(values[k], part, sums[k])
                # The values of a state without keys may be anything, NaN too.
                sums[k] = cutlass.select_(part == 0.0, sums[k], added) if const_expr(self.config.states) else added
        if exists:
            found = [sums[k] for k in range(LANE_COLUMNS)]
            if const_expr(not self.floats):
                found = [self.elements.pack(*found[k : k + 2]) for k in range(0, LANE_COLUMNS, 2)]
            ptx.store_global(parts.out + place * self.out_bytes, found)

    def load(self, address) -> list[Any]:
        """Loads four columns of a part, as fp32."""
        words = ptx.load_global_words(address, 0, LANE_COLUMNS * self.part_bytes // 4, constant=False)
        if self.part_bytes == 4:
            return [word.bitcast(Float32) for word in words]
        return [half(word) for word in words for half in self.elements.halves]
