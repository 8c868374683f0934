"""`RowTransformer`, which applies a cache transform after RoPE to rows that several lanes share. k has a centre,
factors and a rotation; v has factors and a rotation; q gets the inverse steps, so that scores stay equal.

:mod:`cute_kernels.formats.kv.transforms` defines the steps. This module applies them in registers, between RoPE and
quantisation. Constants are fp32 [num_kv_heads, head_dim], some KiB that every CTA reads, so most CTAs find them in the
L2 cache. The constants of a team's first row are loaded with the row. When a row has used its constants, the loads of
the next row's constants start.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.hadamard import Hadamard
from cute_kernels.device.lanes import in_pairs, lane_sum, neighbours
from cute_kernels.device.rows import Elements
from cute_kernels.kv_cache.config import GROUP_BITS, LANE_ELEMENTS, RowTransform


class RowTransformer:
    """Applies the transform of a kernel to rows. ``given`` in its methods is a
    :class:`cute_kernels.kv_cache.operands.Transforms`."""

    def __init__(self, parts: RowTransform | None, head_dims: tuple[int, int], lanes: int, runs: int):
        """Makes the transformer.

        Args:
            parts: the steps of the transform.
            head_dims: (K's head_dim, V's head_dim).
            lanes: number of lanes of a team.
            runs: number of runs of columns of a lane.
        """
        self.parts, self.lanes = parts or RowTransform(), lanes
        k_dim, v_dim = head_dims
        self.k_constants = Elements("fp32", k_dim, lanes, runs)
        self.v_constants = Elements("fp32", v_dim, lanes, runs)
        self.k_hadamard = Hadamard(self.parts.k_rotation, k_dim, lanes, runs)
        self.v_hadamard = Hadamard(self.parts.v_rotation, v_dim, lanes, runs)

    @property
    def num_constants(self) -> int:
        """Number of constants that a lane needs for one row."""
        return self.parts.num_parts * max(self.k_constants.count, self.v_constants.count)

    @cute.jit
    def ask(self, constants, given, head, is_q, is_v, lane):
        """Starts loading the constants of the team's first row, at the same time as the row."""
        if const_expr(self.k_constants == self.v_constants):
            # One copy of the code: registers that branches fill are moved where these meet, and so waited for.
            head = cutlass.select_(is_q, self.kv_head(given, head), head)
            for part in cutlass.range_constexpr(self.parts.num_parts):
                base = self.address_of(given, part, is_q, is_v)
                if base != 0:
                    self._load(constants, self.k_constants, part, base, head, lane)
        elif is_v:
            self.ask_v(constants, given, head, lane)
        elif is_q:
            self.ask_q(constants, given, head, lane)
        else:
            self.ask_k(constants, given, head, lane)

    def addresses(self, given):
        """Returns three lists of the constants' addresses: for rows of K, of q and of V. Each list is in the order in
        which the constants are applied."""
        parts = self.parts
        of_k = [given.k_center] * parts.center + [given.k_factor] * parts.factor
        of_q = [given.k_center] * parts.shift + [given.q_factor] * parts.factor
        return of_k, of_q, [given.v_factor] * parts.v_factor

    def address_of(self, given, part: int, is_q, is_v):
        """Returns the address of the constants with index ``part`` for rows of q, k or v, whichever the team has; 0 if
        there are no such constants.
        """
        of_k, of_q, of_v = (own[part] if part < len(own) else Int64(0) for own in self.addresses(given))
        return cutlass.select_(is_q, of_q, cutlass.select_(is_v, of_v, of_k))

    def kv_head(self, given, q_head):
        """Returns the KV head that a q head reads."""
        return (q_head * given.group_reciprocal) >> GROUP_BITS

    def ask_k(self, constants, given, head, lane):
        """Starts loading a k head's ``constants``: center, then factor."""
        for part, base in enumerate(self.addresses(given)[0]):
            self._load(constants, self.k_constants, part, base, head, lane)

    def ask_q(self, constants, given, q_head, lane):
        """Starts loading a q head's ``constants``: center if the kernel writes shifts, then factor."""
        self.ask_queries(constants, given, self.kv_head(given, q_head), lane)

    def ask_queries(self, constants, given, kv_head, lane):
        """Starts loading the ``constants`` that the q heads of ``kv_head`` share."""
        for part, base in enumerate(self.addresses(given)[1]):
            self._load(constants, self.k_constants, part, base, kv_head, lane)

    def ask_v(self, constants, given, head, lane):
        for part, base in enumerate(self.addresses(given)[2]):
            self._load(constants, self.v_constants, part, base, head, lane)

    def _load(self, constants, elements: Elements, part: int, base, head, lane):
        for i, value in enumerate(elements.load(base + Int64(head) * elements.row_bytes, lane)):
            constants[part * elements.count + i] = value

    def transform_k(self, values, constants, given, next_head, lane):
        """Transforms a row of k, and starts loading the constants of ``next_head`` into ``constants``. next_head: the
        head of the team's next row, or None."""
        self.apply_constants(values, constants)
        if next_head is not None:
            self.ask_k(constants, given, next_head, lane)
        self.k_hadamard.apply(values, lane)

    def apply_constants(self, values, constants):
        """Applies K's constants: subtracts the centre, then multiplies by the factors."""
        count = self.k_constants.count
        if self.parts.center:
            for i in range(count):
                values[i] = numbers.add(values[i], -constants[i])
        if self.parts.factor:
            for i in range(count):
                values[i] = numbers.multiply(values[i], constants[self.parts.center * count + i])

    def transform_v(self, values, constants, given, next_head, lane):
        if self.parts.v_factor:
            for i in range(self.v_constants.count):
                values[i] = numbers.multiply(values[i], constants[i])
        if next_head is not None:
            self.ask_v(constants, given, next_head, lane)
        self.v_hadamard.apply(values, lane)

    @cute.jit
    def transform_q(self, values, constants, given, head, next_head, place):
        """Transforms a row of q. With ``parts.shift`` it also stores the row's q_shift."""
        if const_expr(self.parts.shift):
            total = self.shift_of(values, constants)
            if place.valid:
                # All lanes write the same: cheaper than to choose one.
                index = Int64(place.token) * given.num_q_heads + head
                numbers.store_global_words(given.q_shift + index * 4, 0, [numbers.bits(total)])
        self.apply_q_factor(values, constants)
        if const_expr(self.parts.shift or self.parts.factor):
            if self.kv_head(given, next_head) != self.kv_head(given, head):
                self.ask_q(constants, given, next_head, place.lane)
        self.k_hadamard.apply(values, place.lane)

    def turn_query(self, values, constants, lane):
        """Transforms a row of q, but does not compute its q_shift."""
        self.apply_q_factor(values, constants)
        self.k_hadamard.apply(values, lane)

    def apply_q_factor(self, values, constants):
        count = self.k_constants.count
        for i in range(count if self.parts.factor else 0):
            values[i] = numbers.multiply(values[i], constants[self.parts.shift * count + i])

    def shift_of(self, values, centres):
        """Returns q . k_center of the team's row.

        The order of the sum does not depend on the number of lanes, so all kernels return the same bits.
        """
        runs, count = self.k_constants.runs, self.k_constants.count
        whole = count % LANE_ELEMENTS == 0  # else all kernels have as many lanes
        run, size = count // runs, (LANE_ELEMENTS if whole else count) // runs
        parts = []
        for first in range(0, run, size):
            part = Float32(0.0)
            for i in (r * run + first + j for r in range(runs) for j in range(size)):
                part = ptx.fma(values[i], centres[i], part)
            parts.append(part)
        return lane_sum(in_pairs(operator.add, parts), neighbours(self.lanes))
