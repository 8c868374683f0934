"""Policies by which warps find an expert's rows of x: one for assignments that are sorted by expert, one for unsorted
assignments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.device_operands import operands_of
from cute_kernels.gemm.experts.ranges.assignments import AssignmentFinder, load_expert
from cute_kernels.gemm.experts.ranges.config import RangeConfig, entry_rows
from cute_kernels.gemm.experts.ranges.finder import Entry, ExpertFinder, load_places
from cute_kernels.gemm.experts.ranges.work import AssignedSizes, RangeOperands, RangeSizes, reciprocal


def range_sizes(config: RangeConfig, given, places) -> Any:
    """Returns the fields of a `RangeSizes`, from a launch's arguments. places: rows of the result."""
    num_blocks = cute.ceil_div(given.num_tiles, config.n_tiles)
    blocks, ctas = reciprocal(num_blocks), reciprocal(given.num_ctas)
    of_blocks = given.num_tiles, given.k_blocks, num_blocks, blocks, given.num_ctas, ctas
    routed = given.num_experts, places, given.x_slots, given.waits
    return given.n, given.x.shape[1], *of_blocks, *routed, given.activation, given.out_kind


class Routing(ABC):
    """The base of policies by which warps find an expert's rows of x. Methods take a ``number``: the index of an entry.
    If K is cut into parts, it is the index of one part of an entry.
    """

    def __init__(self, config: RangeConfig):
        self.config = config

    @abstractmethod
    def sizes(self, given) -> RangeSizes:
        """Returns the sizes of a launch, on the host."""

    @abstractmethod
    def operands(self, given) -> RangeOperands:
        """Returns the operands of a launch, on the host."""

    @abstractmethod
    def load(self, operands, shape, lane) -> Any:
        """Loads the part of the routing that a lane passes to `find` as ``known``."""

    @abstractmethod
    def find(self, shape, known, lane) -> tuple[Any, Any]:
        """Returns (the finder of entries, a value that callers pass to `entry_row` as ``known``). known: as `load`
        returns it."""

    @abstractmethod
    def entry_row(self, operands, shape, entry, known, lane) -> Any:
        """Returns the index in x of an entry's ``lane``-th row. Lanes beyond the entry's last row get its last row.
        known: as `find` returns it."""

    def part_bits(self, shape) -> Any:
        """Returns log2 of the number of parts into which K is cut. The parts of an entry have consecutive
        ``number``s."""
        return 0

    def part(self, shape, number) -> Any:
        """Returns the index of the part of K that a ``number`` stands for."""
        bits = self.part_bits(shape)
        return number - ((number >> bits) << bits)

    def with_parts(self, shape, entries) -> Any:
        """Returns the total number of parts of ``entries`` entries."""
        return entries << self.part_bits(shape)

    def entry_of(self, shape, number) -> Any:
        """Returns the entry to which the part with a ``number`` belongs."""
        return number >> self.part_bits(shape)

    def first_k_block(self, shape, number) -> Any:
        """Returns the first k block of the part of K that a ``number`` stands for."""
        return self.part(shape, number) * shape.k_blocks

    def tile_k_blocks(self, shape) -> Any:
        """Returns the k blocks of the padded K."""
        return shape.k_blocks << self.part_bits(shape)

    def result_place(self, shape, number, place) -> Any:
        """Returns the row of the output for the results of a place. number: index of the part of an entry."""
        return self.part(shape, number) * shape.places + place


class SortedRouting(Routing):
    """The `Routing` of assignments that are sorted by expert. It reads the offsets of experts, and the row of x at each
    place.
    """

    def sizes(self, given) -> RangeSizes:
        return RangeSizes(*range_sizes(self.config, given, given.places))

    def operands(self, given) -> RangeOperands:
        return operands_of(RangeOperands, given, residual=Int64(0))

    def load(self, operands, shape, lane) -> Any:
        """Loads (the places of the lane's experts, the row of x at the lane's place).

        With few places, the row is loaded at once: the lane does not wait until the offsets say which rows are needed.
        """
        places = load_places(operands.offsets, shape.num_experts, self.config.activations.expert_rounds, lane)
        return places, self.row_at(operands, cutlass.min(lane, shape.places - 1))

    def find(self, shape, known, lane) -> tuple[Any, Any]:
        """Returns (the finder of entries, the row of x of the lane's place)."""
        places, row = known
        return ExpertFinder.of(places, lane, entry_rows(self.config.format)), row

    @cute.jit
    def entry_row(self, operands, shape, entry: Entry, known, lane):
        """Returns the index in x of an entry's ``lane``-th row. Lanes beyond the entry's last row get its last row.
        known: the row of x at the lane's place."""
        place = entry.place(cutlass.min(lane, entry.rows - 1))
        row = cute.arch.shuffle_sync(known, place & (WARP_THREADS - 1))
        if shape.places > WARP_THREADS:
            row = self.row_at(operands, place)
        return row

    @cute.jit
    def row_at(self, operands, place):
        """Loads the index of the row of x at a place. Without a list of rows, it is the place itself."""
        row = place
        if operands.rows != 0:
            row = Int32(ptx.load_global_words(operands.rows + Int64(place) * 4, 0, 1, constant=False)[0])
        return row


class AssignedRouting(Routing):
    """The `Routing` of unsorted assignments. Warps find entries by :mod:`.assignments`, so no launch sorts
    assignments.
    """

    def sizes(self, given) -> AssignedSizes:
        own = {"id_words": given.id_words, "row_factor": given.row_factor, "part_bits": given.part_bits}
        return AssignedSizes(*range_sizes(self.config, given, given.count), **own)

    def operands(self, given) -> RangeOperands:
        return operands_of(RangeOperands, given, residual=Int64(0), offsets=given.ids, rows=Int64(0))

    def load(self, operands, shape, lane) -> Any:
        return [
            load_expert(operands.offsets, i * WARP_THREADS + lane, shape.places, shape.id_words, shape.num_experts)
            for i in range(self.config.activations.lane_assignments)
        ]

    def find(self, shape, known, lane) -> tuple[Any, Any]:
        return AssignmentFinder.of(known, shape.num_experts, lane, entry_rows(self.config.format)), None

    def part_bits(self, shape) -> Any:
        return shape.part_bits

    @cute.jit
    def entry_row(self, operands, shape, entry, known, lane):
        return shape.row(entry.place(cutlass.min(lane, entry.rows - 1)))
