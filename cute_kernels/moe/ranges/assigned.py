"""Grouped weight-only GEMM of few rows an expert, among assignments as a router leaves them.

`cute_kernels.moe.ranges.kernel.RangeRoles`, whose warps find their entries by :mod:`.assignments`: a layer of
few assignments needs no launch that sorts them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.moe.ranges.assignments import AssignmentFinder, load_expert
from cute_kernels.moe.ranges.config import RangeConfig
from cute_kernels.moe.ranges.kernel import RangeRoles, launch_options, range_sizes
from cute_kernels.moe.ranges.work import AssignedSizes, RangeOperands


class AssignedRouting:
    """Assignments as a router leaves them: see `.kernel.Routing`."""

    def __init__(self, config: RangeConfig):
        self.config = config

    def load(self, operands, shape, lane) -> Any:
        return [
            load_expert(operands.offsets, i * WARP_THREADS + lane, shape.places, shape.id_words, shape.num_experts)
            for i in range(self.config.activations.lane_assignments)
        ]

    def find(self, shape, known, lane) -> tuple[Any, Any]:
        return AssignmentFinder.of(known, shape.num_experts, lane, self.config.tile_m), None

    def with_parts(self, shape, entries) -> Any:
        return entries << shape.part_bits

    def entry_of(self, shape, number) -> Any:
        return number >> shape.part_bits

    def first_k_block(self, shape, number) -> Any:
        return shape.part(number) * shape.k_blocks

    def tile_k_blocks(self, shape) -> Any:
        return shape.k_blocks << shape.part_bits

    def result_place(self, shape, number, place) -> Any:
        return shape.part(number) * shape.places + place

    @cute.jit
    def entry_row(self, operands, shape, entry, known, lane):
        return shape.row(entry.place(cutlass.min(lane, entry.rows - 1)))


class AssignedRangeKernel:
    """One compiled variant; :class:`.config.RangeConfig` says which."""

    def __init__(self, config: RangeConfig):
        self.config = config
        self.roles = RangeRoles(config, AssignedRouting(config))

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        bias: Int64,
        out: Int64,
        ids: Int64,
        n: Int32,
        num_tiles: Int32,
        k_blocks: Int32,
        num_ctas: Int32,
        num_experts: Int32,
        count: Int32,
        x_slots: Int32,
        id_words: Int32,
        row_factor: Int32,
        part_bits: Int32,
        waits: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """As `RangeKernel`, but for the routing.

        ids: address of ``count`` experts' ids of ``id_words`` words of 32 bits, of which those outside 0 to num_experts
        - 1 go nowhere. out: [count, ..], a row for each assignment. row_factor: as `AssignedSizes`. k_blocks: of one of
        2**part_bits equal parts of K, each of which has a result of its own, out [2**part_bits, count, ..]: without
        bias or activation, for whoever adds them up.
        """
        sizes = range_sizes(
            self.config, x, n, num_tiles, k_blocks, num_ctas, num_experts, count, x_slots, waits, activation, out_kind
        )
        operands = RangeOperands(ptx.address(x), codes, scales, bias, Int64(0), out, ids, Int64(0))
        shape = AssignedSizes(*sizes, id_words=id_words, row_factor=row_factor, part_bits=part_bits)
        self.kernel(operands, shape).launch(**launch_options(self.config, num_ctas, stream))

    @cute.kernel
    def kernel(self, operands, shape):
        self.roles.run(operands, shape)
