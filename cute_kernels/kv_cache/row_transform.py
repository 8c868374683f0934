"""A cache transform on a team's rows, after RoPE: centre, factor and rotation of k and v, and q's side of them.

What each does is said in :mod:`cute_kernels.kv_cache.transforms`; here it happens in registers, between RoPE and the
quantisation. Constants are fp32 [num_kv_heads, head_dim]: some KiB that every CTA reads, so from the second one on they
come from the L2 cache. They are asked for with the rows.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.hadamard import Hadamard
from cute_kernels.device.lanes import in_pairs, lane_sum, neighbours
from cute_kernels.device.rows import Elements
from cute_kernels.kv_cache.config import GROUP_BITS, LANE_ELEMENTS, RowTransform


class RowTransformer:
    """The transforms of a kernel's rows; ``given``: a :class:`cute_kernels.kv_cache.operands.Transforms`."""

    def __init__(self, parts: RowTransform | None, head_dims: tuple[int, int], lanes: int, runs: int, ahead: int):
        """parts: what is done; head_dims: of K and V; lanes, runs: of a team; ahead: rows that it asks for at once."""
        self.parts = parts or RowTransform()
        self.lanes, self.ahead = lanes, ahead
        k_dim, v_dim = head_dims
        self.k_constants = Elements("fp32", k_dim, lanes, runs)
        self.v_constants = Elements("fp32", v_dim, lanes, runs)
        self.k_hadamard = Hadamard(self.parts.k_rotation, k_dim, lanes, runs)
        self.v_hadamard = Hadamard(self.parts.v_rotation, v_dim, lanes, runs)

    @cute.jit
    def ask(self, given, heads, is_q, is_v, lane):
        """Asks for the constants of the team's first rows: they are on their way while these are."""
        if is_v:
            if const_expr(self.parts.v_factor):
                self.ask_constants(self.v_constants, given.v_factor, heads, lane)
        elif is_q:
            if const_expr(self.parts.factor):
                base = given.q_factor + Int64(self.kv_head(given, heads.first)) * self.k_constants.row_bytes
                ptx.prefetch_line(base + Int64(lane * (self.k_constants.row_bytes // self.lanes)))
        else:
            if const_expr(self.parts.center):
                self.ask_constants(self.k_constants, given.k_center, heads, lane)
            if const_expr(self.parts.factor):
                self.ask_constants(self.k_constants, given.k_factor, heads, lane)

    def ask_constants(self, constants, base, heads, lane):
        part = constants.row_bytes // self.lanes  # less than a line
        for u in range(self.ahead):
            head = heads.first + cutlass.min(Int32(u), heads.count - 1)
            ptx.prefetch_line(base + Int64(head) * constants.row_bytes + Int64(lane * part))

    def kv_head(self, given, q_head):
        """The KV head that a q head reads."""
        return (q_head * given.group_reciprocal) >> GROUP_BITS

    def transform_k(self, values, given, head, lane):
        if self.parts.center:
            for i, centre in enumerate(self.constants_of(self.k_constants, given.k_center, head, lane)):
                values[i] = numbers.add(values[i], -centre)
        if self.parts.factor:
            self.scale(self.k_constants, values, given.k_factor, head, lane)
        self.k_hadamard.apply(values, lane)

    def transform_v(self, values, given, head, lane):
        if self.parts.v_factor:
            self.scale(self.v_constants, values, given.v_factor, head, lane)
        self.v_hadamard.apply(values, lane)

    @cute.jit
    def transform_q(self, values, given, head, place):
        """q's side; where it is asked for, also what the centre takes off the scores."""
        if const_expr(self.parts.shift):
            total = self.shift_of(values, given, self.kv_head(given, head), place.lane)
            if place.valid:
                # All lanes write the same: cheaper than to choose one.
                index = Int64(place.token) * given.num_q_heads + head
                numbers.store_global_words(given.q_shift + index * 4, 0, [numbers.bits(total)])
        if const_expr(self.parts.factor):
            self.scale(self.k_constants, values, given.q_factor, self.kv_head(given, head), place.lane)
        self.k_hadamard.apply(values, place.lane)

    def shift_of(self, values, given, kv_head, lane):
        """q . k_center of the team's row.

        Summed up in an order that does not depend on how many lanes there are: the kernel for decode gives what the
        others give.
        """
        elements, count = self.k_constants, self.k_constants.count
        centres = self.constants_of(elements, given.k_center, kv_head, lane)
        whole = count % LANE_ELEMENTS == 0  # else all kernels have as many lanes
        run, size = count // elements.runs, (LANE_ELEMENTS if whole else count) // elements.runs
        parts = []
        for first in range(0, run, size):
            part = Float32(0.0)
            for i in (r * run + first + j for r in range(elements.runs) for j in range(size)):
                part = ptx.fma(values[i], centres[i], part)
            parts.append(part)
        return lane_sum(in_pairs(operator.add, parts), neighbours(self.lanes))

    def scale(self, constants, values, base, head, lane):
        for i, factor in enumerate(self.constants_of(constants, base, head, lane)):
            values[i] = numbers.multiply(values[i], factor)

    def constants_of(self, constants: Elements, base, head, lane):
        """The lane's columns of a KV head's constants."""
        return constants.load(base + Int64(head) * constants.row_bytes, lane)
