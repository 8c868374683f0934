"""Weight-only GEMM for many rows of x: out^T = W X^T by warpgroup MMAs with W, decoded, in registers.

The blob holds each thread's A operands of several k16 steps in 16 bytes (`layouts.weights.hopper`), so decoded weights
go straight from a thread's registers to the tensor cores and only X is read from shared memory. One warp brings X as
the swizzled B operand through TMA, one the codes and scales by bulk copies, and the consumer warpgroups, 64 or 128
output features each, take turns: while one decodes the next steps into a second set of registers the tensor cores have
its own last group and the other's to do.

Scales meet the weights right after decoding, in the dtype of the activations: W is rounded once, as the reference
rounds it, and accumulators need no second set of registers. A scale per output feature meets the accumulators instead.

That operands in registers and two consumer warpgroups are the way to full rate with mixed operands is known from
CUTLASS's mixed-input mainloop for Hopper; here it needs neither its shuffles nor its pass over shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance, advance_by
from cute_kernels.linear.wgmma.cluster_reduction import ClusterReduction
from cute_kernels.linear.wgmma.config import (
    TMA_TILE_K,
    WARPGROUP_WARPS,
    WgmmaConfig,
)
from cute_kernels.linear.wgmma.copies import ELEMENTS, ProducerWarps
from cute_kernels.linear.wgmma.epilogue import Corner, Store, TileEpilogue
from cute_kernels.linear.wgmma.limbs import LimbMainloop
from cute_kernels.linear.wgmma.limbs_ahead import AheadMainloop
from cute_kernels.linear.wgmma.memory import Memory, allocate, init_barriers
from cute_kernels.linear.wgmma.reading import ConsumerWarps, Lane, make_decoder
from cute_kernels.linear.wgmma.synchronous import SynchronousMainloop
from cute_kernels.linear.wgmma.tiles import ClusterTileScheduler, Shape, TileGrid, TileScheduler
from cute_kernels.linear.work import Operands
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N

BEGIN = 8  # number of the barrier that others are there, behind those of `.epilogue`
FRAGMENT_BYTES = 16  # of a thread, in a tile
MMA_DTYPE = {"bf16": "bf16", "fp16": "f16"}


class WgmmaKernel(ProducerWarps, ConsumerWarps):
    """One compiled variant; :class:`WgmmaConfig` says which."""

    table_bytes = 0  # of shared memory for a table of tiles, which grouped products have
    use_pdl = False  # whether it may begin before the launch before it has ended

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.decoder = make_decoder(config)
        self.epilogue = TileEpilogue(config)
        self.mma_dtype = MMA_DTYPE[config.dtype]
        self.synchronous = SynchronousMainloop(self)
        self.limbs = (AheadMainloop if config.ahead else LimbMainloop)(self)
        self.cluster_reduction = ClusterReduction(config, self.epilogue, self.corner)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        zeros: Int64,
        bias: Int64,
        residual: Int64,
        out: Int64,
        workspace: Int64,
        n: Int32,
        num_tiles: Int32,
        k_blocks: Int32,
        whole: Int32,
        splits: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches ``num_ctas`` CTAs.

        x: [m, k], k a multiple of 8, 16-byte aligned. Addresses: codes uint8 [num_tiles, k blocks * unit_tiles, 2048],
        scales of x's dtype and zeros uint8 [num_tiles, groups, 64], bias [n] and residual as out, of x's dtype, or 0;
        out [m, n] (half of n for swiglu) of the kind ``out_kind``; workspace fp32 [tiles that are cut, splits - 1,
        block_rows * tokens], every word EMPTY before and after. k_blocks: padded K / unit_k; whole: tiles that are not
        cut, of CTAs that share activations by TMA multicast together one; splits: parts of the others, of K, none of
        them empty, or of rows of x, 1 unless the configuration cuts tiles. activation, out_kind: see
        `cute_kernels.linear.epilogue`.
        """
        copy_x, x_view = self.tma_tile_copy(x)
        shape = self.make_shape(*self.sizes(x, n, num_tiles, k_blocks, whole, splits, activation, out_kind))
        operands = Operands(self.x_address(x), codes, scales, zeros, bias, residual, out, workspace)
        if const_expr(self.config.bulk_stores):
            operands = self.epilogue.tma_store.operands(operands, shape.m, n)
        self.kernel(operands, shape, copy_x, x_view).launch(**self.launch_options(num_ctas, stream))

    def make_shape(self, *sizes) -> Shape:
        return Shape(*sizes)

    def x_address(self, x) -> Int64:
        """Of what warps load themselves: nothing of x, which comes by TMA."""
        return Int64(0)

    def launch_options(self, num_ctas, stream) -> dict[str, Any]:
        config = self.config
        cluster = (config.cluster_size, 1, 1) if config.cluster_size > 1 else None
        sizes = {"grid": (num_ctas, 1, 1), "block": (config.num_threads, 1, 1), "cluster": cluster}
        return sizes | {"min_blocks_per_mp": 1, "use_pdl": self.use_pdl, "stream": stream}

    def sizes(self, x, n, num_tiles, k_blocks, whole, splits, activation, out_kind) -> Any:
        """The fields of a `Shape`."""
        config = self.config
        m, k = x.shape
        scale_groups = k_blocks * config.block_k // config.group_size if config.group_size else Int32(1)
        split_k_blocks = (k_blocks + splits - 1) // splits
        grid = self.tile_grid(m, num_tiles, whole, splits)
        return m, n, k, num_tiles, k_blocks, scale_groups, whole, splits, split_k_blocks, activation, out_kind, grid

    def tile_grid(self, m, num_tiles, whole, splits) -> TileGrid | None:
        """How tiles are counted, where not by blocks of output features alone."""
        config = self.config
        if config.one_m_tile:
            return None
        blocks = cute.ceil_div(num_tiles, config.block_tiles * config.multicast)
        return TileGrid.of(blocks, cute.ceil_div(m, config.tile_m), whole, splits)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        scheduler = self.tile_scheduler(shape, cta, num_ctas)
        self.begin(operands, shape, memory, scheduler, warp, lane)
        self.take_roles(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)
        if const_expr(config.multicast > 1):
            self.leave_cluster(warp)

    @property
    def asks_first(self) -> bool:
        """Whether the warp that brings weights asks for the first ones before it tells anybody of barriers."""
        return self.config.one_m_tile

    @property
    def weight_warp(self) -> int:
        """The warp that brings weights."""
        return self.config.consumer_warps + 1

    @cute.jit
    def begin(self, operands, shape, memory, scheduler, warp, lane):
        """Makes the CTA's barriers; all know when they are there but the warp that makes them, which waits for nobody.

        It asks for weights at once: of a launch of 6 us, 1 us would be over until all have met and found their work
        tiles. The first ones, of tiles that push or have few rows in limbs, it asks for before anything else.
        CTAs of a cluster are to see nothing but barriers, which have a fence of their own. An arrival that releases all
        that was written waits for the memory of the GPU, 1.1 us before the first copy.
        """
        config = self.config
        if warp == self.weight_warp:
            if lane == 0:
                self.prefetch_k_blocks(operands, shape, scheduler)
                self.init_barriers(memory)
                if const_expr(self.asks_first):
                    self.copy_first_k_block(operands, shape, memory, scheduler)
            cute.arch.sync_warp()
        if const_expr(config.multicast > 1):
            cute.arch.cluster_arrive_relaxed()
            if warp != self.weight_warp:
                cute.arch.cluster_wait()  # before anybody copies into, or arrives at, memory of others
        else:
            if warp == self.weight_warp:
                cute.arch.barrier_arrive(barrier_id=BEGIN, number_of_threads=config.num_threads)
            else:
                cute.arch.barrier(barrier_id=BEGIN, number_of_threads=config.num_threads)
            if const_expr(config.dsmem_reduction):
                cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def leave_cluster(self, warp):
        """Waits until nobody arrives in this CTA's memory any more."""
        if warp == self.weight_warp:
            cute.arch.cluster_wait()  # for what all others waited for before they began
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def take_roles(self, operands, shape, memory, scheduler, copy_x, x_view, warp, lane):
        """Producer warps' machine code comes first: a launch waits for it, and it comes from memory, line by line."""
        config = self.config
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            self.copy_weights(operands, shape, memory, scheduler)
        elif warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.consumer_warps:
                self.copy_activations(shape, memory, scheduler, copy_x, x_view)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            self.multiply(operands, shape, memory, scheduler, warp, lane)

    def allocate(self) -> Memory:
        return allocate(self.config, self.x_layout(), ELEMENTS[self.config.dtype], self.table_bytes)

    def init_barriers(self, memory: Memory) -> None:
        init_barriers(self.config, memory)

    def tile_scheduler(self, shape: Shape, cta, num_ctas) -> TileScheduler | ClusterTileScheduler:
        config, rank = self.config, 0
        if const_expr(config.cluster > 1):
            return ClusterTileScheduler(shape, cta, config.cluster)
        if const_expr(config.multicast > 1):
            bits = config.multicast.bit_length() - 1
            cta, rank, num_ctas = cta >> bits, cta & (config.multicast - 1), num_ctas >> bits
        cuts = config.splits_k or config.cuts_rows
        return TileScheduler(shape, cta, num_ctas, config.multicast, rank, cuts, config.cuts_rows)

    # -- products -----------------------------------------------------------------------------------------------------

    def lane_places(self, shape, warp, lane) -> Lane:
        config = self.config
        group, row_warp = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        first_tile = self.first_tile(group)
        return Lane(
            code_offset=first_tile * (config.k_block_tiles * TILE_BYTES)
            + row_warp * (WARP_THREADS * FRAGMENT_BYTES)
            + lane * FRAGMENT_BYTES,
            row=first_tile * TILE_N + row_warp * 16 + lane // 4,
            masks=(
                self.limbs.masks(Uint32(shape.m >> 31))
                if config.limbs
                else self.decoder.masks(self.nothing(shape, lane))
            ),
            k_rank=self.k_rank(group),
        )

    def first_tile(self, group):
        """The first tile of a warpgroup, among the block's."""
        if self.config.k_warpgroups > 1:
            group = group % (self.config.warpgroups // self.config.k_warpgroups)
        return group * self.config.n_tiles

    def k_rank(self, group):
        """Whose turn of k blocks is a warpgroup's."""
        if self.config.k_warpgroups == 1:
            return Int32(0)
        return Int32(group // (self.config.warpgroups // self.config.k_warpgroups))

    def next_stage(self, stage, phase):
        """The stage of a warpgroup's next k block, and the parity of its barrier."""
        config = self.config
        if config.k_warpgroups == 1:
            return advance(stage, phase, config.num_stages)
        return advance_by(config.k_warpgroups, stage, phase, config.num_stages)

    def nothing(self, shape, lane):
        """0 that the compiler does not know, and takes for different in each lane.

        A mask made of what all lanes share may be kept in a uniform register, which LOP3 cannot read beside a constant:
        each would be a copy and a LOP3.
        """
        return Uint32((shape.m + lane) >> 31)

    @cute.jit
    def multiply(self, operands, shape, memory, scheduler, warp, lane):
        """A consumer warp: the products of its work tiles, then their results."""
        config = self.config
        place = self.lane_places(shape, warp, lane)
        group = warp // WARPGROUP_WARPS
        store = Store(
            staging=memory.staging + group * config.staging_bytes,
            warpgroup=group,
            tid=warp % WARPGROUP_WARPS * WARP_THREADS + lane,
            row_warp=warp % WARPGROUP_WARPS,
            lane=lane,
        )
        teller = lane == 0  # that a stage is free
        if const_expr(config.multicast > 1):
            teller = lane < config.multicast  # each tells one of the CTAs that fill it
        stage, phase, last = self.k_rank(group), Int32(0), Int32(0)
        tile_acc = config.tile_m // 2
        acc = cute.make_rmem_tensor(config.thread_acc, Float32)
        if const_expr(config.dsmem_reduction):
            # Before anything is sent all CTAs of the cluster have their barriers. There is nothing else to do yet.
            cute.arch.cluster_wait()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            first_tile = self.first_tile(group)
            acc.fill(0.0)
            channel = self.load_channel(operands, shape, work_tile, first_tile, place)
            state = (stage, phase, last)
            stage, phase, last = self.multiply_work_tile(acc, memory, shape, work_tile, place, channel, state, teller)
            if const_expr(config.synchronous or config.limbs):
                self.scale_acc(acc, [acc[i] for i in range(config.thread_acc)], channel)
            else:
                finished = wgmma.wait_all([acc[i] for i in range(config.thread_acc)])
                self.release(memory, last, teller & (work_tile.begin + place.k_rank < work_tile.end))
                self.scale_acc(acc, finished, channel)
            if const_expr(config.partial_slots > 0):
                self.cluster_reduction.finish(
                    operands, shape, memory, store, work_tile, acc, first_tile, self.k_rank(group)
                )
            elif const_expr(config.cluster > 1):
                self.epilogue.join(store, memory.x_address, work_tile.split, acc)
                corner = self.corner(shape, work_tile, first_tile, work_tile.split * config.own_m)
                self.epilogue.run(operands, shape, store, corner, acc, 0)
                cute.arch.cluster_wait()  # until nobody reads this CTA's accumulators any more
            else:
                if const_expr(config.splits_k):
                    self.epilogue.combine(operands, store, work_tile, acc)
                if (work_tile.split == work_tile.splits - 1) | const_expr(config.cuts_rows):
                    for i in cutlass.range_constexpr(config.n_tiles):
                        corner = self.corner(shape, work_tile, first_tile + i)
                        self.epilogue.run(operands, shape, store, corner, acc, i * tile_acc)
        if const_expr(config.bulk_stores):
            self.epilogue.tma_store.finish()

    def corner(self, shape, work_tile, index, token=0) -> Corner:
        """Where the ``index``-th tile of a work tile's block belongs in the output, from its ``token``-th row of x
        on."""
        row = (work_tile.block * self.config.block_tiles + index) * TILE_N
        first, end = self.rows_of(shape, work_tile)
        return Corner(row, first + token, end, self.bias_place(shape, work_tile, row))

    def bias_place(self, shape, work_tile, row):
        """The bias of a work tile's output feature ``row``."""
        return row

    @cute.jit
    def multiply_work_tile(self, acc, memory, shape, work_tile, place: Lane, channel, state, teller):
        """Adds the products of a work tile; pipeline and result: (stage, phase, the stage before).

        MMAs are as wide as the parts that have rows: the same loop for each number of them, or for most of them, no
        further registers. What lies where no part was brought are columns that nobody stores.
        """
        return self.multiply_parts(
            acc, memory, work_tile, place, channel, state, teller, self.parts_of(shape, work_tile), 1
        )

    @cute.jit
    def multiply_parts(self, acc, memory, work_tile, place: Lane, channel, state, teller, present, count: int):
        """As :meth:`multiply_work_tile`, of a tile of which ``present`` parts have rows, at least ``count``."""
        stage, phase, last = state
        tile_m = count * self.config.part_m
        if const_expr(count not in self.config.loop_parts):
            stage, phase, last = self.multiply_parts(
                acc, memory, work_tile, place, channel, state, teller, present, count + 1
            )
        elif const_expr(count == self.config.row_parts):
            stage, phase, last = self.multiply_k_blocks(acc, memory, work_tile, place, channel, state, teller, tile_m)
        else:
            if self.in_loop_of(present, count):
                stage, phase, last = self.multiply_k_blocks(
                    acc, memory, work_tile, place, channel, state, teller, tile_m
                )
            else:
                stage, phase, last = self.multiply_parts(
                    acc, memory, work_tile, place, channel, state, teller, present, count + 1
                )
        return stage, phase, last

    def in_loop_of(self, present, count: int):
        """Whether ``present`` parts, too many for any loop of fewer, are multiplied by the loop of ``count``."""
        every = len(self.config.loop_parts) == self.config.row_parts
        return present == count if every else present <= count

    @cute.jit
    def multiply_k_blocks(self, acc, memory, work_tile, place: Lane, channel, state, teller, tile_m: int):
        """As :meth:`multiply_work_tile`, of the first ``tile_m`` tokens of the tile."""
        if const_expr(self.config.synchronous):
            stage, phase, last = self.synchronous.multiply(
                acc, memory, work_tile, place, channel, state, teller, tile_m
            )
        elif const_expr(self.config.limbs):
            stage, phase, last = self.limbs.multiply(acc, memory, work_tile, place, state, teller, tile_m)
        else:
            stage, phase, last = self.multiply_each(acc, memory, work_tile, place, channel, state, teller, tile_m)
        return stage, phase, last

    @cute.jit
    def multiply_each(self, acc, memory, work_tile, place: Lane, channel, state, teller, tile_m: int):
        """As :meth:`multiply_k_blocks`, by MMAs of the warpgroup."""
        stage, phase, last = state
        begin = work_tile.begin + place.k_rank
        for k_block in cutlass.range(begin, work_tile.end, self.config.k_warpgroups, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_k_block(acc, memory, stage, place, channel, last, teller & (k_block > begin), tile_m)
            last = stage
            stage, phase = self.next_stage(stage, phase)
        return stage, phase, last

    def scale_acc(self, acc, finished, channel):
        """Keeps the finished accumulators, times the scales of their rows where those hold for all of K."""
        tile_acc = self.config.tile_m // 2
        for i, value in enumerate(finished):
            if channel:
                value = value * channel[i // tile_acc][0][i // 2 % 2]
            acc[i] = value * self.decoder.unit if self.decoder.scales_weights else value

    def multiply_k_block(self, acc, memory, stage, place: Lane, channel, last, teller, tile_m: int):
        """Adds W X^T of a k block to ``acc``, whose last MMAs it leaves running; gives back the stage before.

        accumulators: [tile of the warpgroup][tokens / 2]. last: the stage before; teller: whether this lane gives it
            back.
        """
        config = self.config
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = self.load_codes(codes)
        groups = [self.load_groups(memory, stage, place, i) for i in range(config.n_tiles)]
        x = wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * config.x_stage_bytes)
        tile_acc = config.tile_m // 2
        totals = [[acc[i * tile_acc + j] for j in range(tile_m // 2)] for i in range(config.n_tiles)]
        for part in range(config.k_block_steps // config.group_steps):
            steps = range(part * config.group_steps, (part + 1) * config.group_steps)
            operands = [
                self.fragment(words[i], step, groups[i] or channel[i : i + 1], place.masks)
                for step in steps
                for i in range(config.n_tiles)
            ]
            ready = wgmma.fence([register for fragment in operands for register in fragment])
            for number, step in enumerate(steps):
                tma_tile, offset = divmod(step * STEP_K, TMA_TILE_K)
                b = wgmma.advanced(x, tma_tile * config.tma_tile_bytes + offset * 2)
                for i in range(config.n_tiles):
                    first = 4 * (number * config.n_tiles + i)
                    a = ready[first : first + 4]
                    totals[i] = wgmma.mma(totals[i], a, b, dtype=self.mma_dtype)
            wgmma.commit()
            # The oldest group is done: its operands' registers are free for the next one's.
            wgmma.wait(config.in_flight)
            if part == config.in_flight - 1:
                self.release(memory, last, teller)
        for i in range(config.n_tiles):
            for j in range(tile_m // 2):
                acc[i * tile_acc + j] = totals[i][j]

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """The A operand of a k16 step of the k block: weights, rounded once; without groups, codes less zero points."""
        config, decoder = self.config, self.decoder
        scales, rows = groups[step * STEP_K // config.group_size if config.group_size else 0]
        registers = decoder.fragment(words[step // decoder.steps], step % decoder.steps, rows, masks)
        if decoder.scales_weights or not config.group_size:
            return registers
        multiply = ptx.mul_bf16x2 if config.dtype == "bf16" else ptx.mul_f16x2
        return [multiply(register, scales[i % 2]) for i, register in enumerate(registers)]

    def load_channel(self, operands, shape, work_tile, first_tile, place: Lane) -> list[Any]:
        """[tile] (scales, offsets) of the thread's two rows where they hold for all of K; else nothing."""
        config, decoder = self.config, self.decoder
        channel = []
        if not config.group_size:
            for i in range(config.n_tiles):
                tile = self.weight_tile(shape, work_tile, first_tile + i)
                row = Int64(tile) * TILE_N + place.row % TILE_N
                words = [numbers.load_global_part(operands.scales + row * 2, 16 * half, 2) for half in range(2)]
                points = [decoder.symmetric_zero] * 2
                if config.zero_point:
                    points = [numbers.load_global_part(operands.zeros + row, 8 * half, 1) for half in range(2)]
                channel.append(([self.to_float(word) for word in words], decoder.row_numbers(None, points)))
        return channel
