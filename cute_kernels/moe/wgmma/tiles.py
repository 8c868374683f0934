"""Which tiles of which experts a CTA computes, as the device finds them from the routing.

An expert's rows are cut into tiles of ``tokens`` places, the last one shorter; with each of its blocks of output
features such a tile is an item. Items of all experts are counted through, and every CTA takes each ``stride``-th.
Before the roles begin one warp writes to shared memory how many items there are before each expert and where its places
begin. To find an item a warp looks through that table in two steps, a lane for 16 experts, then a lane for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.linear.wgmma.config import TOKEN_BAND
from cute_kernels.linear.wgmma.tiles import Shape
from cute_kernels.moe.schedule import EXPERTS_PER_LANE, MAX_EXPERTS
from cute_kernels.moe.wgmma.schedule import ENTRY_BYTES
from cute_kernels.sm90 import WARP_THREADS


@dataclass(frozen=True)
class GroupedShape(Shape):
    """Sizes of a launch; run-time integers. ``m`` is the rows of x; nothing is cut along K."""

    num_experts: Any
    blocks: Any  # of output features of an expert
    band_tiles: Divisor  # of a whole band of an expert
    num_ctas: Divisor


@dataclass(frozen=True)
class DigitShape(GroupedShape):
    """Sizes of a launch whose x comes in digits, and where its scales are: fp32 [units, x_scale_pitch]."""

    x_scales: Any
    x_scale_pitch: Any


@dataclass(frozen=True)
class GroupedItem:
    """A tile of an expert's output; run-time integers.

    block: of output features; token: the tile's first place; end_token: behind the expert's last place. Others as in
    :class:`cute_kernels.linear.wgmma.tiles.Item`.
    """

    expert: Any
    block: Any
    token: Any
    end_token: Any
    begin: Any  # units
    end: Any
    split: Any
    splits: Any
    number: Any


@dataclass(frozen=True)
class GroupedItems:
    """The items of one CTA: every ``stride``-th of ``count``; run-time integers.

    Within an expert they are counted as those of a dense product: in bands of `TOKEN_BAND` tiles of tokens, in a band
    tokens first; whose turn it is to begin changes with each round of all CTAs. Otherwise, with as many CTAs as a
    multiple of an expert's tiles of tokens, the same CTAs would get every expert's short last tile.

    table: shared memory, see :func:`fill_table`; lane: of the warp, all of whose lanes ask together.
    """

    shape: GroupedShape
    first: Any
    stride: Any
    count: Any
    table: Any
    lane: Any
    tokens: int

    def item(self, index) -> GroupedItem:
        shape = self.shape
        expert = self.expert_of(index)
        before, start = self.entry(expert)
        _, end = self.entry(expert + 1)
        token_tiles = tiles_of(end - start, self.tokens)
        band, rest = shape.band_tiles.divide_int(index - before)
        width = band_width(token_tiles - band * TOKEN_BAND)
        block, turn = width.divide_int(rest)
        round_of_first, _ = shape.num_ctas.divide_int(index - turn)
        token_tile = band * TOKEN_BAND + width.divide_int(turn + round_of_first)[1]
        return GroupedItem(
            expert=expert,
            block=block,
            token=start + token_tile * self.tokens,
            end_token=end,
            begin=Int32(0),
            end=shape.units,
            split=Int32(0),
            splits=Int32(1),
            number=Int32(0),
        )

    def entry(self, expert) -> tuple[Any, Any]:
        """(items before an expert, its first place)."""
        before, place = ptx.load_shared_vector(self.table + expert * ENTRY_BYTES, 0, 2)
        return Int32(before), Int32(place)

    def expert_of(self, index):
        """The expert of an item: as many as end at or before it."""
        run = self.ended(EXPERTS_PER_LANE * (self.lane + 1), index, 0xFFFFFFFF)
        first = run * EXPERTS_PER_LANE
        mask = (1 << EXPERTS_PER_LANE) - 1
        return first + self.ended(first + (self.lane & (EXPERTS_PER_LANE - 1)) + 1, index, mask)

    def ended(self, expert, index, mask: int):
        """Of the lanes in ``mask``, how many have an expert with no more than ``index`` items before it."""
        before = Int32(ptx.load_shared(self.table + expert * ENTRY_BYTES, 0))
        return Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(before <= index)) & Uint32(mask)))


def band_width(left) -> Divisor:
    """Tiles of tokens of a band, before whose end so many are left, at least one; divides numbers below 2**28."""
    multiplier = Uint32(-(-(2**31) // TOKEN_BAND))
    for width in range(TOKEN_BAND - 1, 0, -1):
        multiplier = cutlass.select_(left <= width, Uint32(-(-(2**31) // width)), multiplier)
    return Divisor(cutlass.min(left, TOKEN_BAND), multiplier, Uint32(0))


def tiles_of(rows, tokens: int):
    """Tiles of ``tokens`` places that so many rows take."""
    reach = rows + (tokens - 1)
    return reach >> (tokens.bit_length() - 1) if tokens.bit_count() == 1 else reach // tokens


@cute.jit
def fill_table(table, offsets, shape, lane, tokens: int):
    """One warp writes the table [MAX_EXPERTS + 1] of (items before an expert, its first place); a lane has 16 of them.

    offsets: address of int32 [experts + 1]. Experts that there are not have no rows.
    """
    expert = lane * EXPERTS_PER_LANE
    ends = cute.make_rmem_tensor(EXPERTS_PER_LANE + 1, Int32)
    for i in cutlass.range_constexpr(EXPERTS_PER_LANE + 1):
        place = cutlass.min(expert + i, shape.num_experts)
        ends[i] = Int32(ptx.load_global_words(offsets + cutlass.Int64(place) * 4, 0, 1, constant=False)[0])
    count = Int32(0)
    for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
        count = count + tiles_of(ends[i + 1] - ends[i], tokens) * shape.blocks
    before = count
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
        before = before + cutlass.select_(lane >= (1 << step), other, Int32(0))
    before = before - count
    for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
        ptx.store_shared(table + (expert + i) * ENTRY_BYTES, 0, [Uint32(before), Uint32(ends[i])])
        before = before + tiles_of(ends[i + 1] - ends[i], tokens) * shape.blocks
    if lane == WARP_THREADS - 1:
        ptx.store_shared(table + MAX_EXPERTS * ENTRY_BYTES, 0, [Uint32(before), Uint32(ends[EXPERTS_PER_LANE])])
