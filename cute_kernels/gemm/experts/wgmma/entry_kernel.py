"""Grouped weight-only GEMM for few rows an expert. Its results have the same bits as with tiles of decoded weights for
many rows.

The products are those of `cute_kernels.gemm.wgmma.register_mainloop`: one chain of k16 steps for each result. Only the
distribution of work differs. A work tile is 64 output features of one entry. Each of a CTA's two warpgroups has its own
work tiles, stages and producer warps. One warpgroup decodes while the other waits. If a launch has only one work tile
for each SM, neither warpgroup waits for the other. Entries are found among unsorted assignments
(:mod:`cute_kernels.gemm.experts.ranges.assignments`), so no launch sorts them.

Rows of an entry lie anywhere in x. A B operand consists of groups of eight rows of 128 bytes. The swizzle moves the
16-byte pieces of a row by the row's index in its group. The first row of a group has index 0 and is not swizzled, so a
bulk copy can load it. Each row of an entry is therefore the first row of a group. The group's seven other rows become
columns of the product that are never stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.wgmma import ATOM_BYTES
from cute_kernels.formats.code import load_code
from cute_kernels.gemm.device_operands import Operands, operands_of
from cute_kernels.gemm.experts.ranges.assignments import AssignedEntry, AssignmentFinder, expert_of, load_id
from cute_kernels.gemm.experts.ranges.config import ROW_BITS
from cute_kernels.gemm.experts.wgmma.entry_config import RINGS, ROW_COLUMNS, EntryConfig, entry_rows, ring_config
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.consumers import Consumers
from cute_kernels.gemm.wgmma.epilogue import GATED_PITCH, PACKED_PITCH, PACKED_VECTOR, ROW_BYTES, Store, TileEpilogue
from cute_kernels.gemm.wgmma.kernel import BEGIN, launch_options
from cute_kernels.gemm.wgmma.loads import ELEMENTS, TmaLoads, WeightLoads, product
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K
from cute_kernels.gemm.wgmma.memory import TileMemory, allocate, init_barriers
from cute_kernels.gemm.wgmma.places import corner_of
from cute_kernels.gemm.wgmma.reading import MainloopParts, StageReader
from cute_kernels.gemm.wgmma.tiles import TileSizes, dense_sizes
from layouts.weights.hopper import TILE_N


@dataclass(frozen=True)
class EntryTileSizes(TileSizes):
    """Sizes of a launch; run-time integers. ``m`` is the number of rows of x. No work tile is cut along K."""

    num_experts: Int32
    places: Int32  # assignments
    id_words: Int32  # of 32 bits, of an expert's id
    row_factor: Int32  # 2**ROW_BITS over the assignments of a row of x, rounded up
    tiles: Divisor  # of 64 output features of an expert
    waits: Int32  # whether ids may be of the kernel before this one

    def row(self, place) -> Any:
        """Returns the row of x of an assignment."""
        return (place * self.row_factor) >> ROW_BITS


@dataclass(frozen=True)
class EntryTile:
    """64 output features of an entry; run-time integers. block: the index of the block of features. The remaining
    fields are as in :class:`cute_kernels.gemm.wgmma.tiles.WorkTile`.
    """

    entry: AssignedEntry
    block: Int32
    begin: Int32  # k blocks
    end: Int32


@dataclass(frozen=True)
class EntryTileScheduler:
    """The work tiles of one warpgroup: every ``stride``-th work tile. The work tiles of one entry have consecutive
    indices.
    """

    shape: EntryTileSizes
    finder: AssignmentFinder
    first: Int32
    stride: Int32

    @property
    def count(self):
        return self.finder.total * self.shape.num_tiles

    def work_tile(self, index) -> EntryTile:
        """Returns the ``index``-th work tile; all lanes of a warp call this together."""
        number, block = self.shape.tiles.divide_int(index)
        return EntryTile(self.finder.find(number), block, Int32(0), self.shape.k_blocks)


class EntryPlaces:
    """Where an entry's weights are: see `cute_kernels.gemm.wgmma.places.Places`."""

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        return Int32(0), work_tile.entry.rows

    def weight_tile(self, shape, work_tile, index) -> Any:
        return work_tile.entry.expert * shape.num_tiles + work_tile.block

    def bias_place(self, shape, work_tile, row) -> Any:
        return work_tile.entry.expert * shape.n + row


class EntryLoads:
    """Loads an entry's rows, which may lie anywhere in x, through the pipeline: by bulk copies of one producer warp."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.entry_rows = config.tile_m // ROW_COLUMNS
        self.tma_tiles = config.block_k // TMA_TILE_K

    @cute.jit
    def copy(self, operands, shape, memory, scheduler, lane):
        """Loads the rows of every k block. First it waits for the previous launch, which may write these rows."""
        pipeline = memory.pipeline
        cute.arch.griddepcontrol_wait()
        here = pipeline.producer_state()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            rows = work_tile.entry.rows
            sources = self.sources(operands, shape, work_tile.entry, lane)
            for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
                pipeline.producer_acquire(here)
                with cute.arch.elect_one():
                    pipeline.producer_expect(here, rows * (self.tma_tiles * ROW_BYTES))
                    for row in cutlass.range_constexpr(self.entry_rows):
                        if row < rows:
                            self.copy_row(sources[row], memory, here, k_block, row)
                here = pipeline.next(here)

    def sources(self, operands, shape, entry, lane) -> list[Any]:
        """Returns an address for each row of x that an entry may have. For missing rows, it is the address of the
        entry's last row."""
        own = shape.row(entry.place(cutlass.min(lane, entry.rows - 1)))
        rows = [cute.arch.shuffle_sync(own, row) for row in range(self.entry_rows)]
        return [operands.x + product(row, shape.k) * 2 for row in rows]

    def copy_row(self, source, memory, here, k_block, row: int) -> None:
        """Starts loading a k block of a row, in one lane. If several lanes issued one copy each, it would take four
        times as long.
        """
        config = self.config
        target = memory.x_address + here.stage * config.x_stage_bytes + row * ATOM_BYTES
        source = source + Int64(k_block * (self.tma_tiles * ROW_BYTES))
        barrier = memory.pipeline.full_address(here)
        for tile in range(self.tma_tiles):
            place = target + tile * config.tma_tile_bytes
            ptx.bulk_copy_to_shared(place, source + tile * ROW_BYTES, Int32(ROW_BYTES), barrier)


class EntryResults:
    """A `TileReduction` that stores a work tile's results, each row at its assignment's row of the output.

    Results have x's dtype. A row of results is whole vectors of 16 bytes.
    """

    prepares = False

    def __init__(self, config: WgmmaConfig):
        self.config, self.places = config, EntryPlaces()
        self.epilogue = TileEpilogue(config, dense=False)

    def begin(self) -> None:
        """Does nothing: nothing is reduced."""

    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank) -> None:
        """Does nothing: no residual is loaded."""

    @cute.jit
    def finish(self, operands, shape, memory, store: Store, work_tile, acc, first_tile, k_rank):
        """Stages the first column of each row of the work tile, then stores it in the assignment's row of the output;
        see `TileReduction`.
        """
        corner = corner_of(self.config, self.places, shape, work_tile, 0)
        self.epilogue.add_bias(operands, shape, store, corner, acc, 0)
        self.epilogue.wait(store)
        if self.epilogue.activate.is_gated(shape):
            self.epilogue.stage_gated(store, acc, 0, self.config.tile_m)
            self.epilogue.wait(store)
            self.store_rows(operands, shape.n // 2, store, work_tile, TILE_N // 2, GATED_PITCH)
        else:
            if const_expr(self.epilogue.in_registers):
                self.epilogue.activate.features(shape, acc, 0, self.config.own_m // 2)
            self.epilogue.stage_packed(store, acc, 0, self.config.tile_m)
            self.epilogue.wait(store)
            self.store_rows(operands, shape.n, store, work_tile, TILE_N, PACKED_PITCH)

    @cute.jit
    def store_rows(self, operands, columns, store: Store, work_tile, features: int, pitch: int):
        """Copies an entry's results from the staging buffer to the output: ``features`` results of each row, 8
        neighbouring results a thread. In the buffer, a row of the entry takes `ROW_COLUMNS` columns; only the first of
        them has results.
        """
        vectors = features // PACKED_VECTOR
        row, vector = store.tid // vectors, store.tid % vectors
        column = work_tile.block * features + vector * PACKED_VECTOR
        if (row < work_tile.entry.rows) & (column < columns):
            words = ptx.load_shared_vector(store.staging + row * (ROW_COLUMNS * pitch) + vector * 16, 0, 4)
            place = Int64(work_tile.entry.place(row)) * columns + column
            ptx.store_global(operands.out + place * 2, words)


class EntryKernel:
    """The kernel of work tiles of one entry, as one :class:`.entry_config.EntryWgmma` compiles it.

    Each of two warpgroups has a ring of stages of its own, with these roles:

    | role | warps | waits | arrives |
    |---|---|---|---|
    | consumers | 4 | stage full: both loads, and all bytes | stage empty, one lane a warp |
    | loads of weights | 1 | stage empty: the 4 consumer warps | stage full, with the bytes of its copies |
    | loads of rows | 1 | end of the previous launch; stage empty | stage full, with the bytes of the entry's rows |

    All threads use the named barrier `BEGIN`. The warps that load weights arrive at `BEGIN` once they have initialised
    their ring's mbarriers; all other warps wait there. `TileEpilogue` has one more named barrier for each warpgroup.
    """

    def __init__(self, config: EntryConfig):
        self.config, self.ring = config, ring_config(config)
        places, stages = EntryPlaces(), StageReader(self.ring)
        mainloop = load_code(self.ring.mainloop.made_by)(self.ring, MainloopParts(stages, places, masks_by_lane=False))
        self.consumers = Consumers(self.ring, stages, places, mainloop, EntryResults(self.ring))
        self.weights = WeightLoads(self.ring, places, asks_first=False)
        self.rows = EntryLoads(self.ring)
        self.layout = TmaLoads(config, places).layout

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments `ENTRIES` of
        `cute_kernels.gemm.experts.arguments`."""
        sizes = dense_sizes(self.ring, given, whole=Int32(0), splits=Int32(1))
        shape = EntryTileSizes(
            *sizes,
            grid=None,
            num_experts=given.num_experts,
            places=given.count,
            id_words=given.id_words,
            row_factor=given.row_factor,
            tiles=Divisor.of(given.num_tiles),
            waits=given.waits,
        )
        operands = operands_of(Operands, given, residual=Int64(0), workspace=Int64(0))
        options = launch_options(self.config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands, shape, given.ids).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, ids):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = allocate(config, self.layout(), ELEMENTS[config.dtype], 0)
        if shape.waits != 0:
            cute.arch.griddepcontrol_wait()
        words = [
            load_id(ids, i * WARP_THREADS + lane, shape.places, shape.id_words)
            for i in range(config.mainloop.lane_assignments)
        ]
        self.begin(memory, warp, lane)  # while ids are on their way
        cute.arch.griddepcontrol_launch_dependents()
        experts = [expert_of(low, high, shape.num_experts) for low, high in words]
        finder = AssignmentFinder.of(experts, shape.num_experts, lane, entry_rows(config))
        self.take(operands, shape, memory, finder, cta, num_ctas, warp, lane)

    @cute.jit
    def begin(self, memory, warp, lane):
        """Initialises each ring's barriers, in the warp that loads the ring's weights. That warp waits for no other
        warp and loads at once. With few tokens a warpgroup has one work tile, so a late first load would make the
        launch longer.
        """
        config = self.config
        if (warp >= config.consumer_warps) & (warp % RINGS == 0):
            if lane == 0:
                init_barriers(self.ring, self.ring_of(memory, (warp - config.consumer_warps) // RINGS))
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=BEGIN, number_of_threads=config.num_threads)
        else:
            cute.arch.barrier(barrier_id=BEGIN, number_of_threads=config.num_threads)

    @cute.jit
    def take(self, operands, shape, memory, finder, cta, num_ctas, warp, lane):
        """Runs each warp's role. Of the warps of a ring, two load and four multiply."""
        config = self.config
        if warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(config.mainloop.producer_registers)
            number = (warp - config.consumer_warps) // RINGS
            ring = self.ring_of(memory, number)
            scheduler = EntryTileScheduler(shape, finder, cta + number * num_ctas, RINGS * num_ctas)
            if warp % RINGS == 0:
                self.weights.copy(operands, shape, ring, scheduler)
            else:
                self.rows.copy(operands, shape, ring, scheduler, lane)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            number = warp // WARPGROUP_WARPS
            ring = self.ring_of(memory, number)
            scheduler = EntryTileScheduler(shape, finder, cta + number * num_ctas, RINGS * num_ctas)
            place = replace(self.consumers.lane(shape, warp % WARPGROUP_WARPS, lane), warp=warp)
            self.consumers.multiply(operands, shape, ring, scheduler, place)

    def ring_of(self, memory: TileMemory, number) -> TileMemory:
        """Returns the memory of one warpgroup's stages."""
        first, config = number * self.ring.num_stages, self.ring
        return replace(
            memory,
            x_address=memory.x_address + first * config.x_stage_bytes,
            codes=memory.codes + first * config.code_stage_bytes,
            scales=memory.scales + first * config.scale_stage_bytes,
            zeros=memory.zeros + first * config.zero_stage_bytes,
            pipeline=memory.pipeline.shifted(first, config.num_stages),
        )
