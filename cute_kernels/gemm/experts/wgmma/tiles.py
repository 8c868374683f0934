"""The tile scheduler of grouped products, which finds a CTA's work tiles on the device, from the routing.

An expert's places are cut into tiles of ``tile_m`` places; the last tile may be shorter. A work tile is one such tile
and one of the expert's blocks of output features. Indices of work tiles run through all experts, and a CTA takes every
``stride``-th work tile. Before the roles begin, some warps write a table to shared memory. For each expert it has the
number of work tiles before the expert, and the expert's first place. A warp finds a work tile in two steps. First, each
lane looks at one of every 16 experts. Then, each lane looks at one of the 16 experts found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.gemm.experts.schedule import EXPERTS_PER_LANE, MAX_EXPERTS
from cute_kernels.gemm.experts.wgmma.schedule import ENTRY_BYTES, SUMS, TABLE_WARPS
from cute_kernels.gemm.wgmma.config import M_TILE_BAND
from cute_kernels.gemm.wgmma.tiles import TileSizes

# Number of the barrier of the warps that write the table, after those of the dense kernel. FP8's warpgroups alternate
# by barriers 9 and 10: they begin after the sync_threads at the end of `ExpertTiles.begin`, when all warps have left
# this one. `cluster_reduction.JOIN` is 9 as well; grouped tiles have no DSMEM reduction.
TABLE_BARRIER = 9


@dataclass(frozen=True)
class GroupedTileSizes(TileSizes):
    """Sizes of a launch; run-time integers. ``m`` is the number of rows of x. No work tile is cut along K."""

    num_experts: Int32
    blocks: Int32  # of output features of an expert
    band_tiles: Divisor  # of a whole band of an expert
    num_ctas: Divisor
    offsets: Int64  # address of each expert's first place, int32 [num_experts + 1]


@dataclass(frozen=True)
class GroupedWorkTile:
    """A tile of an expert's output; run-time integers.

    Attributes:
        block: the index of the block of output features.
        token: the tile's first place.
        end_token: the place after the expert's last place.

    The remaining fields are as in :class:`cute_kernels.gemm.wgmma.tiles.WorkTile`.
    """

    expert: Int32
    block: Int32
    token: Int32
    end_token: Int32
    begin: Int32  # k blocks
    end: Int32
    split: Int32
    splits: Int32
    number: Int32


@dataclass(frozen=True)
class GroupedTileScheduler:
    """The work tiles of one CTA: every ``stride``-th of ``count`` work tiles; run-time integers.

    Within an expert, work tiles are ordered as in a dense product: in bands of `M_TILE_BAND` token tiles, and within a
    band tokens first. From one round of all CTAs to the next, the order of a block's token tiles is rotated. Otherwise,
    if the number of CTAs is a multiple of an expert's number of token tiles, the same CTAs would get the short last
    tile in every round.

    Attributes:
        table: address in shared memory, see :func:`fill_table`.
        lane: index of the lane. All lanes of a warp call the methods together.
    """

    shape: GroupedTileSizes
    first: Int32
    stride: Int32
    count: Int32
    table: Int32
    lane: Int32 | int
    tile_m: int

    def work_tile(self, index) -> GroupedWorkTile:
        shape = self.shape
        expert = self.expert_of(index)
        before, start = self.entry(expert)
        _, end = self.entry(expert + 1)
        m_tiles = tiles_of(end - start, self.tile_m)
        band, rest = shape.band_tiles.divide_int(index - before)
        width = band_width(m_tiles - band * M_TILE_BAND)
        block, turn = width.divide_int(rest)
        round_of_first, _ = shape.num_ctas.divide_int(index - turn)
        m_tile = band * M_TILE_BAND + width.divide_int(turn + round_of_first)[1]
        return GroupedWorkTile(
            expert=expert,
            block=block,
            token=start + m_tile * self.tile_m,
            end_token=end,
            begin=Int32(0),
            end=shape.k_blocks,
            split=Int32(0),
            splits=Int32(1),
            number=Int32(0),
        )

    def entry(self, expert) -> tuple[Any, Any]:
        """Returns (number of work tiles before an expert, the expert's first place)."""
        before, place = ptx.load_shared_vector(self.table + expert * ENTRY_BYTES, 0, 2)
        return Int32(before), Int32(place)

    def expert_of(self, index):
        """Returns the expert of a work tile: the number of experts whose work tiles all come before it."""
        run = self.ended(EXPERTS_PER_LANE * (self.lane + 1), index, 0xFFFFFFFF)
        first = run * EXPERTS_PER_LANE
        mask = (1 << EXPERTS_PER_LANE) - 1
        return first + self.ended(first + (self.lane & (EXPERTS_PER_LANE - 1)) + 1, index, mask)

    def ended(self, expert, index, mask: int):
        """Returns how many lanes in ``mask`` have an ``expert`` with at most ``index`` work tiles before it."""
        before = Int32(ptx.load_shared(self.table + expert * ENTRY_BYTES, 0))
        return Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(before <= index)) & Uint32(mask)))


def band_width(left) -> Divisor:
    """Returns how many token tiles the next band has, at least 1, if ``left`` token tiles remain. The result is a
    divisor for dividends below 2**28.
    """
    multiplier = Uint32(-(-(2**31) // M_TILE_BAND))
    for width in range(M_TILE_BAND - 1, 0, -1):
        multiplier = cutlass.select_(left <= width, Uint32(-(-(2**31) // width)), multiplier)
    return Divisor(cutlass.min(left, M_TILE_BAND), multiplier, Uint32(0))


def tiles_of(rows, tile_m: int):
    """Returns the number of tiles of ``tile_m`` places for ``rows`` rows."""
    reach = rows + (tile_m - 1)
    return reach >> (tile_m.bit_length() - 1) if tile_m.bit_count() == 1 else reach // tile_m


@cute.jit
def fill_table(table, offsets, shape, warp, lane, tile_m: int):
    """Writes the table [MAX_EXPERTS + 1] of (number of work tiles before an expert, the expert's first place).
    `TABLE_WARPS` warps write it, two elements a lane. offsets: address of int32 [experts + 1]. Experts that do not
    exist have no rows.

    The first load of weights waits for the table, so the table is made in few steps. Each warp counts the work tiles of
    its own experts, and stores the total behind the table. Then it adds the totals of the preceding warps to its own
    counts.
    """
    expert = (warp * WARP_THREADS + lane) * 2
    ends = cute.make_rmem_tensor(3, Int32)
    for i in cutlass.range_constexpr(3):
        place = cutlass.min(expert + i, shape.num_experts)
        ends[i] = Int32(ptx.load_global_words(offsets + Int64(place) * 4, 0, 1, constant=False)[0])
    first = tiles_of(ends[1] - ends[0], tile_m) * shape.blocks
    count = first + tiles_of(ends[2] - ends[1], tile_m) * shape.blocks
    behind = count
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(behind, 1 << step, mask_and_clamp=0)
        behind = behind + cutlass.select_(lane >= (1 << step), other, Int32(0))
    if lane == WARP_THREADS - 1:
        ptx.store_shared(table + SUMS + warp * 4, 0, [Uint32(behind)])
    cute.arch.barrier(barrier_id=TABLE_BARRIER, number_of_threads=TABLE_WARPS * WARP_THREADS)
    before = behind - count
    for group in cutlass.range_constexpr(TABLE_WARPS // 4):
        sums = ptx.load_shared_vector(table + SUMS, 16 * group, 4)
        for i in cutlass.range_constexpr(4):
            before = before + cutlass.select_(4 * group + i < warp, Int32(sums[i]), Int32(0))
    place = table + expert * ENTRY_BYTES
    ptx.store_shared(place, 0, [Uint32(word) for word in (before, ends[0], before + first, ends[1])])
    if expert == MAX_EXPERTS - 2:
        ptx.store_shared(place, 2 * ENTRY_BYTES, [Uint32(before + count), Uint32(ends[2])])
