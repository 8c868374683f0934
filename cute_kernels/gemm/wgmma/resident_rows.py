"""Device code by which consumer warps make limbs of rows of x in shared memory, where their MMAs read the limbs.

Each CTA makes the limbs of its part of x. They have the same bits as the limbs that :mod:`.limb_rows` stores in global
memory. TMA loads x, a k block at a time, to the addresses where its limbs will lie: 128 inputs of a row take as many
bytes as 128 high limbs and 128 low limbs. With few rows, warps load x themselves, as TMA takes long to write zeros for
missing rows.

Four lanes make the limbs of 128 inputs of a row; each lane has two blocks of 16 inputs. So no limb moves to another
lane. The high limbs of a block are one vector, its low limbs another. Magnitudes are compared in packed pairs.

A k block's limbs are one operand of `wgmma.multiply_bytes`, in rows of 128 bytes: the high limbs of all tokens, then
the low ones. Pieces of 16 bytes lie in the order of the 128-byte swizzle.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pipeline import Barrier, fence_init
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.wgmma.config import ResidentConfig
from cute_kernels.gemm.wgmma.limb_rows import CODE_UNIT_BITS, E4M3_ROUND_UP, E4M3_TOP_EXPONENT, MAGIC, RowLimbs
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, ROW_LIMB_BYTES, TMA_TILE_K, row_columns
from cute_kernels.gemm.wgmma.reading import Lane
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP

GROUP_LANES = 4  # lanes that share 128 inputs of a row
STEP_ROWS = 2  # rows that a warp converts at a time
STEP_K_BLOCKS = WARP_THREADS // GROUP_LANES // STEP_ROWS  # and groups of 128 inputs of each of these rows
BLOCK = 16  # inputs whose limbs are 16 bytes
LANE_BLOCKS = LIMB_GROUP // BLOCK // GROUP_LANES
BLOCK_PIECES = 2  # pieces of 16 bytes of x for these inputs
PIECE_BYTES = 16
PIECE_INPUTS = PIECE_BYTES // 2
PIECE_BITS = PIECE_INPUTS.bit_length() - 1
GROUP_PIECES = LIMB_GROUP // PIECE_INPUTS
STEP_WORDS = LANE_BLOCKS * BLOCK_PIECES * PIECE_BYTES // 4
K_BLOCK_TMA_TILES = LIMB_GROUP // TMA_TILE_K
COLUMN_DISTANCE = 4  # between the columns of a row of x that has two
CHUNK_BARRIER = 14  # number of the consumer warps' barrier between chunks of K
ROW_BYTES = LIMB_GROUP  # bytes of a row of limbs; also of a row of x, half of a group
MAGNITUDES = 0x7FFF7FFF
# Added before the limbs are separated: the high limb is rounded, and the low limb's sign bit comes out inverted.
HALF = 128
SIGNS = 0x80808080
E4M3_UPPER = 0xFFF00000  # sign, exponent and the first three mantissa bits of an fp32 number


@dataclass(frozen=True)
class Source:
    """The source of x: its address and its size."""

    address: Int64
    rows: Int32
    row_pieces: Int32  # of 16 bytes

    def row(self, row: Int32) -> Int32:
        """Returns the row of x whose limbs become row ``row`` of the tile. Here it is ``row`` itself; sources that
        gather rows override this method.
        """
        return row


@dataclass(frozen=True)
class TmaSource(Source):
    """A source of x that TMA can load, with its copy."""

    copy: cute.CopyAtom
    view: cute.Tensor  # as TMA tiles are taken from it: [rows, 64 inputs, K / 64]
    places: cute.Tensor  # [a k block, number]
    barrier: cute.Pointer  # that counts their bytes


@dataclass(frozen=True)
class RowsRoom:
    """The sizes of the room for a CTA's limbs, and the kind of limbs.

    Attributes:
        k_blocks: number of k blocks of x whose limbs fit.
        loads: whether consumer warps load x; if not, TMA loads it.
        sums: whether the sum of a group's inputs is computed for each row, in the unit of limbs.
        e4m3: whether limbs are E4M3 numbers.
        unit_bits: `WeightFormat.byte_exponent` of the weight's codes.
        columns: number of columns of the MMA's B operand that a row of x takes.
    """

    dtype: str
    tile_m: int
    consumer_warps: int
    k_blocks: int
    loads: bool = True
    sums: bool = False
    e4m3: bool = False
    unit_bits: int = CODE_UNIT_BITS
    columns: int = 1


class ResidentRows:
    """Loads x and makes limbs, in the consumer warps of a :class:`.resident_kernel.ResidentKernel`."""

    columns: ClassVar[int] = 1  # of an MMA, that a row of x has

    def __init__(self, room: RowsRoom):
        self.room = room
        self.limb_rows = self.row_limbs()

    def row_limbs(self) -> RowLimbs:
        """Makes the `RowLimbs` that computes limbs and scales of a row."""
        return RowLimbs(self.room.dtype)

    def source(self, operands, shape, memory, copy_x, x_view) -> TmaSource:
        """Returns the source of a launch's x."""
        places = cute.group_modes(cute.local_tile(memory.x, self.tma_tile, (0, 0, None)), 0, 3)
        return TmaSource(
            address=operands.x,
            rows=shape.m,
            row_pieces=shape.k >> PIECE_BITS,
            copy=copy_x,
            view=x_view,
            places=places,
            barrier=memory.x_barrier,
        )

    @property
    def tma_tile(self) -> tuple[int, int, int]:
        """The size of a TMA tile: rows, inputs, blocks of inputs."""
        return self.room.tile_m, TMA_TILE_K, K_BLOCK_TMA_TILES

    def k_block_copy(self, x, layout) -> tuple[Any, Any]:
        """Returns (the TMA copy of a k block of x into consecutive TMA tiles, the view of x from which the copy reads k
        blocks).

        x: [m, k]; inputs after the last multiple of 64 are not loaded. layout: the layout of a k block in shared
        memory.
        """
        m, k = x.shape
        view = cute.make_tensor(
            x.iterator, cute.make_layout((m, TMA_TILE_K, k // TMA_TILE_K), stride=(k, 1, TMA_TILE_K))
        )
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, self.tma_tile)

    @cute.jit
    def bring(self, x: TmaSource, first_place, begin, end, warp):
        """Starts loading k blocks ``begin`` to ``end`` - 1 of x into the room for limbs, from the room's
        ``first_place``-th k block on. Each consumer warp loads some of the k blocks, and adds their bytes to those that
        the barrier expects.
        """
        count, warps = end - begin, self.room.consumer_warps
        own = (count - warp + (warps - 1)) // warps
        with cute.arch.elect_one():
            Barrier(x.barrier).expect(own * (ROW_LIMB_BYTES * self.room.tile_m))
        # All CTAs want the same of x at the same time: each begins with another k block.
        cta, _, _ = cute.arch.block_idx()
        shift = (cta * count) >> 8
        k_blocks = cute.domain_offset((0, 0, begin * K_BLOCK_TMA_TILES), x.view)
        k_blocks = cute.group_modes(cute.local_tile(k_blocks, self.tma_tile, (0, 0, None)), 0, 3)
        target, source = cpasync.tma_partition(x.copy, 0, cute.make_layout(1), x.places, k_blocks)
        for number in cutlass.range(warp, count, warps, unroll=1):
            k_block = number + shift
            k_block = cutlass.select_(k_block >= count, k_block - count, k_block)
            cute.copy(x.copy, source[None, k_block], target[None, first_place + k_block], tma_bar_ptr=x.barrier)

    @cute.jit
    def make(self, x: Source, memory, begin, end, warp, lane):
        """Makes limbs and scales of k blocks ``begin`` to ``end`` - 1 of x. Either TMA has loaded x to the addresses of
        its limbs, or this method loads x. MMAs may read the limbs after a barrier of all warps that make limbs.
        """
        bits, tile_m = self.step_bits(end - begin), self.room.tile_m
        steps = ((x.rows + (STEP_ROWS - 1)) // STEP_ROWS) << bits
        words = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        coming = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        if const_expr(self.room.loads):
            self.keep(coming, self.load_global(x, begin, bits, steps, warp, lane))
        for step in cutlass.range(warp, steps, self.room.consumer_warps, unroll=1):
            row, k_block = self.place(bits, step, lane)
            start = memory.x_address + (k_block * 2 * tile_m + row) * ROW_BYTES
            if const_expr(self.room.loads):
                self.keep(words, [coming[i] for i in range(STEP_WORDS)])
                following = step + self.room.consumer_warps
                self.keep(coming, self.load_global(x, begin, bits, steps, following, lane))
            else:
                self.keep(words, self.load(start, tile_m, row, lane))
            scale, limbs, total = self.split_summed([words[i] for i in range(STEP_WORDS)])
            cute.arch.sync_warp()  # until all lanes have their inputs
            if begin + k_block < end:
                self.store(start, tile_m, row, lane, limbs)
                if lane % GROUP_LANES < self.columns:
                    number = k_block * tile_m + self.scale_column(row, lane)
                    ptx.store_shared(memory.x_scales + number * 4, 0, [scale])
                    if const_expr(self.room.sums):
                        ptx.store_shared(memory.x_sums + number * 4, 0, [total])
        cute.arch.fence_proxy("async.shared", space="cta")

    def scale_column(self, row, lane) -> Any:
        """Returns the column of the MMA that a row's scale belongs to. The lane stores the scale there."""
        return row

    @staticmethod
    def keep(registers, values) -> None:
        """Puts values into a tensor of registers."""
        for i, value in enumerate(values):
            registers[i] = value

    def load_global(self, x: Source, begin, bits, steps, step, lane) -> list[Any]:
        """Loads a lane's inputs of a step from global memory, in the order of :meth:`load`. Rows, inputs and steps that
        do not exist are 0."""
        row, k_block = self.place(bits, step, lane)
        first = (begin + k_block) * GROUP_PIECES
        start = x.address + (Int64(x.row(row)) * x.row_pieces + first) * PIECE_BYTES
        there = cutlass.select_((step < steps) & (row < x.rows), x.row_pieces - first, Int32(0))
        words = []
        for number in range(LANE_BLOCKS):
            block = lane % GROUP_LANES + self.half(lane, number) * GROUP_LANES
            for i in range(BLOCK_PIECES):
                piece = block * BLOCK_PIECES + i
                inside = cutlass.select_(piece < there, Int32(1), Int32(0))
                # Not as constant memory: the launch before may write x, until it is waited for.
                words += numbers.load_global_if(inside, start + Int64(piece) * PIECE_BYTES, 0, 4, constant=False)
        return words

    def step_bits(self, k_blocks) -> Any:
        """Returns log2, rounded up, of the number of steps that a pair of rows takes for ``k_blocks`` k blocks. Powers
        of two need no division, which would take as long as a step.
        """
        most = max(-(-self.room.k_blocks // STEP_K_BLOCKS) - 1, 1).bit_length()
        return sum((cutlass.select_(k_blocks > STEP_K_BLOCKS << i, Int32(1), Int32(0)) for i in range(most)), Int32(0))

    def place(self, bits, step, lane) -> tuple[Any, Any]:
        """Returns the (row, k block) whose inputs a lane has in a step of its warp. A step has two rows, whose pieces
        are in different banks."""
        pair, group = step >> bits, lane // GROUP_LANES
        row = pair * STEP_ROWS + group % STEP_ROWS
        return row, (step - (pair << bits)) * STEP_K_BLOCKS + group // STEP_ROWS

    def half(self, lane, number: int):
        """Returns the half, 0 or 1, of 128 inputs in which a lane's ``number``-th block lies. Neighbouring sets of four
        lanes begin with different halves.
        """
        return (lane // GROUP_LANES + number) & 1

    def load(self, start, tile_m, row, lane) -> list[Any]:
        """Loads a lane's inputs of a step from shared memory, in packed pairs, block by block."""
        words = []
        for number in range(LANE_BLOCKS):
            line = start + self.half(lane, number) * tile_m * ROW_BYTES
            for i in range(BLOCK_PIECES):
                piece = (lane % GROUP_LANES * BLOCK_PIECES + i) ^ (row & (WGMMA_N_STEP - 1))
                words += ptx.load_shared_vector(line + piece * PIECE_BYTES, 0, 4)
        return words

    def split(self, words) -> tuple[Any, list[list[Any]]]:
        """Returns (scale, limbs) of a lane's inputs. scale: bits of an fp32 factor for the products of limbs and codes.
        limbs: for each block, the words of its high limbs, then the words of its low limbs.
        """
        return self.split_summed(words)[:2]

    def split_summed(self, words) -> tuple[Any, list[list[Any]], Any]:
        """Returns (scale, limbs, sum). Scale and limbs are those of :meth:`split`. sum: the sum of the group's inputs
        in the unit of the low limbs, or None if ``room.sums`` is False.
        """
        greater = self.greater
        packed = lanes.over_lanes(greater, lanes.in_pairs(greater, words), lanes.neighbours(GROUP_LANES))
        pair = [Int32(value.bitcast(Uint32)) for value in self.limb_rows.to_floats(packed & Uint32(MAGNITUDES))]
        factor, scale = self.limb_rows.scales_of(cutlass.max(*pair))
        fixed, limbs = [], []
        for i in range(LANE_BLOCKS):
            fixed.append(self.fixed(words[8 * i : 8 * i + 8], factor))
            limbs.append(self.limbs(fixed[-1]))
        return scale, limbs, self.sum_of(fixed) if self.room.sums else None

    def sum_of(self, fixed) -> Any:
        """Returns the sum of a group's inputs, from its lanes' fixed-point numbers."""
        inputs = [one for block in fixed for one in block]
        total = lanes.in_pairs(operator.add, inputs) - Uint32((MAGIC + HALF) * len(inputs) & 0xFFFFFFFF)
        return lanes.over_lanes(operator.add, total, lanes.neighbours(GROUP_LANES))

    def greater(self, a, b):
        """Compares two packed pairs element by element. Returns the elements of greater magnitude, with any sign. An
        element is NaN if either input is NaN."""
        return numbers.greater_magnitude(a, b, dtype=self.room.dtype)

    def fixed(self, words, factor) -> list[Any]:
        """Returns 16 inputs in fixed point, in the low bits of fp32 numbers. `MAGIC` and `HALF` are added to each."""
        rounded = Uint32(MAGIC + HALF).bitcast(Float32)
        values = [half for word in words for half in self.limb_rows.to_floats(word)]
        return [ptx.fma(value, factor, rounded).bitcast(Uint32) for value in values]

    def limbs(self, fixed) -> list[Any]:
        """Returns limbs of 16 inputs: four words of high limbs, then four words of low limbs. In both, the limbs of
        inputs 0 to 7 and of inputs 8 to 15 are interleaved.
        """
        # Each word: low limbs of two inputs, then their high ones.
        pairs = [ptx.prmt(fixed[i], fixed[8 + i], Uint32(0x5140)) for i in range(8)]
        high = [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x7632)) for i in range(0, 8, 2)]
        low = [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x5410)) ^ Uint32(SIGNS) for i in range(0, 8, 2)]
        return high + low

    def store(self, start, tile_m, row, lane, limbs) -> None:
        """Stores a lane's limbs in shared memory, where MMAs read them. All of them belong to one row and one k
        block."""
        for number, words in enumerate(limbs):
            block = lane % GROUP_LANES + self.half(lane, number) * GROUP_LANES
            address = start + (block ^ (row & (WGMMA_N_STEP - 1))) * PIECE_BYTES
            ptx.store_shared(address, 0, words[:4])
            ptx.store_shared(address + tile_m * ROW_BYTES, 0, words[4:])


class E4m3Rows(ResidentRows):
    """Makes rows of x in two E4M3 limbs. The sum of both limbs is x in the group's unit. The high limb has the first
    four significant bits of an input, the low limb the bits that follow.

    bf16 inputs of at least 2**-8 of the group's largest input are exact. Smaller inputs are off by at most 2**-15 of
    the largest.
    """

    def row_limbs(self) -> RowLimbs:
        exponents = {"unit_bits": self.room.unit_bits, "top_exponent": E4M3_TOP_EXPONENT, "round_up": E4M3_ROUND_UP}
        return RowLimbs(self.room.dtype, **exponents)

    def fixed(self, words, factor) -> list[Any]:
        """Returns 16 inputs in the group's unit, fp32."""
        return [numbers.multiply(half, factor) for word in words for half in self.limb_rows.to_floats(word)]

    def limbs(self, fixed) -> list[Any]:
        high = [numbers.from_bits(numbers.bits(one) & Uint32(E4M3_UPPER)) for one in fixed]
        low = [one - upper for one, upper in zip(fixed, high, strict=True)]
        pairs = [numbers.pack_e4m3x2(limb[i], limb[8 + i]) for limb in (high, low) for i in range(8)]
        return [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x5410)) for i in range(0, 16, 2)]


class HalfGroupRows(E4m3Rows):
    """Makes rows of x in E4M3 limbs for groups of 16 inputs, half of an MMA's: see `.limbs.HalfGroupProducts`.

    Row r takes columns r and r + `COLUMN_DISTANCE`. Each block of 16 inputs lies in one of the two columns; the other
    column has zeros for these inputs.
    """

    columns = 2

    def scale_column(self, row, lane) -> Any:
        return row + lane % GROUP_LANES * COLUMN_DISTANCE

    def store(self, start, tile_m, row, lane, limbs) -> None:
        for number, words in enumerate(limbs):
            block = lane % GROUP_LANES + self.half(lane, number) * GROUP_LANES
            for column in range(2):
                own = (block & 1) == column
                place = row + column * COLUMN_DISTANCE
                address = start + column * COLUMN_DISTANCE * ROW_BYTES
                address = address + (block ^ (place & (WGMMA_N_STEP - 1))) * PIECE_BYTES
                stored = [cutlass.select_(own, word, Uint32(0)) for word in words]
                ptx.store_shared(address, 0, stored[:4])
                ptx.store_shared(address + tile_m * ROW_BYTES, 0, stored[4:])


def rows_in(room: RowsRoom) -> ResidentRows:
    """Makes the `ResidentRows` for the limbs of a room."""
    if room.columns > 1:
        return HalfGroupRows(room)
    return E4m3Rows(room) if room.e4m3 else ResidentRows(room)


def room_of(config: ResidentConfig) -> RowsRoom:
    """Returns the `RowsRoom` of a configuration's resident limbs."""
    form, mainloop = config.format, config.mainloop
    room = RowsRoom(config.dtype, config.tile_m, config.consumer_warps, mainloop.k_blocks, mainloop.loads)
    return replace(room, sums=form.sums_inputs, **limbs_of(form))


def limbs_of(form: WeightFormat) -> dict[str, Any]:
    """Returns the fields of `RowsRoom` that depend on the weight format."""
    return {"e4m3": form.bytes_in_e4m3, "unit_bits": form.byte_exponent, "columns": row_columns(form)}


class ResidentLimbLoads:
    """Loads x and makes its limbs, in the consumer warps of a `.resident_kernel.ResidentKernel`. It runs while no MMA
    reads the limbs that it overwrites.
    """

    def __init__(self, config: ResidentConfig):
        self.config = config
        self.rows = rows_in(room_of(config))
        self.source: TmaSource | None = None

    def attach(self, operands, shape, memory, copy_x, x_view) -> None:
        """Keeps the source of x as an attribute, since a TMA copy cannot be passed as a value through run-time
        branches. The kernel calls `attach` once, before all other methods.
        """
        self.source = self.rows.source(operands, shape, memory, copy_x, x_view)

    @cute.jit
    def make_first(self, shape, memory, scheduler, warp, lane):
        """Makes all limbs of the CTA's part of K if there is room for them. Returns 1 if there is room, else 0."""
        work_tile = scheduler.work_tile(scheduler.first)
        begin, end = work_tile.begin, work_tile.end
        fits = cutlass.select_(end - begin <= self.config.mainloop.k_blocks, Int32(1), Int32(0))
        if const_expr(not self.config.mainloop.loads):
            if warp == 0:
                if lane == 0:
                    Barrier(memory.x_barrier, self.config.consumer_warps).init()
                    fence_init()
            self.meet()
        if fits != 0:
            if const_expr(not self.config.mainloop.loads):
                self.rows.bring(self.source, Int32(0), begin, end, warp)
                Barrier(memory.x_barrier).wait()
            self.rows.make(self.source, memory, begin, end, warp, lane)
        return fits

    def bring(self, place: Lane, first, begin, end):
        """Starts loading k blocks ``begin`` to ``end`` - 1 of x by TMA into the room for limbs, from the room's
        ``first``-th k block on. Does nothing if warps load x.
        """
        if const_expr(not self.config.mainloop.loads):
            self.rows.bring(self.source, first, begin, end, place.warp)

    def make(self, place: Lane, memory, begin, end, x_phase):
        """Makes limbs of k blocks ``begin`` to ``end`` - 1, once x has arrived."""
        if const_expr(not self.config.mainloop.loads):
            Barrier(memory.x_barrier).wait(x_phase)
        self.rows.make(self.source, memory, begin, end, place.warp, place.lane)

    def meet(self):
        """Waits for all consumer warps."""
        threads = self.config.consumer_warps * WARP_THREADS
        cute.arch.barrier(barrier_id=CHUNK_BARRIER, number_of_threads=threads)
