"""A cache transform on a team's rows, after RoPE: centre, factor and rotation of k and v, and q's side of them.

What each does is said in :mod:`cute_kernels.kv_cache.transforms`; here it happens in registers, between RoPE and the
quantisation. Constants are fp32 [num_kv_heads, head_dim]: some KiB that every CTA reads, so from the second one on they
come from the L2 cache. They are asked for with the rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.device import numbers, ptx
from cute_kernels.device.hadamard import Hadamard
from cute_kernels.device.lanes import lane_sum, neighbours
from cute_kernels.device.rows import Elements
from cute_kernels.kv_cache.config import GROUP_BITS, AppendConfig


class RowTransformer:
    """The transforms of a configuration's rows; ``given``: a :class:`cute_kernels.kv_cache.operands.Transforms`."""

    def __init__(self, config: AppendConfig):
        self.config = config
        self.k_constants = Elements("fp32", config.head_dim_k, config.lanes, config.runs)
        self.v_constants = Elements("fp32", config.head_dim_v, config.lanes, config.runs)
        self.k_hadamard = Hadamard(config.k_rotation, config.head_dim_k, config.lanes, config.runs)
        self.v_hadamard = Hadamard(config.v_rotation, config.head_dim_v, config.lanes, config.runs)

    @cute.jit
    def ask(self, given, heads, is_q, is_v, lane):
        """Asks for the constants of the team's first rows: they are on their way while these are."""
        if is_v:
            self.ask_constants(self.v_constants, given.v_factor, heads, lane)
        elif is_q:
            if given.q_factor != 0:
                base = given.q_factor + Int64(self.kv_head(given, heads.first)) * self.k_constants.row_bytes
                ptx.prefetch_line(base + Int64(lane * (self.k_constants.row_bytes // self.config.lanes)))
        else:
            self.ask_constants(self.k_constants, given.k_center, heads, lane)
            self.ask_constants(self.k_constants, given.k_factor, heads, lane)

    @cute.jit
    def ask_constants(self, constants, base, heads, lane):
        if base != 0:
            part = constants.row_bytes // self.config.lanes  # less than a line
            for u in cutlass.range_constexpr(self.config.rows_in_flight):
                head = heads.first + cutlass.min(Int32(u), heads.count - 1)
                ptx.prefetch_line(base + Int64(head) * constants.row_bytes + Int64(lane * part))

    def kv_head(self, given, q_head):
        """The KV head that a q head reads."""
        return (q_head * given.group_reciprocal) >> GROUP_BITS

    @cute.jit
    def transform_k(self, values, given, head, lane):
        if given.k_center != 0:
            for i, centre in enumerate(self.constants_of(self.k_constants, given.k_center, head, lane)):
                values[i] = numbers.add(values[i], -centre)
        self.scale(self.k_constants, values, given.k_factor, head, lane)
        self.k_hadamard.apply(values, lane)

    @cute.jit
    def transform_v(self, values, given, head, lane):
        self.scale(self.v_constants, values, given.v_factor, head, lane)
        self.v_hadamard.apply(values, lane)

    @cute.jit
    def transform_q(self, values, given, head, place):
        """q's side; where it is asked for, also what the centre takes off the scores."""
        kv_head = self.kv_head(given, head)
        if given.q_shift != 0:
            total = Float32(0.0)
            for i, centre in enumerate(self.constants_of(self.k_constants, given.k_center, kv_head, place.lane)):
                total = ptx.fma(values[i], centre, total)
            total = lane_sum(total, neighbours(self.config.lanes))
            if place.valid:
                # All lanes write the same: cheaper than to choose one.
                index = Int64(place.token) * given.num_q_heads + head
                numbers.store_global_words(given.q_shift + index * 4, 0, [numbers.bits(total)])
        self.scale(self.k_constants, values, given.q_factor, kv_head, place.lane)
        self.k_hadamard.apply(values, place.lane)

    @cute.jit
    def scale(self, constants, values, base, head, lane):
        if base != 0:
            for i, factor in enumerate(self.constants_of(constants, base, head, lane)):
                values[i] = numbers.multiply(values[i], factor)

    def constants_of(self, constants: Elements, base, head, lane):
        """The lane's columns of a KV head's constants."""
        return constants.load(base + Int64(head) * constants.row_bytes, lane)
