"""Combines a launch's splits on the GPU: a warp for each row of the output, in the order of the splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.attention.extend_config import CombineConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.loads import load_float
from cute_kernels.device.softmax import LOWEST
from cute_kernels.device.types import extents

ALL_LANES = (1, 2, 4, 8, 16)
LANE_COLUMNS = 4  # that a lane adds up at a time
WARP_COLUMNS = WARP_THREADS * LANE_COLUMNS


@dataclass(frozen=True)
class Parts:
    """The partial results of splits, and where the result goes: addresses and run-time numbers.

    partials: fp32 [num_splits, rows, head_dim], then [num_splits, rows] of log2 sums; rows: of the tensors, queries
    times heads. lse: fp32 [rows] or 0. sinks: fp32 [num_q_heads] or 0.
    """

    partials: Int64
    out: Int64
    lse: Int64
    sinks: Int64
    rows: Int32
    num_splits: Int32
    num_q_heads: Int32


class CombineKernel:
    """One compiled variant; :class:`CombineConfig` says which."""

    num_warps: ClassVar[int] = 4

    def __init__(self, config: CombineConfig):
        self.config = config
        self.elements = of_name(config.q_dtype)

    def launch(self, given, stream):
        """Launches the kernel; ``given`` has the arguments of :data:`.arguments.COMBINE`."""
        (total_q, num_q_heads, _), ends = extents(given.out), extents(given.cu_seqlens)
        rows = total_q * num_q_heads
        parts = Parts(
            partials=given.partials,
            out=ptx.address(given.out),
            lse=given.lse,
            sinks=given.sinks,
            rows=rows,
            num_splits=given.num_splits,
            num_q_heads=num_q_heads,
        )
        self.kernel(parts, ptx.address(given.cu_seqlens) + Int64(ends[0] - 1) * 4).launch(
            grid=(cute.ceil_div(rows, self.num_warps), 1, 1),
            block=(self.num_warps * WARP_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, parts, last: Int64):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * self.num_warps + warp
        own = Int32(ptx.load_global_words(last, 0, 1)[0])
        own = cutlass.min(cutlass.max(own, 0), parts.rows // parts.num_q_heads) * parts.num_q_heads
        if row < own:
            self.combine(parts, row, lane)

    @cute.jit
    def combine(self, parts, row: Int32, lane: Int32):
        weights = parts.partials + Int64(parts.rows) * parts.num_splits * (self.config.head_dim * 4)
        log_sum = Float32(-Float32.inf)
        if lane < parts.num_splits:
            place = Int64(parts.rows) * lane + row
            log_sum = ptx.load_global_words(weights + place * 4, 0, 1, constant=False)[0].bitcast(Float32)
        # Not -inf: differences of two of them would be NaN.
        reference = ptx.fmax(lane_max(log_sum, ALL_LANES), Float32(LOWEST))
        weight = ptx.exp2(log_sum - reference)
        total = lane_sum(weight, ALL_LANES)
        nothing = total == 0.0
        denominator = total
        if parts.sinks != 0:
            sink = load_float(parts.sinks + Int64(row % parts.num_q_heads) * 4)
            denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -reference))
        share = cutlass.select_(nothing, Float32(0.0), weight * ptx.reciprocal(denominator))
        for first in cutlass.range_constexpr(0, self.config.head_dim, WARP_COLUMNS):
            self.add_up(parts, row, lane, share, first)
        if (parts.lse != 0) & (lane == 0):
            lse = (reference + ptx.log2(total)) * ptx.LN_2
            ptx.store_global(parts.lse + Int64(row) * 4, [cutlass.select_(nothing, -Float32.inf, lse)])

    @cute.jit
    def add_up(self, parts, row: Int32, lane: Int32, share, first: cutlass.Constexpr):
        """Adds up columns of a row from ``first`` on, four a lane. share: of split ``lane``."""
        head_dim = self.config.head_dim
        exists = first + lane * LANE_COLUMNS < head_dim
        column = cutlass.select_(exists, lane * LANE_COLUMNS, Int32(0)) + first
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        address = parts.partials + Int64(row) * (head_dim * 4) + Int64(column) * 4
        stride = Int64(parts.rows) * (head_dim * 4)
        for split in cutlass.range(parts.num_splits, unroll=4):
            words = ptx.load_global_words(address + stride * split, 0, LANE_COLUMNS, constant=False)
            part = cute.arch.shuffle_sync(share, split)
            for k in cutlass.range_constexpr(LANE_COLUMNS):
                sums[k] = ptx.fma(words[k].bitcast(Float32), part, sums[k])
        if exists:
            pairs = [self.elements.pack(sums[k], sums[k + 1]) for k in range(0, LANE_COLUMNS, 2)]
            ptx.store_global(parts.out + (Int64(row) * head_dim + column) * ELEMENT_BYTES, pairs)
