"""The cooperative combine: the CTAs of one launch publish their parts of a row for each other and add them up.

The CTAs with the same heads of a row divide these heads among themselves. Each CTA publishes its part of all heads,
with a flag for each reader. Then it loads all parts of its own heads and adds them up in order of parts, so results do
not depend on which CTA was first. A part has the same layout in shared and global memory. So a warp publishes each
piece with one bulk copy for each reader, and a reader loads all parts with one bulk copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import EMPTY_WORD, WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.combine.output import WARP_ROWS, exists_sink, scale_of_some
from cute_kernels.mla.combine.second_launch import outcome_of
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    CONSUMER_THREADS,
    PART_ROW_BYTES,
    PIECE_COLUMNS,
    V_HEAD_DIM,
    WARPGROUP_WARPS,
    MlaConfig,
)
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.mainloops.softmax import LOWEST, row_of
from cute_kernels.mla.stream_k import ALL_LANES

PART_WRITTEN, TILES_FREE = 6, 7  # named barriers: of the consumer warpgroups, of the producer warps
WRITTEN = 0  # a flag's value when a part is there; EMPTY_WORD otherwise
ROW_LANES = 4  # that have a row's accumulators
LANE_BYTES = 16
# A row's piece of a part: fp16 values, then fp32 numbers: maximum and total (first piece alone), and what the values
# are to be multiplied with. 8 rows side by side lie in different banks.
STATS_OFFSET = PIECE_COLUMNS * 2
PIECES = V_HEAD_DIM // PIECE_COLUMNS
OWN_PIECES = PIECES // 2  # of a warpgroup
LANE_COLUMNS = PIECE_COLUMNS // WARP_THREADS
COLUMNS = V_HEAD_DIM // WARP_THREADS  # of a lane that adds up: 4 of each piece


@dataclass(frozen=True)
class PartPlaces:
    """The places in global memory of the parts of one row and of one block of 64 heads; run-time values.

    The heads are divided among CTAs, the readers: a reader adds up the parts of ``each`` neighbouring heads. Memory is
    ordered by reader: a reader finds its heads of part 0, then its heads of part 1, and so on. It also has one flag for
    each part.
    """

    words: Int64  # addresses: of all parts
    flags: Int64  # ... and their flags
    part: Int32  # the CTA's own
    count: Int32
    each: Int32  # heads of a reader, a power of 2 from 4 to 16
    readers: Int32

    @staticmethod
    def of(work_tiles) -> PartPlaces:
        """Returns the places for a CTA's row and block of heads. The more parts there are, the fewer heads a reader
        has. There are never more readers than CTAs."""
        count = work_tiles.shape.num_parts
        each = cutlass.select_(count >= 16, Int32(4), cutlass.select_(count >= 8, Int32(8), Int32(16)))
        readers = cutlass.select_(count >= 16, Int32(16), cutlass.select_(count >= 8, Int32(8), Int32(4)))
        group = work_tiles.row * work_tiles.counts.head_blocks.value + work_tiles.head_block
        words = work_tiles.exchange.words + Int64(group * count) * (BLOCK_HEADS * PIECES * PART_ROW_BYTES)
        flags = work_tiles.exchange.flags + Int64(group * count * readers) * 4
        return PartPlaces(words, flags, work_tiles.start, count, each, readers)

    @property
    def piece_bytes(self):
        """Bytes of a piece: 128 columns of a reader's heads, in one part."""
        return self.each * PART_ROW_BYTES

    def place(self, reader, part, piece):
        """Returns the address of a piece (128 columns) of a part, for a reader's heads."""
        return self.words + Int64((reader * self.count + part) * PIECES + piece) * self.piece_bytes

    def flag(self, reader, part):
        """Returns the address of a part's flag for a reader. The flag is set once all pieces of the part are stored."""
        return self.flags + Int64(reader * self.count + part) * 4


@cute.jit
def publish_part(work_tiles, acc, stats, memory, warp, lane, half: cutlass.Constexpr):
    """Publishes half of the columns of a warp's 16 rows for the CTAs that add up these rows. The half is two pieces of
    128 columns. Each piece has its own place in the queries' shared memory, so one is copied while the next is written.

    acc: unnormalised, fp32 [128]. stats: (maximum as an exponent of 2, total) for each of a thread's two rows; () for
    the right half.
    """
    parts = PartPlaces.of(work_tiles)
    readers = parts.readers // WARPGROUP_WARPS  # of a warp's rows
    for own_piece in cutlass.range_constexpr(OWN_PIECES):
        piece = half * OWN_PIECES + own_piece
        rows = memory.queries + (piece * WARPGROUP_WARPS + warp) * (WARP_ROWS * PART_ROW_BYTES)
        count = PIECE_COLUMNS // 2
        own = [acc[i] for i in range(own_piece * count, (own_piece + 1) * count)]
        scales = [scale_of_some([own[i] for i in range(count) if row_of(i) == below]) for below in range(2)]
        stage_values(own, [scale for scale, _ in scales], rows + row_place(lane))
        if lane % ROW_LANES == 0:
            for below in cutlass.range_constexpr(2):
                behind = rows + (lane // ROW_LANES + 8 * below) * PART_ROW_BYTES
                unit = scales[below][1]
                ptx.store_shared(
                    behind, STATS_OFFSET, [*stats[below], unit, unit] if const_expr(piece == 0) else [unit]
                )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane < readers:
            source = rows + lane * parts.piece_bytes
            numbers.copy_to_global(parts.place(warp * readers + lane, parts.part, piece), source, parts.piece_bytes)
            cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)
    if const_expr(half == 0):
        # One warp for all: each that says so by itself waits for all stores of its SM to be seen by the GPU.
        cute.arch.barrier(barrier_id=PART_WRITTEN, number_of_threads=CONSUMER_THREADS)
        if (warp == 0) & (lane < parts.readers):
            numbers.store_released(parts.flag(lane, parts.part), Uint32(WRITTEN))
    else:
        cute.arch.barrier_arrive(barrier_id=PART_WRITTEN, number_of_threads=CONSUMER_THREADS)


def row_place(lane):
    """Returns the address that a lane passes to stmatrix in :func:`stage_values`, as an offset in bytes from the warp's
    first row.
    """
    return lane % WARP_ROWS * PART_ROW_BYTES + lane // WARP_ROWS * LANE_BYTES


def stage_values(acc, scales, place) -> None:
    """Stores a warp's 16 rows as scaled fp16, a row every `PART_ROW_BYTES`. place: the address of the first row, plus
    the lane's offset from `row_place`."""
    for i in range(0, PIECE_COLUMNS // 2, 8):
        # Twice 8 columns of 16 rows.
        order = [(i + 4 * further + 2 * below, scales[below]) for further in range(2) for below in range(2)]
        words = [ptx.pack_f16x2(acc[j] * scale, acc[j + 1] * scale) for j, scale in order]
        ptx.store_matrix_x4(place, sum_place(i)[1] * 2, words, transpose=False)


class CooperativeCombine:
    """The code of the producer warps that add up parts after their last tile."""

    def __init__(self, config: MlaConfig):
        self.numbers = of_name(config.layout.dtype)

    @cute.jit
    def fetch(self, parts, memory, warp, lane):
        """Waits for all parts of the CTA's heads and loads them into the shared memory of tiles. The barrier
        `queries_full` counts their bytes. Resets the parts' flags."""
        # Nobody reads tiles any more, nor waits for queries.
        cute.arch.barrier(barrier_id=TILES_FREE, number_of_threads=WARPGROUP_WARPS * WARP_THREADS)
        if warp == 0:
            flag = parts.flag(parts.part, cutlass.min(lane, parts.count - 1))
            missing = Int32(1)
            while missing != 0:
                word = numbers.load_acquired(flag)
                missing = Int32(cute.arch.vote_any_sync(word == Uint32(EMPTY_WORD)))
            if lane < parts.count:
                ptx.store_global(flag, [Uint32(EMPTY_WORD)])
            # What comes by a bulk copy was announced by an ordinary store.
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
            if lane == 0:
                size = parts.count * PIECES * parts.piece_bytes
                cute.arch.mbarrier_arrive_and_expect_tx(memory.queries_full, size)
                source, barrier = parts.place(parts.part, 0, 0), memory.queries_full.toint()
                ptx.bulk_copy_to_shared(memory.tiles, source, size, barrier)
        cute.arch.mbarrier_wait(memory.queries_full, 1)

    @cute.jit
    def add(self, work_tiles, parts, results, memory, head, wanted, lane):
        """Adds up the parts of the ``head``-th head of the CTA, and writes the result if ``wanted`` is not 0."""
        acc, maximum, total = self.add_parts(parts, memory.tiles + head * PART_ROW_BYTES, lane)
        self.write(work_tiles, results, parts.part * parts.each + head, acc, maximum, total, wanted, lane)

    @cute.jit
    def add_parts(self, parts, left, lane):
        """Adds up the parts of a head. Returns (fp32 [16] unnormalised columns, maximum, total). A lane has columns 4 *
        lane to 4 * lane + 3 of each piece. left: shared address of the first piece of the first part."""
        stride = PIECES * parts.piece_bytes
        own = cutlass.min(lane, parts.count - 1) * stride
        known = [word.bitcast(Float32) for word in ptx.load_shared_vector(left + own, STATS_OFFSET, 4)]
        pieces = [left + piece * parts.piece_bytes for piece in range(PIECES)]
        units = [known[2], *(ptx.load_shared(piece + own, STATS_OFFSET).bitcast(Float32) for piece in pieces[1:])]
        exists = lane < parts.count
        own_maximum = cutlass.select_(exists, known[0], Float32(LOWEST))
        own_total = cutlass.select_(exists, known[1], Float32(0.0))
        maximum = lane_max(own_maximum, ALL_LANES)
        weight = ptx.exp2(own_maximum - maximum)
        # A part without keys has zeros.
        weights = [cutlass.select_(own_total > 0.0, weight * unit, Float32(0.0)) for unit in units]
        acc = cute.make_rmem_tensor(COLUMNS, Float32)
        acc.fill(0.0)
        for part in cutlass.range(parts.count, unroll=4):
            for piece in cutlass.range_constexpr(PIECES):
                worth = cute.arch.shuffle_sync(weights[piece], part)
                place = pieces[piece] + part * stride + lane * (LANE_COLUMNS * 2)
                words = ptx.load_shared_vector(place, 0, LANE_COLUMNS // 2)
                for i in cutlass.range_constexpr(LANE_COLUMNS // 2):
                    j = LANE_COLUMNS * piece + 2 * i
                    acc[j] = ptx.fma(ptx.half2_low_to_float(words[i]), worth, acc[j])
                    acc[j + 1] = ptx.fma(ptx.half2_high_to_float(words[i]), worth, acc[j + 1])
        return acc, maximum, lane_sum(weight * own_total, ALL_LANES)

    @cute.jit
    def write(self, work_tiles, results, own_head, acc, maximum, total, wanted, lane):
        """Writes a head's output and log-sum-exp, and its largest score if ``results`` has an address for it. Writes
        nothing if ``wanted`` is 0. own_head: the head's index in the block of 64 heads."""
        head = work_tiles.head_block * BLOCK_HEADS + own_head
        denominator = total
        if exists_sink(results):
            if wanted != 0:
                sink = ptx.load_global_words(results.sinks + Int64(head) * 4, 0, 1)[0].bitcast(Float32)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        words, lse, top = outcome_of(acc, COLUMNS, maximum, total, denominator, self.numbers)
        query_row = work_tiles.row * work_tiles.shape.num_heads + head
        place = results.out + Int64(query_row) * (V_HEAD_DIM * 2) + lane * (LANE_COLUMNS * 2)
        if wanted != 0:
            for piece in cutlass.range_constexpr(PIECES):
                own = words[LANE_COLUMNS // 2 * piece : LANE_COLUMNS // 2 * (piece + 1)]
                ptx.store_global(place, own, offset=piece * PIECE_COLUMNS * 2)
            if lane == 0:
                ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
                if results.max_logits != 0:
                    ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])
