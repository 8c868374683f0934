"""Grouped weight-only GEMM for few rows an expert, by MMAs of bytes. Each CTA makes limbs of the rows that it
multiplies.

One warp copies weights into a pipeline, consumer warps multiply, epilogue warps store. Decoding codes to bf16 would
take as long as loading them, so the warps could never make up for the time before the first MMA. Decoding codes to
bytes takes a third of the instructions (:mod:`cute_kernels.gemm.wgmma.limbs`). In each CTA, consumer warps turn the few
rows of an expert into limbs. So there is no launch that makes limbs, and no producer warp for activations.

If other kernels ran before, each instruction is fetched from global memory. So there are few instructions from the
start to the first copy. Each CTA has an equal work range of the blocks of output features of all entries. Blocks are
not cut, so there are no partial results. Each warp finds its CTA's range by itself (:mod:`.finder`).

The four warps that take the same pipeline stages are a warpgroup. Warpgroups take stages in turn, and their
accumulators of a block are added up in the staging buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.gemm.device_operands import load_channel, scale_number
from cute_kernels.gemm.experts.ranges.config import RangeConfig
from cute_kernels.gemm.experts.ranges.finder import Entry, ExpertFinder
from cute_kernels.gemm.experts.ranges.routing import AssignedRouting, Routing, SortedRouting
from cute_kernels.gemm.experts.ranges.work import BlockRange
from cute_kernels.gemm.stream.config import ROW_WARPS
from cute_kernels.gemm.stream.epilogue import StreamEpilogue
from cute_kernels.gemm.stream.kernel import FRAGMENT_BYTES, StreamLane, stage_acc
from cute_kernels.gemm.stream.memory import allocate, init_barriers
from cute_kernels.gemm.wgmma.limbs import Part, limb_products
from cute_kernels.gemm.wgmma.loads import product
from cute_kernels.gemm.wgmma.mainloops import ROW_LIMB_BYTES, ROW_SCALE_BYTES, limb_groups, row_columns, stored_group
from cute_kernels.gemm.wgmma.resident_rows import PIECE_BITS, RowsRoom, Source, limbs_of, rows_in
from layouts.weights.hopper import TILE_BYTES

# Named barriers. MEETING: the consumer warps. CONSUMERS, EPILOGUE: the producer warp arrives once mbarriers are
# initialised, and consumer or epilogue warps wait. The producer may end before the others wait, so no barrier has all
# threads of the CTA.
MEETING, CONSUMERS, EPILOGUE = 1, 2, 3


def room_of(config: RangeConfig) -> RowsRoom:
    """Returns the `RowsRoom` of a configuration's limbs."""
    k_blocks = config.activations.room_k_blocks(config)
    return RowsRoom(config.dtype, config.tile_m, config.consumer_warps, k_blocks, **limbs_of(config.format))


@dataclass(frozen=True)
class EntrySource(Source):
    """The source of an entry's rows of x, from which limbs are made."""

    index: Int32  # of the lane's row

    def row(self, row: Int32) -> Int32:
        return cute.arch.shuffle_sync(self.index, row)


@dataclass(frozen=True)
class LimbPlaces:
    """The addresses of the limbs of an entry's k blocks, and of their scales."""

    x_address: Int32
    x_scales: Int32


@dataclass(frozen=True)
class LimbLane(StreamLane):
    """A thread's offsets, and the address from which it reads the scales of limbs."""

    x_scales: Int32  # of the scales of the thread's two rows, of the first k block
    masks: Any  # of codes


class RangeRoles:
    """The roles of a CTA's warps: one loads weights, consumer warps make limbs and multiply, epilogue warps store."""

    def __init__(self, config: RangeConfig, routing: Routing):
        self.config, self.routing = config, routing
        self.decoder = config.format.decoder(config.dtype, HopperMath(config.dtype))
        self.rows, self.products = rows_in(room_of(config)), limb_products(config, self.decoder.steps)
        self.parts = 2 if config.activations.half_last else 1  # of a k block, in which a tile's are counted
        self.epilogue = StreamEpilogue(config)

    @cute.jit
    def run(self, operands, shape):
        """Runs each warp's role until the CTA has done all its work."""
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = allocate(config, Int32(0), shape.k_blocks * config.activations.k_block_limb_bytes(config))
        if shape.waits != 0:
            cute.arch.griddepcontrol_wait()
        known = self.routing.load(operands, shape, lane)
        if warp == config.consumer_warps:
            if lane == 0:
                init_barriers(memory)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=CONSUMERS, number_of_threads=self.with_producer(config.consumer_warps))
            cute.arch.barrier_arrive(
                barrier_id=EPILOGUE, number_of_threads=self.with_producer(config.store.epilogue_warps)
            )
        finder, row = self.routing.find(shape, known, lane)
        work_range = BlockRange.of(shape, self.routing.with_parts(shape, finder.total), cta)
        if warp == config.consumer_warps:
            self.copy_blocks(operands, memory, work_range, finder)
        elif warp < config.consumer_warps:
            self.multiply_blocks(operands, memory, work_range, finder, row, warp, lane)
        else:
            tid = (warp - (config.consumer_warps + 1)) * WARP_THREADS + lane
            self.store_blocks(operands, memory, work_range, finder, tid, lane)

    def with_producer(self, warps: int) -> int:
        """Returns the number of threads of ``warps`` warps and the producer warp."""
        return (warps + self.config.producer_warps) * WARP_THREADS

    @cute.jit
    def copy_blocks(self, operands, memory, work_range: BlockRange, finder: ExpertFinder):
        """Loads the weights of all blocks of the work range. Runs in the producer warp."""
        config, shape, pipeline = self.config, work_range.shape, memory.pipeline
        here = pipeline.producer_state()
        for index in cutlass.range(work_range.count, unroll=1):
            number, block = work_range.block(index)
            expert = finder.find(self.routing.entry_of(shape, number)).expert
            begins = self.weight_begins(operands, shape, expert, block, self.routing.first_k_block(shape, number))
            for k_block in cutlass.range(0, shape.k_blocks, config.chunk_k_blocks, unroll=1):
                pipeline.producer_acquire(here)
                with cute.arch.elect_one():
                    self.copy_k_blocks(shape, memory, begins, k_block, here)
                here = pipeline.next(here)
        cute.arch.griddepcontrol_launch_dependents()

    def weight_begins(self, operands, shape, expert, block, first_k_block) -> list[tuple[Any, Any]]:
        """Returns two addresses for each tile of a block: those of its codes and of its scales, from k block
        ``first_k_block`` on."""
        config, tiles = self.config, self.weight_tiles(shape, expert, block)
        # There are fewer k blocks than fit into 32 bits: each is some kilobytes.
        parts, of_tile = self.parts, self.tile_parts(shape)
        firsts = [Uint32(tile) * of_tile + Uint32(first_k_block * parts) for tile in tiles]
        sizes = config.k_block_bytes // parts, config.k_block_scale_bytes // parts
        begins = [
            (operands.codes + product(first, sizes[0]), operands.scales + product(first, sizes[1])) for first in firsts
        ]
        if config.more_scale_bytes:
            more = [product(Uint32(tile), config.more_scale_bytes) for tile in tiles]
            begins = [(codes, scales + each) for (codes, scales), each in zip(begins, more, strict=True)]
        return begins

    def weight_tiles(self, shape, expert, block) -> list[Any]:
        """Returns the indices of a block's tiles among the tiles of all experts."""
        count = self.config.n_tiles
        return [expert * shape.num_tiles + cutlass.min(block * count + i, shape.num_tiles - 1) for i in range(count)]

    def tile_parts(self, shape) -> Any:
        """Returns the number of a tile's k blocks, counted in half k blocks if the last k block may be a half."""
        return Uint32(self.routing.tile_k_blocks(shape) * self.parts - (self.parts - 1))

    def load_channel(self, operands, shape, expert, block, place: LimbLane) -> list[Any]:
        """Loads the scales and offsets that hold for all of K, for all tiles of a block, by `load_channel` of
        `cute_kernels.gemm.device_operands`.
        """
        config, found = self.config, []
        if config.more_scale_bytes or not config.group_size:
            size = config.k_block_scale_bytes // self.parts
            tile_bytes = Int64(self.tile_parts(shape)) * size + config.more_scale_bytes
            for tile in self.weight_tiles(shape, expert, block):
                found += load_channel(config, self.decoder, operands, tile, place.scale_offset, tile_bytes)
        return found

    def copy_k_blocks(self, shape, memory, begins, k_block, here) -> None:
        """Starts loading one chunk of a block: its k blocks from ``k_block`` on. Runs in one lane of the producer warp.

        The last k block may be half a k block. The stage's other half then keeps codes of an earlier k block, which are
        multiplied by limbs of 0. The scales for that half must not be NaN, so the scales of the first half are loaded
        twice.
        """
        config, parts = self.config, self.parts
        count = config.chunk_k_blocks
        code_bytes, other = Int32(count * config.k_block_bytes), Int32(config.k_block_scale_bytes // parts)
        missing = Int32(0)
        if parts > 1:
            last = k_block == shape.k_blocks - 1
            missing = cutlass.select_(last, Int32(config.k_block_bytes // parts), missing)
            other = cutlass.select_(last, Int32(0), other)
        address = memory.pipeline.producer_expect(here, count * config.k_block_stage_bytes - config.n_tiles * missing)
        target = memory.stages + here.stage * config.stage_bytes
        for i, (codes, scales) in enumerate(begins):
            first = i * count
            source = codes + product(k_block, config.k_block_bytes)
            ptx.bulk_copy_to_shared(target + first * config.k_block_bytes, source, code_bytes - missing, address)
            source = scales + product(k_block, config.k_block_scale_bytes)
            place = target + (config.scale_offset + first * config.k_block_scale_bytes)
            size = count * config.k_block_scale_bytes // parts
            for part in range(parts if size else 0):
                ptx.bulk_copy_to_shared(place + part * size, source + part * other, Int32(size), address)

    def x_start(self, shape, memory, slot) -> Any:
        """Returns the offset in bytes from the first slot's limbs to those of ``slot``."""
        return (slot & (shape.x_slots - 1)) * memory.x_slot_bytes

    def limb_scales(self, shape, memory) -> Any:
        """Returns the address of the scales of limbs, which lie after the limbs of all slots."""
        return memory.x + shape.x_slots * memory.x_slot_bytes

    @cute.jit
    def make_limbs(self, operands, shape, memory, entry: Entry, begin, known, start, warp, lane):
        """Makes the limbs of an entry's rows from k block ``begin`` on, and stores them ``start`` bytes after the first
        slot's limbs. known: as `Routing.find` returns it.

        No warp still reads the limbs that are overwritten. With two slots, all consumer warps have met since the last
        read of the slot. With one slot, the warps meet before they overwrite it.
        """
        row = self.routing.entry_row(operands, shape, entry, known, lane)
        if shape.x_slots == 1:
            self.meet()
        places = LimbPlaces(memory.x + start, self.limb_scales(shape, memory) + scale_offset(start))
        rows = EntrySource(operands.x, entry.rows, shape.k >> PIECE_BITS, row)
        self.rows.make(rows, places, begin, begin + shape.k_blocks, warp, lane)
        self.meet()

    def meet(self) -> None:
        """Waits for all consumer warps."""
        threads = self.config.consumer_warps * WARP_THREADS
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=threads)

    def limb_lane(self, shape, memory, warp, lane) -> LimbLane:
        row_warp, g = warp % ROW_WARPS, lane // 4
        return LimbLane(
            row_warp=row_warp,
            k_warp=warp // ROW_WARPS,
            g=g,
            t=lane % 4,
            code_offset=(row_warp * WARP_THREADS + lane) * FRAGMENT_BYTES,
            scale_offset=row_warp * 16 + g,
            x=memory.x,
            x_scales=self.limb_scales(shape, memory) + lane % 4 * 8,
            masks=self.products.bytes_of.masks(Uint32(shape.n >> 31)),
        )

    @cute.jit
    def multiply_blocks(self, operands, memory, work_range: BlockRange, finder: ExpertFinder, row, warp, lane):
        """Multiplies the warp's k blocks of every block, then stages the warp's part of the block's results. Runs in a
        consumer warp."""
        config, shape, results = self.config, work_range.shape, memory.results
        place = self.limb_lane(shape, memory, warp, lane)
        here, turn, staged = memory.pipeline.consumer_state(place.k_warp), Int32(place.k_warp), results.producer_state()
        last, slot, start, expert = Int32(-1), Int32(0), Int32(0), Int32(0)
        acc = cute.make_rmem_tensor(config.n_tiles * 4, Float32)
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=self.with_producer(config.consumer_warps))
        for index in cutlass.range(work_range.count, unroll=1):
            number, block = work_range.block(index)
            if number != last:
                start = self.x_start(shape, memory, slot)
                entry, begin = (
                    finder.find(self.routing.entry_of(shape, number)),
                    self.routing.first_k_block(shape, number),
                )
                self.make_limbs(operands, shape, memory, entry, begin, row, start, warp, lane)
                slot, expert = slot + 1, entry.expert
            last = number
            acc.fill(0.0)
            channel = self.load_channel(operands, shape, expert, block, place)
            here, turn = self.multiply_block(acc, shape, memory, place, start, (here, turn), lane)
            self.products.finish(acc)
            results.producer_acquire(staged)
            stage_acc(config, acc, memory, staged.stage, place, channel)
            cute.arch.sync_warp()
            if lane == 0:
                results.producer_commit(staged)
            staged = results.next(staged)

    @cute.jit
    def multiply_block(self, acc, shape, memory, place: LimbLane, start, state, lane):
        """Adds a warp's products of a block to ``acc``. A warpgroup takes every ``k_warps``-th chunk of the block.

        start: offset in bytes of the entry's limbs. state: (the pipeline's state, number of chunks before the warp's
        first chunk). Returns the ``state`` for the next block.
        """
        config, pipeline = self.config, memory.pipeline
        here, turn = state
        chunk = config.chunk_k_blocks
        first = turn * chunk
        following = first
        for k_block in cutlass.range(first, shape.k_blocks, config.k_warps * chunk, unroll=1):
            pipeline.consumer_wait(here)
            base = memory.stages + here.stage * config.stage_bytes
            self.multiply_k_blocks(acc, base, k_block * config.activations.k_block_limb_bytes(config) + start, place)
            cute.arch.sync_warp()
            if lane == 0:
                pipeline.consumer_release(here)
            following = k_block + config.k_warps * chunk
            here = pipeline.next(here, config.k_warps)
        return here, (following - shape.k_blocks) // chunk

    def multiply_k_blocks(self, acc, base, x_offset, place: LimbLane) -> None:
        """Adds the products of a chunk to ``acc``. x_offset: offset in bytes of the limbs of the chunk's first k
        block."""
        config = self.config
        parts = [
            Part(tile, *self.load_k_block(base, k_block, tile, place), *self.load_limbs(place, x_offset, k_block))
            for tile in range(config.n_tiles)
            for k_block in range(config.chunk_k_blocks)
        ]
        self.products.multiply_parts(acc, parts, place.masks, config.tile_m)

    def load_k_block(self, base, k_block: int, tile: int, place: LimbLane) -> tuple[Any, Any]:
        """Loads (codes, scales) of a tile for the ``k_block``-th k block of a chunk."""
        config = self.config
        number = tile * config.chunk_k_blocks + k_block
        offset = number * config.k_block_bytes
        address = base + place.code_offset
        words = [ptx.load_shared_vector(address, offset + i * TILE_BYTES, 4) for i in range(config.k_block_tiles)]
        size, of_group = config.format.scale_bytes, config.format.group_scale_bytes
        row, offset = base + place.scale_offset * size, config.scale_offset + number * config.k_block_scale_bytes
        columns = row_columns(config.format)
        if columns > 1:  # a lane's accumulators are of one of the groups that an MMA takes
            row = row + place.t // 2 * of_group
        if not config.k_block_groups:  # a scale for all of K
            return words, [Float32(1.0)] * (2 * limb_groups(config))
        groups = (stored_group(config, part) for part in range(limb_groups(config)))
        offsets = [group * of_group + 8 * size * half for group in groups for half in range(2)]
        return words, [self.load_scale(row, offset + each) for each in offsets]

    def load_scale(self, address, offset: int):
        """Loads a scale as `StreamRoles.load_scale` does."""
        word = ptx.load_shared_part(address, offset, self.config.format.scale_bytes)
        return scale_number(self.config, self.decoder, word)

    def load_limbs(self, place: LimbLane, x_offset, k_block: int) -> tuple[Any, Any]:
        """Loads the scales of x and makes the descriptor of its limbs, for the ``k_block``-th k block from ``x_offset``
        on. Returns (scales, descriptor)."""
        config, address = self.config, place.x_scales + scale_offset(x_offset)
        pair = ptx.load_shared_vector(address, k_block * config.activations.k_block_scale_bytes(config), 2)
        x = wgmma.descriptor(cute.arch.make_warp_uniform(Int32(place.x + x_offset)))
        scales = [word.bitcast(Float32) for word in pair]
        return scales, wgmma.advanced(x, k_block * config.activations.k_block_limb_bytes(config))

    @cute.jit
    def store_blocks(self, operands, memory, work_range: BlockRange, finder: ExpertFinder, tid, lane):
        """Stores the results of all blocks; each thread stores four neighbouring results of a row. Runs in an epilogue
        warp."""
        config, shape = self.config, work_range.shape
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=self.with_producer(config.store.epilogue_warps))
        staged = memory.results.consumer_state()
        acc = cute.make_rmem_tensor(4, Float32)
        extras = cute.make_rmem_tensor(8, Float32)
        # The first turn is a rehearsal that stores nothing: what is executed for the first time comes from memory, line
        # by line, and the launch waits for its last results.
        turns = cutlass.select_(work_range.count > 0, work_range.count + 1, Int32(0))
        for turn in cutlass.range(turns, unroll=1):
            rehearsing = turn == 0
            number, block = work_range.block(cutlass.max(turn - 1, 0))
            entry = finder.find(self.routing.entry_of(shape, number))
            source = memory.staging + staged.stage * config.buffer_bytes
            if not rehearsing:
                memory.results.consumer_wait(staged)
            for vector in cutlass.range(
                tid, entry.rows * self.epilogue.row_vectors, self.epilogue.num_threads, unroll=1
            ):
                place = entry.place(vector // self.epilogue.row_vectors)
                result = self.routing.result_place(shape, number, place)
                target = self.epilogue.target_in(shape, block, result, vector, entry.expert * shape.n)
                target = replace(target, count=cutlass.select_(rehearsing, Int32(0), target.count))
                # Only the first part of K adds the bias: for other parts the row lies beyond the last one.
                first = self.routing.first_k_block(shape, number) == 0
                target = replace(target, row=cutlass.select_(first, target.row, shape.n))
                self.epilogue.results.load_extras(operands, shape, target, extras)
                values = self.epilogue.staged_sum(source, vector)
                for i in cutlass.range_constexpr(4):
                    acc[i] = values[i]
                self.epilogue.results.store(operands, shape, target, acc, extras)
            if not rehearsing:
                self.epilogue.release(memory, staged, lane)
                staged = memory.results.next(staged)


class RangeKernel:
    """The kernel of products by work ranges, as one :class:`.config.RangeConfig` compiles it. The configuration says
    whether assignments are sorted.

    | role | warps | waits | arrives |
    |---|---|---|---|
    | consumers | 4 a warpgroup | stage full; its warpgroup takes every ``k_warps``-th | stage empty, one lane a warp |
    | | | staging buffer empty | staging buffer full, one lane a warp |
    | loads of weights | 1 | stage empty: the 4 warps of the warpgroup that takes it | stage full, with its bytes |
    | epilogue | epilogue_warps | staging buffer full: all consumer warps | staging buffer empty, one lane a warp |

    There are three named barriers. Consumer warps meet at `MEETING` before an entry's limbs are overwritten, and after
    they are made. At `CONSUMERS`, consumer warps wait until the loading warp has initialised the mbarriers; at
    `EPILOGUE`, epilogue warps do. The loading warp arrives at both and does not wait. All warps wait for the previous
    launch if it may write ids or offsets. In any case, consumer warps wait for it before they load x, and epilogue
    warps before they store.
    """

    def __init__(self, config: RangeConfig):
        self.config = config
        routing = AssignedRouting if config.activations.lane_assignments else SortedRouting
        self.roles = RangeRoles(config, routing(config))

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs. ``given`` has the arguments `RANGES` or `ASSIGNED` of
        `cute_kernels.gemm.experts.arguments`."""
        routing = self.roles.routing
        sizes = {"grid": (given.num_ctas, 1, 1), "block": (self.config.num_threads, 1, 1), "min_blocks_per_mp": 1}
        self.kernel(routing.operands(given), routing.sizes(given)).launch(**sizes, use_pdl=True, stream=stream)

    @cute.kernel
    def kernel(self, operands, shape):
        self.roles.run(operands, shape)


def scale_offset(x_offset) -> Any:
    """Returns the offset in bytes of a k block's scales. x_offset: the offset in bytes of the k block's limbs."""
    return x_offset // (ROW_LIMB_BYTES // ROW_SCALE_BYTES)
