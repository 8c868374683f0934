"""Weight-only GEMM for many rows of x: out^T = W X^T by warpgroup MMAs with W, decoded, in registers.

The blob holds each thread's A operands of several k16 steps in 16 bytes (`layouts.weights.hopper`), so decoded weights
go straight from a thread's registers to the tensor cores and only X is read from shared memory. One warp brings X as
the swizzled B operand through TMA, one the codes and scales by bulk copies, and the multiplying warpgroups, 64 or 128
output features each, take turns: while one decodes the next steps into a second set of registers the tensor cores have
its own last group and the other's to do.

Scales meet the weights right after decoding, in the dtype of the activations: W is rounded once, as the reference
rounds it, and sums need no second set of registers. A scale per output feature meets the sums instead.

That operands in registers and two multiplying warpgroups are the way to full rate with mixed operands is known from
CUTLASS's mixed-input mainloop for Hopper; here it needs neither its shuffles nor its pass over shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance, advance_by
from cute_kernels.linear.wgmma.cluster_parts import ClusterParts
from cute_kernels.linear.wgmma.config import (
    BOX_K,
    WARPGROUP_WARPS,
    WgmmaConfig,
)
from cute_kernels.linear.wgmma.copies import ELEMENTS, CopyingWarps
from cute_kernels.linear.wgmma.digits import DigitUnits
from cute_kernels.linear.wgmma.digits_ahead import AheadUnits
from cute_kernels.linear.wgmma.epilogue import Corner, Store, TileEpilogue
from cute_kernels.linear.wgmma.memory import Memory, allocate, init_barriers
from cute_kernels.linear.wgmma.reading import Lane, ReadingWarps, make_decoder
from cute_kernels.linear.wgmma.synchronous import SynchronousUnits
from cute_kernels.linear.wgmma.tiles import ClusterItems, Items, Shape, TileGrid
from cute_kernels.linear.work import Operands
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N

BEGIN = 8  # number of the barrier that others are there, behind those of `.epilogue`
FRAGMENT_BYTES = 16  # of a thread, in a tile
MMA_DTYPE = {"bf16": "bf16", "fp16": "f16"}


class WgmmaKernel(CopyingWarps, ReadingWarps):
    """One compiled variant; :class:`WgmmaConfig` says which."""

    table_bytes = 0  # of shared memory for a table of tiles, which grouped products have
    use_pdl = False  # whether it may begin before the launch before it has ended

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.decoder = make_decoder(config)
        self.epilogue = TileEpilogue(config)
        self.mma_dtype = MMA_DTYPE[config.dtype]
        self.synchronous = SynchronousUnits(self)
        self.digits = (AheadUnits if config.ahead else DigitUnits)(self)
        self.cluster_parts = ClusterParts(config, self.epilogue, self.corner)

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
        units: Int32,
        whole: Int32,
        splits: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches ``num_ctas`` CTAs.

        x: [m, k], k a multiple of 8, 16-byte aligned. Addresses: codes uint8 [num_tiles, units * unit_tiles, 2048],
        scales of x's dtype and zeros uint8 [num_tiles, groups, 64], bias [n] and residual as out, of x's dtype, or 0;
        out [m, n] (half of n for swiglu) of the kind ``out_kind``; workspace fp32 [tiles that are cut, splits - 1,
        block_rows * tokens], every word EMPTY before and after. units: padded K / unit_k; whole: tiles that are not
        cut, of CTAs that share activations together one; splits: parts of the others, of K, none of them empty, or of
        rows of x, 1 unless the configuration cuts tiles. activation, out_kind: see `cute_kernels.linear.epilogue`.
        """
        copy_x, x_view = self.box_copy(x)
        shape = self.make_shape(*self.sizes(x, n, num_tiles, units, whole, splits, activation, out_kind))
        operands = Operands(self.x_address(x), codes, scales, zeros, bias, residual, out, workspace)
        if const_expr(self.config.bulk_stores):
            operands = self.epilogue.boxes.operands(operands, shape.m, n)
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

    def sizes(self, x, n, num_tiles, units, whole, splits, activation, out_kind) -> Any:
        """The fields of a `Shape`."""
        config = self.config
        m, k = x.shape
        scale_groups = units * config.unit_k // config.group_size if config.group_size else Int32(1)
        split_units = (units + splits - 1) // splits
        grid = self.tile_grid(m, num_tiles, whole, splits)
        return m, n, k, num_tiles, units, scale_groups, whole, splits, split_units, activation, out_kind, grid

    def tile_grid(self, m, num_tiles, whole, splits) -> TileGrid | None:
        """How tiles are counted, where not by blocks of output features alone."""
        config = self.config
        if config.one_token_tile:
            return None
        blocks = cute.ceil_div(num_tiles, config.block_tiles * config.sharing)
        return TileGrid.of(blocks, cute.ceil_div(m, config.tokens), whole, splits)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        items = self.items_of(shape, cta, num_ctas)
        self.begin(operands, shape, memory, items, warp, lane)
        self.take_roles(operands, shape, memory, items, copy_x, x_view, warp, lane)
        if const_expr(config.sharing > 1):
            self.leave_cluster(warp)

    @property
    def asks_first(self) -> bool:
        """Whether the warp that brings weights asks for the first ones before it tells anybody of barriers."""
        return self.config.one_token_tile

    @property
    def weight_warp(self) -> int:
        """The warp that brings weights."""
        return self.config.math_warps + 1

    @cute.jit
    def begin(self, operands, shape, memory, items, warp, lane):
        """Makes the CTA's barriers; all know when they are there but the warp that makes them, which waits for nobody.

        It asks for weights at once: of a launch of 6 us, 1 us would be over until all have met and found their items.
        The first ones, of tiles that push or have few rows in digits, it asks for before anything else.
        CTAs of a cluster are to see nothing but barriers, which have a fence of their own. An arrival that releases all
        that was written waits for the memory of the GPU, 1.1 us before the first copy.
        """
        config = self.config
        if warp == self.weight_warp:
            if lane == 0:
                self.prefetch_units(operands, shape, items)
                self.init_barriers(memory)
                if const_expr(self.asks_first):
                    self.copy_first_unit(operands, shape, memory, items)
            cute.arch.sync_warp()
        if const_expr(config.sharing > 1):
            cute.arch.cluster_arrive_relaxed()
            if warp != self.weight_warp:
                cute.arch.cluster_wait()  # before anybody copies into, or arrives at, memory of others
        else:
            if warp == self.weight_warp:
                cute.arch.barrier_arrive(barrier_id=BEGIN, number_of_threads=config.num_threads)
            else:
                cute.arch.barrier(barrier_id=BEGIN, number_of_threads=config.num_threads)
            if const_expr(config.pushes):
                cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def leave_cluster(self, warp):
        """Waits until nobody arrives in this CTA's memory any more."""
        if warp == self.weight_warp:
            cute.arch.cluster_wait()  # for what all others waited for before they began
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def take_roles(self, operands, shape, memory, items, copy_x, x_view, warp, lane):
        """Copying warps' machine code comes first: a launch waits for it, and it comes from memory, line by line."""
        config = self.config
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(config.copy_registers)
            self.copy_weights(operands, shape, memory, items)
        elif warp >= config.math_warps:
            cute.arch.setmaxregister_decrease(config.copy_registers)
            if warp == config.math_warps:
                self.copy_activations(shape, memory, items, copy_x, x_view)
        else:
            cute.arch.setmaxregister_increase(config.math_registers)
            self.multiply(operands, shape, memory, items, warp, lane)

    def allocate(self) -> Memory:
        return allocate(self.config, self.x_layout(), ELEMENTS[self.config.dtype], self.table_bytes)

    def init_barriers(self, memory: Memory) -> None:
        init_barriers(self.config, memory)

    def items_of(self, shape: Shape, cta, num_ctas) -> Items | ClusterItems:
        config, rank = self.config, 0
        if const_expr(config.cluster > 1):
            return ClusterItems(shape, cta, config.cluster)
        if const_expr(config.sharing > 1):
            bits = config.sharing.bit_length() - 1
            cta, rank, num_ctas = cta >> bits, cta & (config.sharing - 1), num_ctas >> bits
        cuts = config.splits_k or config.cuts_rows
        return Items(shape, cta, num_ctas, config.sharing, rank, cuts, config.cuts_rows)

    # -- products -----------------------------------------------------------------------------------------------------

    def lane_places(self, shape, warp, lane) -> Lane:
        config = self.config
        group, row_warp = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        first_tile = self.first_tile(group)
        return Lane(
            code_offset=first_tile * (config.unit_tiles * TILE_BYTES)
            + row_warp * (WARP_THREADS * FRAGMENT_BYTES)
            + lane * FRAGMENT_BYTES,
            row=first_tile * TILE_N + row_warp * 16 + lane // 4,
            masks=(
                self.digits.masks(Uint32(shape.m >> 31))
                if config.digits
                else self.decoder.masks(self.nothing(shape, lane))
            ),
            turn=self.turn(group),
        )

    def first_tile(self, group):
        """The first tile of a warpgroup, among the block's."""
        if self.config.turns > 1:
            group = group % (self.config.warpgroups // self.config.turns)
        return group * self.config.m_tiles

    def turn(self, group):
        """Whose turn of units is a warpgroup's."""
        if self.config.turns == 1:
            return Int32(0)
        return Int32(group // (self.config.warpgroups // self.config.turns))

    def next_stage(self, stage, phase):
        """The stage of a warpgroup's next unit, and the parity of its barrier."""
        config = self.config
        if config.turns == 1:
            return advance(stage, phase, config.num_stages)
        return advance_by(config.turns, stage, phase, config.num_stages)

    def nothing(self, shape, lane):
        """0 that the compiler does not know, and takes for different in each lane.

        A mask made of what all lanes share may be kept in a uniform register, which LOP3 cannot read beside a constant:
        each would be a copy and a LOP3.
        """
        return Uint32((shape.m + lane) >> 31)

    @cute.jit
    def multiply(self, operands, shape, memory, items, warp, lane):
        """A multiplying warp: the products of its items, then their results."""
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
        if const_expr(config.sharing > 1):
            teller = lane < config.sharing  # each tells one of the CTAs that fill it
        stage, phase, last = self.turn(group), Int32(0), Int32(0)
        tile_sums = config.tokens // 2
        sums = cute.make_rmem_tensor(config.thread_sums, Float32)
        if const_expr(config.pushes):
            # Before anything is sent all CTAs of the cluster have their barriers. There is nothing else to do yet.
            cute.arch.cluster_wait()
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            first_tile = self.first_tile(group)
            sums.fill(0.0)
            channel = self.load_channel(operands, shape, item, first_tile, place)
            ring = (stage, phase, last)
            stage, phase, last = self.multiply_item(sums, memory, shape, item, place, channel, ring, teller)
            if const_expr(config.synchronous or config.digits):
                self.put_sums(sums, [sums[i] for i in range(config.thread_sums)], channel)
            else:
                finished = wgmma.wait_all([sums[i] for i in range(config.thread_sums)])
                self.release(memory, last, teller & (item.begin + place.turn < item.end))
                self.put_sums(sums, finished, channel)
            if const_expr(config.part_slots > 0):
                self.cluster_parts.finish(operands, shape, memory, store, item, sums, first_tile, self.turn(group))
            elif const_expr(config.cluster > 1):
                self.epilogue.join(store, memory.x_address, item.split, sums)
                corner = self.corner(shape, item, first_tile, item.split * config.own_tokens)
                self.epilogue.run(operands, shape, store, corner, sums, 0)
                cute.arch.cluster_wait()  # until nobody reads this CTA's sums any more
            else:
                if const_expr(config.splits_k):
                    self.epilogue.combine(operands, store, item, sums)
                if (item.split == item.splits - 1) | const_expr(config.cuts_rows):
                    for i in cutlass.range_constexpr(config.m_tiles):
                        corner = self.corner(shape, item, first_tile + i)
                        self.epilogue.run(operands, shape, store, corner, sums, i * tile_sums)
        if const_expr(config.bulk_stores):
            self.epilogue.boxes.finish()

    def corner(self, shape, item, index, token=0) -> Corner:
        """Where the ``index``-th tile of an item's block belongs in the output, from its ``token``-th row of x on."""
        row = (item.block * self.config.block_tiles + index) * TILE_N
        first, end = self.rows_of(shape, item)
        return Corner(row, first + token, end, self.bias_place(shape, item, row))

    def bias_place(self, shape, item, row):
        """The bias of an item's output feature ``row``."""
        return row

    @cute.jit
    def multiply_item(self, sums, memory, shape, item, place: Lane, channel, ring, teller):
        """Adds the products of an item; ring and result: (stage, phase, the stage before).

        MMAs are as wide as the parts that have rows: the same loop for each number of them, or for most of them, no
        further registers. What lies where no part was brought are columns that nobody stores.
        """
        return self.multiply_parts(sums, memory, item, place, channel, ring, teller, self.parts_of(shape, item), 1)

    @cute.jit
    def multiply_parts(self, sums, memory, item, place: Lane, channel, ring, teller, present, count: int):
        """As :meth:`multiply_item`, of a tile of which ``present`` parts have rows, at least ``count``."""
        stage, phase, last = ring
        tokens = count * self.config.part_tokens
        if const_expr(count not in self.config.loop_parts):
            stage, phase, last = self.multiply_parts(
                sums, memory, item, place, channel, ring, teller, present, count + 1
            )
        elif const_expr(count == self.config.row_parts):
            stage, phase, last = self.multiply_units(sums, memory, item, place, channel, ring, teller, tokens)
        else:
            if self.in_loop_of(present, count):
                stage, phase, last = self.multiply_units(sums, memory, item, place, channel, ring, teller, tokens)
            else:
                stage, phase, last = self.multiply_parts(
                    sums, memory, item, place, channel, ring, teller, present, count + 1
                )
        return stage, phase, last

    def in_loop_of(self, present, count: int):
        """Whether ``present`` parts, too many for any loop of fewer, are multiplied by the loop of ``count``."""
        every = len(self.config.loop_parts) == self.config.row_parts
        return present == count if every else present <= count

    @cute.jit
    def multiply_units(self, sums, memory, item, place: Lane, channel, ring, teller, tokens: int):
        """As :meth:`multiply_item`, of the first ``tokens`` tokens of the tile."""
        if const_expr(self.config.synchronous):
            stage, phase, last = self.synchronous.multiply(sums, memory, item, place, channel, ring, teller, tokens)
        elif const_expr(self.config.digits):
            stage, phase, last = self.digits.multiply(sums, memory, item, place, ring, teller, tokens)
        else:
            stage, phase, last = self.multiply_each(sums, memory, item, place, channel, ring, teller, tokens)
        return stage, phase, last

    @cute.jit
    def multiply_each(self, sums, memory, item, place: Lane, channel, ring, teller, tokens: int):
        """As :meth:`multiply_units`, by MMAs of the warpgroup."""
        stage, phase, last = ring
        begin = item.begin + place.turn
        for unit in cutlass.range(begin, item.end, self.config.turns, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_unit(sums, memory, stage, place, channel, last, teller & (unit > begin), tokens)
            last = stage
            stage, phase = self.next_stage(stage, phase)
        return stage, phase, last

    def put_sums(self, sums, finished, channel):
        """Keeps the finished sums, times the scales of their rows where those hold for all of K."""
        tile_sums = self.config.tokens // 2
        for i, value in enumerate(finished):
            if channel:
                value = value * channel[i // tile_sums][0][i // 2 % 2]
            sums[i] = value * self.decoder.unit if self.decoder.scales_weights else value

    def multiply_unit(self, sums, memory, stage, place: Lane, channel, last, teller, tokens: int):
        """Adds W X^T of a unit to ``sums``, whose last MMAs it leaves running; gives back the stage before.

        sums: [tile of the warpgroup][tokens / 2]. last: the stage before; teller: whether this lane gives it back.
        """
        config = self.config
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = self.load_codes(codes)
        groups = [self.load_groups(memory, stage, place, i) for i in range(config.m_tiles)]
        x = wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * config.x_stage_bytes)
        tile_sums = config.tokens // 2
        totals = [[sums[i * tile_sums + j] for j in range(tokens // 2)] for i in range(config.m_tiles)]
        for part in range(config.unit_steps // config.group_steps):
            steps = range(part * config.group_steps, (part + 1) * config.group_steps)
            operands = [
                self.fragment(words[i], step, groups[i] or channel[i : i + 1], place.masks)
                for step in steps
                for i in range(config.m_tiles)
            ]
            ready = wgmma.fence([register for fragment in operands for register in fragment])
            for number, step in enumerate(steps):
                box, offset = divmod(step * STEP_K, BOX_K)
                b = wgmma.advanced(x, box * config.box_bytes + offset * 2)
                for i in range(config.m_tiles):
                    first = 4 * (number * config.m_tiles + i)
                    a = ready[first : first + 4]
                    totals[i] = wgmma.mma(totals[i], a, b, dtype=self.mma_dtype)
            wgmma.commit()
            # The oldest group is done: its operands' registers are free for the next one's.
            wgmma.wait(config.in_flight)
            if part == config.in_flight - 1:
                self.release(memory, last, teller)
        for i in range(config.m_tiles):
            for j in range(tokens // 2):
                sums[i * tile_sums + j] = totals[i][j]

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """The A operand of a k16 step of the unit: weights, rounded once; without groups, codes less zero points."""
        config, decoder = self.config, self.decoder
        scales, rows = groups[step * STEP_K // config.group_size if config.group_size else 0]
        registers = decoder.fragment(words[step // decoder.steps], step % decoder.steps, rows, masks)
        if decoder.scales_weights or not config.group_size:
            return registers
        multiply = ptx.mul_bf16x2 if config.dtype == "bf16" else ptx.mul_f16x2
        return [multiply(register, scales[i % 2]) for i, register in enumerate(registers)]

    def load_channel(self, operands, shape, item, first_tile, place: Lane) -> list[Any]:
        """[tile] (scales, offsets) of the thread's two rows where they hold for all of K; else nothing."""
        config, decoder = self.config, self.decoder
        channel = []
        if not config.group_size:
            for i in range(config.m_tiles):
                tile = self.weight_tile(shape, item, first_tile + i)
                row = Int64(tile) * TILE_N + place.row % TILE_N
                words = [numbers.load_global_part(operands.scales + row * 2, 16 * half, 2) for half in range(2)]
                points = [decoder.symmetric_zero] * 2
                if config.zero_point:
                    points = [numbers.load_global_part(operands.zeros + row, 8 * half, 1) for half in range(2)]
                channel.append(([self.to_float(word) for word in words], decoder.row_numbers(None, points)))
        return channel
