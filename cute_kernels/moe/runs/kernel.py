"""Grouped weight-only GEMM of few rows an expert by MMAs of bytes: digits of an entry's rows, made by its CTAs.

What :mod:`cute_kernels.moe.kernel` computes, with its roles: a warp copies weights into a ring, warps multiply, warps
store. But where that one decodes codes to bf16 and multiplies them by mma.sync, which takes as long for a unit as the
memory does, so that what has come before the first product is caught up with by nobody, bytes of codes take a third of
the instructions (:mod:`cute_kernels.linear.wgmma.digits`). An expert's few rows are turned into digits by the
multiplying warps of each CTA that has a block of it: no launch makes digits, and no warp brings activations.

And from the start to the first copy there are few instructions, as each of them comes from memory itself when other
kernels ran before. Blocks of output features of all entries are dealt out whole, in equal runs, so there are no partial
results; each warp finds its CTA's run by itself (:mod:`.finder`).

The four warps that take the same stages of the ring are a warpgroup. Warpgroups take them in turn, and their sums of a
block meet in the staging buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.ring import advance, advance_by
from cute_kernels.linear.config import BLOCK_TOKENS, ROW_WARPS
from cute_kernels.linear.kernel import FRAGMENT_BYTES, Lane, LinearKernel
from cute_kernels.linear.wgmma.config import ROW_DIGIT_BYTES, ROW_SCALE_BYTES
from cute_kernels.linear.wgmma.copies import product
from cute_kernels.linear.wgmma.digits import DigitProducts, Part
from cute_kernels.linear.wgmma.resident_rows import PIECE_BITS, ResidentRows, Source
from cute_kernels.moe.runs.config import RunConfig
from cute_kernels.moe.runs.finder import Entry, ExpertFinder, load_places
from cute_kernels.moe.runs.work import BlockRun, LaunchShape, RunOperands
from cute_kernels.moe.work import reciprocal
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import TILE_BYTES

# Numbers of barriers: of the multiplying warps; and of these, and of the storing ones, with the copying warp, which has
# made all that they wait for. It arrives and may have ended before they do, so neither is of all threads of the CTA.
MEETING, MULTIPLYING, STORING = 1, 2, 3


@dataclass(frozen=True)
class DigitRoom:
    """How digits of a configuration are made: see `cute_kernels.linear.wgmma.resident_rows.RowsRoom`."""

    config: RunConfig
    loads: bool = True

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def tokens(self) -> int:
        return self.config.max_tokens

    @property
    def math_warps(self) -> int:
        return self.config.math_warps

    @property
    def boxes(self) -> int:
        return self.config.room_units


@dataclass(frozen=True)
class EntrySource(Source):
    """x, and which of its rows are an entry's."""

    index: Any  # of the lane's row


@dataclass(frozen=True)
class DigitPlaces:
    """Where digits of an entry's units and their scales lie: addresses."""

    x_address: Any
    x_scales: Any


@dataclass(frozen=True)
class DigitLane(Lane):
    """A thread's places, and what it reads of digits."""

    x: Any  # address of all digits
    x_scales: Any  # of the scales of the thread's two rows, of the first unit
    masks: Any  # of codes


class EntryRows(ResidentRows):
    """Digits of the rows of an entry."""

    constant = False  # the product before may still be writing when this one begins

    def source_row(self, x: EntrySource, row) -> Any:  # type: ignore[override]
        return cute.arch.shuffle_sync(x.index, row)


class RunKernel(LinearKernel):
    """One compiled variant; :class:`.config.RunConfig` says which."""

    config: RunConfig

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.rows = EntryRows(DigitRoom(config))
        self.products = DigitProducts(config.n_tiles, config.max_tokens, self.decoder.steps)

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        bias: Int64,
        out: Int64,
        offsets: Int64,
        rows: Int64,
        n: Int32,
        num_tiles: Int32,
        units: Int32,
        num_ctas: Int32,
        num_experts: Int32,
        places: Int32,
        x_slots: Int32,
        waits: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches ``num_ctas`` CTAs.

        x: [.., k], k a multiple of 8. Addresses as in :class:`RunOperands`, codes uint8 [experts, num_tiles, units *
        unit_tiles, 2048]. units: padded K / unit_k, a multiple of the units of a chunk, of which there is room for
        x_slots times as many. places: rows of the result, at least 1. waits: 0 if offsets and rows are older than the
        kernel before this one, which has waited for them before it let this one begin; else 1.
        """
        sizes = self.sizes(x, n, num_tiles, units, num_ctas, num_experts, places, x_slots, waits, activation, out_kind)
        operands = RunOperands(ptx.address(x), codes, scales, bias, Int64(0), out, offsets, rows)
        self.kernel(operands, LaunchShape(*sizes)).launch(**self.launch_options(num_ctas, stream))

    def sizes(  # type: ignore[override]
        self, x, n, num_tiles, units, num_ctas, num_experts, places, x_slots, waits, activation, out_kind
    ) -> Any:
        """The fields of a `LaunchShape`."""
        num_blocks = cute.ceil_div(num_tiles, self.config.n_tiles)
        blocks, ctas = reciprocal(num_blocks), reciprocal(num_ctas)
        run = num_tiles, units, num_blocks, blocks, num_ctas, ctas, num_experts, places, x_slots, waits
        return n, x.shape[1], *run, activation, out_kind

    def launch_options(self, num_ctas, stream) -> dict[str, Any]:
        sizes = {"grid": (num_ctas, 1, 1), "block": (self.config.num_threads, 1, 1), "min_blocks_per_mp": 1}
        return sizes | {"use_pdl": self.config.use_pdl, "stream": stream}

    @cute.kernel
    def kernel(self, operands, shape):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate(shape)
        if const_expr(config.use_pdl):
            if shape.waits != 0:
                cute.arch.griddepcontrol_wait()
        routing = self.load_routing(operands, shape, lane)
        if warp == config.math_warps:
            if lane == 0:
                self.init_barriers(memory)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=MULTIPLYING, number_of_threads=self.with_copying(config.math_warps))
            cute.arch.barrier_arrive(barrier_id=STORING, number_of_threads=self.with_copying(config.epilogue_warps))
        finder, row = self.find_entries(shape, routing, lane)
        run = BlockRun.of(shape, self.with_parts(shape, finder.total), cta)
        if warp == config.math_warps:
            self.copy_blocks(operands, memory, run, finder)
        elif warp < config.math_warps:
            self.multiply_blocks(operands, memory, run, finder, row, warp, lane)
        else:
            tid = (warp - (config.math_warps + 1)) * WARP_THREADS + lane
            self.store_blocks(operands, memory, run, finder, tid, lane)

    def with_copying(self, warps: int) -> int:
        """Threads of so many warps and of the copying one."""
        return (warps + self.config.copy_warps) * WARP_THREADS

    def load_routing(self, operands, shape, lane) -> Any:
        """What a lane knows of the routing, for `find_entries`.

        Of few places the row of each, which is not known to be of use before offsets have come.
        """
        places = load_places(operands.offsets, shape.num_experts, self.config.expert_rounds, lane)
        return places, self.row_at(operands, cutlass.min(lane, shape.places - 1))

    def find_entries(self, shape, routing, lane) -> tuple[Any, Any]:
        """What finds entries, and what a lane knows of the rows of x, for `entry_row`."""
        places, row = routing
        return ExpertFinder.of(places, lane, self.config.max_tokens), row

    def with_parts(self, shape, entries) -> Any:
        """What blocks are of: entries, here with all of K."""
        return entries

    def entry_of(self, shape, number) -> Any:
        """The entry of a number of `with_parts`."""
        return number

    def first_unit(self, shape, number) -> Any:
        """The first unit of K that a number of `with_parts` is multiplied with."""
        return Int32(0)

    def tile_units(self, shape) -> Any:
        """Units of the padded K."""
        return shape.units

    def result_place(self, shape, number, place) -> Any:
        """The row of the results of a place, of a number of `with_parts`."""
        return place

    @cute.jit
    def entry_row(self, operands, shape, entry: Entry, known, lane):
        """The row of x of the lane's row of an entry, or of its last one; known: the row of the lane's place."""
        place = entry.place(cutlass.min(lane, entry.rows - 1))
        row = cute.arch.shuffle_sync(known, place & (WARP_THREADS - 1))
        if shape.places > WARP_THREADS:
            row = self.row_at(operands, place)
        return row

    def x_pitch(self, shape) -> Any:
        return Int32(0)

    def x_slot_bytes(self, shape, pitch) -> Any:
        return shape.units * self.config.unit_digit_bytes

    @cute.jit
    def row_at(self, operands, place):
        """The row of x of a place."""
        row = place
        if operands.rows != 0:
            row = Int32(ptx.load_global_words(operands.rows + Int64(place) * 4, 0, 1, constant=False)[0])
        return row

    # -- copies -------------------------------------------------------------------------------------------------------

    @cute.jit
    def copy_blocks(self, operands, memory, run: BlockRun, finder: ExpertFinder):
        """Brings the weights of all blocks; one warp."""
        config, shape = self.config, run.shape
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(run.count, unroll=1):
            number, block = run.block(index)
            expert = finder.find(self.entry_of(shape, number)).expert
            begins = self.weight_begins(operands, shape, expert, block, self.first_unit(shape, number))
            for unit in cutlass.range(0, shape.units, config.chunk_units, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    self.copy_units(memory, begins, unit, stage)
                stage, phase = advance(stage, phase, config.num_stages)
        if const_expr(config.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def weight_begins(self, operands, shape, expert, block, first_unit) -> list[tuple[Any, Any]]:
        """Where codes and scales of each of a block's tiles begin, from a unit on."""
        config = self.config
        tiles = [
            expert * shape.num_tiles + cutlass.min(block * config.n_tiles + i, shape.num_tiles - 1)
            for i in range(config.n_tiles)
        ]
        # There are fewer units than fit into 32 bits: each is some kilobytes.
        units = [Uint32(tile) * Uint32(self.tile_units(shape)) + Uint32(first_unit) for tile in tiles]
        sizes = config.unit_bytes, config.unit_scale_bytes
        return [(operands.codes + product(unit, sizes[0]), operands.scales + product(unit, sizes[1])) for unit in units]

    def copy_units(self, memory, begins, unit, stage) -> None:
        """Asks for the chunk of a block from a unit on; one lane."""
        config, barrier = self.config, memory.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.chunk_units * config.unit_stage_bytes)
        address = Int32(barrier.toint())
        target = memory.ring + stage * config.stage_bytes
        for i, begin in enumerate(begins):
            parts = ((0, config.unit_bytes), (config.scale_offset, config.unit_scale_bytes))
            for source, (offset, unit_bytes) in zip(begin, parts, strict=True):
                ptx.bulk_copy_to_shared(
                    target + (offset + i * config.chunk_units * unit_bytes),
                    source + product(unit, unit_bytes),
                    Int32(config.chunk_units * unit_bytes),
                    address,
                )

    # -- digits -------------------------------------------------------------------------------------------------------

    def x_start(self, shape, memory, slot) -> Any:
        """Where the digits of a slot are, bytes behind the first."""
        return (slot & (shape.x_slots - 1)) * memory.x_slot_bytes

    def digit_scales(self, shape, memory) -> Any:
        """Address of the scales of digits: behind the digits of all slots."""
        return memory.x + shape.x_slots * memory.x_slot_bytes

    @cute.jit
    def make_digits(self, operands, shape, memory, entry: Entry, begin, known, start, warp, lane):
        """Makes the digits of an entry's rows from unit ``begin`` on, ``start`` bytes behind the first; known: of
        `find_entries`.

        Where no warp reads any more: all have met since they did. If there is one slot only, all meet before as well.
        """
        row = self.entry_row(operands, shape, entry, known, lane)
        if shape.x_slots == 1:
            self.meet()
        places = DigitPlaces(memory.x + start, self.digit_scales(shape, memory) + scale_offset(start))
        rows = EntrySource(operands.x, entry.rows, shape.k >> PIECE_BITS, None, None, None, None, row)
        self.rows.make(rows, places, begin, begin + shape.units, warp, lane)
        self.meet()

    def meet(self) -> None:
        """Waits for all multiplying warps."""
        threads = self.config.math_warps * WARP_THREADS
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=threads)

    # -- products -----------------------------------------------------------------------------------------------------

    def digit_lane(self, shape, memory, warp, lane) -> DigitLane:
        row_warp, g = warp % ROW_WARPS, lane // 4
        return DigitLane(
            row_warp=row_warp,
            k_warp=warp // ROW_WARPS,
            g=g,
            t=lane % 4,
            code_offset=(row_warp * WARP_THREADS + lane) * FRAGMENT_BYTES,
            scale_offset=row_warp * 16 + g,
            x_rows=[],
            x=memory.x,
            x_scales=self.digit_scales(shape, memory) + lane % 4 * 8,
            masks=self.products.masks(Uint32(shape.n >> 31)),
        )

    @cute.jit
    def multiply_blocks(self, operands, memory, run: BlockRun, finder: ExpertFinder, row, warp, lane):
        """A multiplying warp: its units of every block, then its part of the block's results."""
        config, shape = self.config, run.shape
        place = self.digit_lane(shape, memory, warp, lane)
        stage, phase, turn = Int32(place.k_warp), Int32(0), Int32(place.k_warp)
        buffer, drained_phase = Int32(0), Int32(1)
        last, slot, start = Int32(-1), Int32(0), Int32(0)
        sums = cute.make_rmem_tensor(config.n_tiles * config.token_blocks * 4, Float32)
        if const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()
        cute.arch.barrier(barrier_id=MULTIPLYING, number_of_threads=self.with_copying(config.math_warps))
        for index in cutlass.range(run.count, unroll=1):
            number, _ = run.block(index)
            if number != last:
                start = self.x_start(shape, memory, slot)
                entry, begin = finder.find(self.entry_of(shape, number)), self.first_unit(shape, number)
                self.make_digits(operands, shape, memory, entry, begin, row, start, warp, lane)
                slot = slot + 1
            last = number
            sums.fill(0.0)
            stage, phase, turn = self.multiply_block(sums, shape, memory, place, start, (stage, phase, turn), lane)
            cute.arch.mbarrier_wait(memory.drained + buffer, drained_phase)
            self.stage_sums(sums, memory, buffer, place, [])
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.staged + buffer)
            buffer, drained_phase = advance(buffer, drained_phase, config.num_buffers)

    @cute.jit
    def multiply_block(self, sums, shape, memory, place: DigitLane, start, ring, lane):
        """Adds a block's products to ``sums``; of its chunks a warpgroup takes every ``k_warps``-th.

        start: bytes to its digits; ring and result: (stage, phase, chunks until the next one that is this warp's).
        """
        config = self.config
        stage, phase, turn = ring
        chunk = config.chunk_units
        first = turn * chunk
        following = first
        for unit in cutlass.range(first, shape.units, config.k_warps * chunk, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            base = memory.ring + stage * config.stage_bytes
            self.multiply_units(sums, base, unit * config.unit_digit_bytes + start, place)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.empty + stage)
            following = unit + config.k_warps * chunk
            stage, phase = advance_by(config.k_warps, stage, phase, config.num_stages)
        return stage, phase, (following - shape.units) // chunk

    def multiply_units(self, sums, base, x_offset, place: DigitLane) -> None:
        """Adds the products of a chunk; x_offset: where the digits of its first unit are."""
        config = self.config
        parts = [
            Part(tile, *self.load_unit(base, unit, tile, place), *self.load_digits(place, x_offset, unit))
            for tile in range(config.n_tiles)
            for unit in range(config.chunk_units)
        ]
        self.products.multiply_parts(sums, parts, place.masks, config.max_tokens)

    def load_unit(self, base, unit: int, tile: int, place: DigitLane) -> tuple[Any, Any]:
        """(codes, scales) of a tile of the ``unit``-th unit of a chunk."""
        config = self.config
        number = tile * config.chunk_units + unit
        offset = number * config.unit_bytes
        address = base + place.code_offset
        words = [ptx.load_shared_vector(address, offset + i * TILE_BYTES, 4) for i in range(config.unit_tiles)]
        row, offset = base + place.scale_offset * 2, config.scale_offset + number * config.unit_scale_bytes
        return words, [self.to_float(ptx.load_shared_part(row, offset + 16 * half, 2)) for half in range(2)]

    def load_digits(self, place: DigitLane, x_offset, unit: int) -> tuple[Any, Any]:
        """(scales of x, descriptor) of the ``unit``-th unit from ``x_offset`` on."""
        config, address = self.config, place.x_scales + scale_offset(x_offset)
        pairs = [
            ptx.load_shared_vector(
                address, unit * config.unit_x_scale_bytes + block * BLOCK_TOKENS * ROW_SCALE_BYTES, 2
            )
            for block in range(config.token_blocks)
        ]
        x = wgmma.descriptor(cute.arch.make_warp_uniform(Int32(place.x + x_offset)))
        scales = [word.bitcast(Float32) for pair in pairs for word in pair]
        return scales, wgmma.advanced(x, unit * config.unit_digit_bytes)

    # -- results ------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_blocks(self, operands, memory, run: BlockRun, finder: ExpertFinder, tid, lane):
        """A storing warp: results of all blocks, four neighbouring ones of a row a thread."""
        config, shape = self.config, run.shape
        if const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()
        cute.arch.barrier(barrier_id=STORING, number_of_threads=self.with_copying(config.epilogue_warps))
        buffer, phase = Int32(0), Int32(0)
        sums = cute.make_rmem_tensor(4, Float32)
        extras = cute.make_rmem_tensor(8, Float32)
        # The first turn is a rehearsal that stores nothing: what is executed for the first time comes from memory, line
        # by line, and the launch waits for its last results.
        turns = cutlass.select_(run.count > 0, run.count + 1, Int32(0))
        for turn in cutlass.range(turns, unroll=1):
            rehearsing = turn == 0
            number, block = run.block(cutlass.max(turn - 1, 0))
            entry = finder.find(self.entry_of(shape, number))
            source = memory.staging + buffer * config.buffer_bytes
            if not rehearsing:
                cute.arch.mbarrier_wait(memory.staged + buffer, phase)
            for vector in cutlass.range(
                tid, entry.rows * self.epilogue.row_vectors, self.epilogue.num_threads, unroll=1
            ):
                place = entry.place(vector // self.epilogue.row_vectors)
                result = self.result_place(shape, number, place)
                target = self.epilogue.target_in(shape, block, result, vector, entry.expert * shape.n)
                target = replace(target, count=cutlass.select_(rehearsing, Int32(0), target.count))
                self.epilogue.load_extras(operands, shape, target, extras)
                values = self.epilogue.staged_sum(source, vector)
                for i in cutlass.range_constexpr(4):
                    sums[i] = values[i]
                self.epilogue.store(operands, shape, target, sums, extras)
            if not rehearsing:
                self.epilogue.release(memory, buffer, lane)
                buffer, phase = advance(buffer, phase, config.num_buffers)


def scale_offset(x_offset) -> Any:
    """Bytes to the scales of a unit whose digits are ``x_offset`` behind the first."""
    return x_offset // (ROW_DIGIT_BYTES // ROW_SCALE_BYTES)
