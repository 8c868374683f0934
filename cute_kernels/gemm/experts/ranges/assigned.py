"""Grouped weight-only GEMM of few rows an expert, among assignments as a router leaves them.

`cute_kernels.gemm.experts.ranges.kernel.RangeRoles`, whose warps find their entries by :mod:`.assignments`: a layer of
few assignments needs no launch that sorts them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.experts.ranges.assignments import AssignmentFinder, load_expert
from cute_kernels.gemm.experts.ranges.config import RangeConfig
from cute_kernels.gemm.experts.ranges.kernel import RangeRoles, launch_options, range_sizes
from cute_kernels.gemm.experts.ranges.work import AssignedSizes, RangeOperands
from cute_kernels.gemm.work import operands_of


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

    def launch(self, given, stream):
        """As `RangeKernel`, but for the routing; ``given`` has the arguments `ASSIGNED` of
        :mod:`cute_kernels.gemm.experts.arguments`."""
        sizes = range_sizes(self.config, given, given.count)
        operands = operands_of(RangeOperands, given, residual=Int64(0), offsets=given.ids, rows=Int64(0))
        own = {"id_words": given.id_words, "row_factor": given.row_factor, "part_bits": given.part_bits}
        shape = AssignedSizes(*sizes, **own)
        self.kernel(operands, shape).launch(**launch_options(self.config, given.num_ctas, stream))

    @cute.kernel
    def kernel(self, operands, shape):
        self.roles.run(operands, shape)
