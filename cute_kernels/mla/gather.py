"""The gathering warpgroup: tokens of a cache into tiles of 16-bit numbers that wgmma reads.

A warp fetches 8 tokens at a time, lane l's being token l % 8: the i-th load of a lane takes bytes 64 i + 16 (l / 8)
onwards of its token's 512 or 448 codes. So the 8 lanes of a phase of a 16-byte store write the 8 rows of a swizzle
atom, at 8 different pieces: no bank conflicts, and every address is one of three per lane plus a constant. What is
loaded for the next 8 tokens takes the registers of what has just been decoded: all of a warp's loads are always under
way, also while it waits for a free tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import (
    BLOCK_TOKENS,
    FLAG_BYTES,
    GROUP_TOKENS,
    NUM_STAGES,
    WARP_GROUPS,
    MlaConfig,
)
from cute_kernels.mla.dequant import Dequantizer
from cute_kernels.mla.layout import HALF_SLABS
from cute_kernels.mla.locate import NO_ENTRY, Token, make_locator
from cute_kernels.sm90 import WARP_THREADS

SLAB_BYTES = BLOCK_TOKENS * wgmma_tiles.ROW_BYTES
ROPE_LOADS = 2  # of 16 bytes a lane; codes take one for every slab
LINE_BYTES = 128  # of L2
GROUP_BYTES = GROUP_TOKENS * wgmma_tiles.ROW_BYTES  # of a slab
LEFT_LOADS = HALF_SLABS + ROPE_LOADS  # of the left half of a tile of 9 slabs, to which the RoPE columns belong


@dataclass(frozen=True)
class GatherLane:
    """A gathering lane's constant places."""

    row: Any  # of its token in a block, in the warp's first group
    source: Any  # bytes into a token
    even: Any  # byte offsets in a slab: of the first 8 of 16 columns
    odd: Any  # ... of the other 8
    rope: Any  # ... of the first RoPE piece

    @staticmethod
    def of(first_row, lane) -> GatherLane:
        """first_row: of the warp's first group, in a block."""
        row, quarter = lane % GROUP_TOKENS, lane // GROUP_TOKENS
        first = first_row + row
        places = [wgmma_tiles.piece_offset(first, piece) for piece in (2 * quarter, 2 * quarter + 1, quarter)]
        return GatherLane(first, 16 * quarter, *places)


@cute.jit
def write_flags(memory, stage, group, valid, lane):
    """Says which of a group's 8 tokens exist."""
    flags = cute.arch.vote_ballot_sync(valid != 0)
    if lane == 0:
        ptx.store_shared(memory.flags + stage * FLAG_BYTES + group * 4, 0, [Uint32(flags) & 0xFF])


@dataclass(frozen=True)
class Prefetcher:
    """Brings the tokens of a gathering warp into L2 some blocks before they are asked for.

    The lanes of a warp share its tokens of a block, a token's lines of 128 bytes among two lanes or more. The entry of
    a token is read a block ahead of that.
    """

    locator: Any
    blocks: int
    kind: str  # as in `MlaConfig.prefetch_by`
    token_bytes: int
    rows: int  # of a block, that a warp fetches
    split: bool = False  # scales lie behind the data of all tokens of a page

    @cute.jit
    def start(self, work, source, first_row, lane):
        """Asks for the first blocks behind the one that is fetched first; the entry for :meth:`step`."""
        entry = Int32(NO_ENTRY)
        if const_expr(self.blocks > 0):
            entries = [self.load(work, source, work.begin + i, first_row, lane) for i in range(1, self.blocks + 1)]
            for i in cutlass.range_constexpr(self.blocks - 1):
                self.ask(work, source, entries[i], work.begin + (i + 1), first_row, lane)
            entry = entries[self.blocks - 1]
        return entry

    @cute.jit
    def step(self, work, source, entry, block, first_row, lane):
        """While ``block`` is filled: asks for the block of ``entry``; the next entry."""
        if const_expr(self.blocks > 0):
            self.ask(work, source, entry, block + self.blocks, first_row, lane)
            entry = self.load(work, source, block + (self.blocks + 1), first_row, lane)
        return entry

    def load(self, work, source, block, first_row, lane):
        return self.locator.load_entry(work, source, block, first_row + lane % self.rows)

    def ask(self, work, source, entry, block, first_row, lane) -> None:
        token = self.locator.locate(work, source, entry, block, first_row + lane % self.rows)
        if self.kind == "bulk":
            first = cutlass.select_(lane < self.rows, token.valid, Int32(0))
            numbers.prefetch_bulk_if(first, token.address, self.token_bytes)
            return
        for offset in self.lines(lane // self.rows):
            numbers.prefetch_line_if(token.valid, token.address + offset)
        if self.split:
            numbers.prefetch_line_if(cutlass.select_(lane < self.rows, token.valid, Int32(0)), token.behind)

    def lines(self, sharer) -> list[Any]:
        """Offsets in a token, one in each line that its ``sharer``-th lane asks for; tokens begin at any 16 bytes."""
        count = -(-(self.token_bytes + LINE_BYTES - wgmma_tiles.PIECE_BYTES) // LINE_BYTES)
        share = -(-count // (WARP_THREADS // self.rows))
        last = self.token_bytes - wgmma_tiles.PIECE_BYTES
        return [cutlass.min((sharer * share + i) * LINE_BYTES, last) for i in range(share)]


def make_prefetcher(config: MlaConfig, locator) -> Prefetcher:
    rows = config.warp_groups * GROUP_TOKENS
    layout = config.layout
    return Prefetcher(locator, config.prefetch, config.prefetch_by, layout.data_bytes, rows, layout.is_split)


class Dequantizing:
    """The gathering warpgroup over an FP8 cache."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.layout = config.layout
        self.num_loads = self.layout.code_slabs + ROPE_LOADS
        self.scale_words = self.layout.scale_bytes // 4
        self.locator = make_locator(config.tokens)
        self.prefetcher = make_prefetcher(config, self.locator)
        self.dequantizer = Dequantizer(config.scales, exponents=self.layout.is_split)

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        first_row = self.first_row(warp)
        place = GatherLane.of(first_row, lane)
        link = self.link(memory)
        words = cute.make_rmem_tensor(4 * self.num_loads, Uint32)
        scales = cute.make_rmem_tensor(self.scale_words, Uint32)
        entry = self.locator.load_entry(work, source, work.begin, place.row)
        token = self.locator.locate(work, source, entry, work.begin, place.row)
        for i in cutlass.range_constexpr(self.num_loads):
            self.load_piece(words, token, place, i)
        self.load_scales(scales, token)
        held = token.valid
        entry = self.locator.load_entry(work, source, *self.step(work.begin, 1, place))
        ahead = self.prefetcher.start(work, source, first_row, lane)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            ahead = self.prefetcher.step(work, source, ahead, block, first_row, lane)
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(self.config.warp_groups):
                next_block, next_row = self.step(block, group + 1, place)
                token = self.locator.locate(work, source, entry, next_block, next_row)
                entry = self.locator.load_entry(work, source, *self.step(block, group + 2, place))
                self.publish_flags(memory, link, stage, place.row // GROUP_TOKENS + group, held, lane)
                tile = self.tile(memory, link, stage, group)
                self.write_group(words, scales, token, tile, place)
                held = token.valid
            self.announce_tile(memory, stage, warp, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)

    def step(self, block, groups: int, place):
        """(block, a lane's row in it) of the warp's ``groups``-th group counted from the block's first."""
        ahead, group = divmod(groups, self.config.warp_groups)
        return block + ahead, place.row + group * GROUP_TOKENS

    # -- where tiles go: another class may send them further ----------------------------------------------------------

    def first_row(self, warp):
        """The first row of a block that a warp (0 to 3) fetches."""
        return warp * (WARP_GROUPS * GROUP_TOKENS)

    def link(self, memory):
        """What is known of another CTA: nothing."""
        return

    def publish_flags(self, memory, link, stage, group, valid, lane) -> None:
        """Says which of a group's 8 tokens exist."""
        write_flags(memory, stage, group, valid, lane)

    def tile(self, memory, link, stage, group: int):
        """Where the rows of a warp's group go in every slab."""
        return memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES

    def store(self, tile, place, offset: int, values) -> None:
        """Stores 16 bytes of a tile."""
        ptx.store_shared(tile + place, offset, values)

    def announce_tile(self, memory, stage, warp, lane) -> None:
        """Says that the warp's part of a tile is written."""
        self.announce(memory.full + stage, lane)

    @cute.jit
    def announce(self, barrier, lane):
        """Says that the warp's part of a tile, or of a half, is written."""
        if const_expr(self.config.fence == "writer"):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def load_piece(self, words, token: Token, place: GatherLane, i: int, slot: int | None = None) -> None:
        """Asks for a lane's i-th 16 bytes, of the codes, then of the RoPE columns, to hold in ``slot`` (i if None)."""
        first = 4 * (i if slot is None else slot)
        codes = self.layout.code_slabs
        offset = 64 * i if i < codes else self.layout.rope_offset + 64 * (i - codes)
        for j, word in enumerate(numbers.load_global_if(token.valid, token.address + place.source, offset)):
            words[first + j] = word

    def load_scales(self, scales, token: Token) -> None:
        """Asks for a token's scales."""
        offset = self.layout.scales_offset
        base = token.behind if offset is None else token.address
        for j, word in enumerate(numbers.load_global_if(token.valid, base, offset or 0, self.scale_words)):
            scales[j] = word

    # -- tiles --------------------------------------------------------------------------------------------------------

    def write_group(self, words, scales, token: Token, tile, place) -> None:
        """Decodes the tokens held in registers into rows of the tile and asks for those of ``token`` in their place."""
        codes, shared = self.layout.code_slabs, self.layout.slabs_per_scale
        factors = [self.dequantizer.factors(scales, j) for j in range(self.layout.num_scales)]
        self.load_scales(scales, token)
        for i in range(codes):
            self.write_latent(words, i, i, factors[i // shared], tile, place, token, i)
        for i in range(codes, self.num_loads):
            self.write_rope(words, i, i - codes, tile, place)
            self.load_piece(words, token, place, i)

    def write_latent(self, words, slot: int, slab: int, factors, tile, place, token: Token, piece: int | None) -> None:
        """Decodes 16 codes into a slab, and asks for another piece, of ``token``, in their place."""
        values = []
        for j in range(4):
            values += self.dequantizer.word(words[4 * slot + j], factors)
        if piece is not None:
            self.load_piece(words, token, place, piece, slot)
        self.store(tile, place.even, slab * SLAB_BYTES, values[:4])
        self.store(tile, place.odd, slab * SLAB_BYTES, values[4:])

    def write_rope(self, words, slot: int, i: int, tile, place) -> None:
        """Stores 8 RoPE columns as they are."""
        # Piece 4 + p of a row is 4 pieces from p whatever the row: the swizzle leaves that bit to itself.
        offset = place.rope ^ (4 * wgmma_tiles.PIECE_BYTES * i)
        self.store(tile, offset, self.layout.code_slabs * SLAB_BYTES, [words[4 * slot + j] for j in range(4)])


class DequantizingHalves(Dequantizing):
    """As :class:`Dequantizing`, a half of a tile at a time: left columns with the RoPE columns, then right columns.

    A warp holds one half of each of its groups: what it asks for in the place of a left half is the same tokens' right
    half, and the next block's left half in the place of that.
    """

    def __init__(self, config: MlaConfig):
        super().__init__(config)
        codes = self.layout.code_slabs
        self.left_pieces = (*range(HALF_SLABS), *range(codes, self.num_loads))

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        first_row = self.first_row(warp)
        place = GatherLane.of(first_row, lane)
        words = [cute.make_rmem_tensor(4 * LEFT_LOADS, Uint32) for _ in range(WARP_GROUPS)]
        scales = [cute.make_rmem_tensor(self.scale_words, Uint32) for _ in range(WARP_GROUPS)]
        addresses = cute.make_rmem_tensor(WARP_GROUPS, Int64)
        valid = cute.make_rmem_tensor(WARP_GROUPS, Int32)
        entries = cute.make_rmem_tensor(WARP_GROUPS, Int32)
        for group in cutlass.range_constexpr(WARP_GROUPS):
            row = place.row + group * GROUP_TOKENS
            entry = self.locator.load_entry(work, source, work.begin, row)
            token = self.locator.locate(work, source, entry, work.begin, row)
            entries[group] = self.locator.load_entry(work, source, work.begin + 1, row)
            addresses[group] = token.address
            valid[group] = token.valid
            self.load_scales(scales[group], token)
            for slot in cutlass.range_constexpr(LEFT_LOADS):
                self.load_piece(words[group], token, place, self.left_pieces[slot], slot)
        ahead = self.prefetcher.start(work, source, first_row, lane)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            tile = memory.tiles + stage * self.config.tile_bytes
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(WARP_GROUPS):
                write_flags(memory, stage, warp * WARP_GROUPS + group, valid[group], lane)
                token = Token(Int64(addresses[group]), Int32(valid[group]))
                self.write_left(words[group], scales[group], token, tile + group * GROUP_BYTES, place)
            self.announce(memory.full + stage, lane)
            # Where the next tokens lie is found out while this block's right half is awaited.
            for group in cutlass.range_constexpr(WARP_GROUPS):
                row = place.row + group * GROUP_TOKENS
                token = self.locator.locate(work, source, Int32(entries[group]), block + 1, row)
                entries[group] = self.locator.load_entry(work, source, block + 2, row)
                addresses[group] = token.address
                valid[group] = token.valid
            ahead = self.prefetcher.step(work, source, ahead, block, first_row, lane)
            cute.arch.mbarrier_wait(memory.empty + (NUM_STAGES + stage), phase)
            for group in cutlass.range_constexpr(WARP_GROUPS):
                token = Token(Int64(addresses[group]), Int32(valid[group]))
                self.write_right(words[group], scales[group], token, tile + group * GROUP_BYTES, place)
            self.announce(memory.full + (NUM_STAGES + stage), lane)
            stage, phase = advance(stage, phase, NUM_STAGES)

    def write_left(self, words, scales, token: Token, tile, place) -> None:
        """Writes the left half and the RoPE columns that the registers hold, and asks for the right half."""
        factors = [self.dequantizer.factors(scales, j) for j in range(self.layout.num_scales // 2)]
        for slot in range(HALF_SLABS):
            own = factors[slot // self.layout.slabs_per_scale]
            self.write_latent(words, slot, slot, own, tile, place, token, HALF_SLABS + slot)
        for i in range(ROPE_LOADS):
            self.write_rope(words, HALF_SLABS + i, i, tile, place)

    def write_right(self, words, scales, token: Token, tile, place) -> None:
        """Writes the right half that the registers hold, and asks for the left half and the scales of ``token``."""
        count = self.layout.num_scales
        factors = [self.dequantizer.factors(scales, j) for j in range(count // 2, count)]
        self.load_scales(scales, token)
        for i in range(ROPE_LOADS):
            self.load_piece(words, token, place, self.layout.code_slabs + i, HALF_SLABS + i)
        for slot in range(HALF_SLABS):
            own = factors[slot // self.layout.slabs_per_scale]
            self.write_latent(words, slot, HALF_SLABS + slot, own, tile, place, token, slot)


@dataclass(frozen=True)
class Link:
    """The other CTA of a pair; run-time values."""

    rank: Any  # this CTA's, 0 or 1
    distance: Any  # from an address of this CTA's shared memory to the same place in the other's


@dataclass(frozen=True)
class SharedTile:
    """Where rows go: here, and as far away in the other CTA, which counts them on its barrier; run-time values."""

    address: Any
    distance: Any
    barrier: Any


class Crossing(Dequantizing):
    """Half of the tokens of every block, written here and sent to the other CTA of the pair, which sends its half.

    The idea ("crossover") is that of FlashMLA's FP8 kernel (DeepSeek 2025).
    """

    def first_row(self, warp):
        rank = cute.arch.block_idx_in_cluster()
        return rank * (BLOCK_TOKENS // 2) + warp * GROUP_TOKENS

    def link(self, memory) -> Link:
        rank = cute.arch.block_idx_in_cluster()
        return Link(rank, numbers.address_in(memory.tiles, 1 - rank) - memory.tiles)

    @cute.jit
    def publish_flags(self, memory, link, stage, group, valid, lane):
        flags = Uint32(cute.arch.vote_ballot_sync(valid != 0)) & 0xFF
        if lane == 0:
            place = memory.flags + stage * FLAG_BYTES + group * 4
            ptx.store_shared(place, 0, [flags])
            barrier = (memory.full + stage).toint() + link.distance
            numbers.store_async(place + link.distance, [flags], barrier)

    def tile(self, memory, link, stage, group: int) -> SharedTile:
        address = memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES
        return SharedTile(address, link.distance, (memory.full + stage).toint() + link.distance)

    def store(self, tile: SharedTile, place, offset: int, values) -> None:
        ptx.store_shared(tile.address + place, offset, values)
        numbers.store_async(tile.address + tile.distance + (place + offset), values, tile.barrier)

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane):
        """The first warp also says how many bytes are to come from the other CTA."""
        cute.arch.sync_warp()
        if lane == 0:
            if warp == 0:
                sent = (self.config.tile_bytes + FLAG_BYTES) // 2
                cute.arch.mbarrier_arrive_and_expect_tx(memory.full + stage, sent)
            else:
                cute.arch.mbarrier_arrive(memory.full + stage)


class Copying:
    """The gathering warpgroup over a cache of 16-bit numbers: asynchronous copies, which nobody here waits for."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.prefetcher = make_prefetcher(config, self.locator)

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        first_row = warp * (WARP_GROUPS * GROUP_TOKENS)
        place = GatherLane.of(first_row, lane)
        entries = cute.make_rmem_tensor(WARP_GROUPS, Int32)
        for group in cutlass.range_constexpr(WARP_GROUPS):
            entries[group] = self.locator.load_entry(work, source, work.begin, place.row + group * GROUP_TOKENS)
        ahead = self.prefetcher.start(work, source, first_row, lane)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            ahead = self.prefetcher.step(work, source, ahead, block, first_row, lane)
            tokens = []
            for group in cutlass.range_constexpr(WARP_GROUPS):
                row = place.row + group * GROUP_TOKENS
                tokens.append(self.locator.locate(work, source, Int32(entries[group]), block, row))
                entries[group] = self.locator.load_entry(work, source, block + 1, row)
            for half in cutlass.range_constexpr(self.config.num_halves):
                barrier = half * NUM_STAGES + stage
                cute.arch.mbarrier_wait(memory.empty + barrier, phase)
                for group in cutlass.range_constexpr(WARP_GROUPS):
                    if const_expr(half == 0):
                        write_flags(memory, stage, warp * WARP_GROUPS + group, tokens[group].valid, lane)
                    tile = memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES
                    self.copy_group(tokens[group], tile, place, self.slabs(half))
                numbers.arrive_when_copied((memory.full + barrier).toint())
                # The flags are no copies: a thread that may have written some arrives for them as well.
                if lane == 0:
                    cute.arch.mbarrier_arrive(memory.full + barrier)
            stage, phase = advance(stage, phase, NUM_STAGES)

    def slabs(self, half: int) -> tuple[int, ...]:
        """The slabs of a tile, or of a half of it, in the order in which they are multiplied."""
        layout = self.config.layout
        if self.config.num_halves == 1:
            return tuple(range(layout.num_slabs))
        return layout.right_slabs if half else layout.left_slabs

    def copy_group(self, token: Token, tile, place: GatherLane, slabs: tuple[int, ...]) -> None:
        """Asks for slabs of 8 rows of the tile, 64 bytes of a lane's apart; zeros for tokens that do not exist."""
        size = token.valid * wgmma_tiles.PIECE_BYTES
        for slab in slabs:
            for i in range(2):
                target = (tile + place.rope) ^ (4 * wgmma_tiles.PIECE_BYTES * i)
                source = token.address + (place.source + wgmma_tiles.ROW_BYTES * slab + 64 * i)
                numbers.copy_async(target + slab * SLAB_BYTES, source, size)


def make_gatherer(config: MlaConfig) -> Dequantizing | Copying:
    """What fills tiles from a cache of the configuration's format."""
    if config.copies:
        return Copying(config)
    if config.crossover:
        return Crossing(config)
    return DequantizingHalves(config) if config.seesaw else Dequantizing(config)
