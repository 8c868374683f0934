"""Says where producer warps write the rows of a tile that they decode: in the CTA's own memory, or in that of both CTAs
of a pair (crossover).

A destination knows which rows of a block a warp has, where they go, how they reach the consumers of both CTAs, and how
a tile is announced.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_TOKENS, FLAG_BYTES, GROUP_TOKENS, NUM_STAGES, MlaConfig
from cute_kernels.mla.loads.gather import GROUP_BYTES, SLAB_BYTES, write_flags


class OwnTiles:
    """The CTA's own memory."""

    def __init__(self, config: MlaConfig):
        self.config = config

    def first_row(self, warp):
        """The first row of a block that a warp loads."""
        return warp * (self.config.warp_groups * GROUP_TOKENS)

    def link(self, memory, first_row):
        """Returns None: there is no other CTA."""
        return

    def publish_flags(self, memory, link, stage, group, valid, lane) -> None:
        """Publishes which of a group's 8 tokens exist."""
        write_flags(memory, stage, group, valid, lane)

    def tile(self, memory, link, stage, group: int):
        """Returns where the rows of a warp's group are written in every slab."""
        return memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES

    def here(self, tile):
        """The address of a tile in the CTA's own memory."""
        return tile

    def store(self, tile, place, offset: int, values) -> None:
        """Stores 16 bytes of a tile."""
        ptx.store_shared(tile + place, offset, values)

    def send(self, tile) -> None:
        """Does nothing: no other CTA needs the rows that a warp has written."""

    def finish(self, memory, stage, phase) -> None:
        """Does nothing after the last tile: there is no other CTA to wait for."""

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane):
        """Arrives: the warp's part of a tile is written."""
        if const_expr(self.config.tiles.load.fence == "writer"):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(memory.full + stage)


@dataclass(frozen=True)
class PeerLink:
    """The other CTA of a pair; run-time values."""

    first_row: Int32  # of the warp's rows in a block
    distance: Int32  # from an address of this CTA's shared memory to the same place in the other's


@dataclass(frozen=True)
class SharedTile:
    """Where rows are written: here, and at the same offset in the other CTA, which counts them on its barrier; run-time
    values."""

    address: Int32
    rows: Int32  # of the warp's group, the same in all lanes
    distance: Int32
    barrier: Int32


class CrossoverTiles:
    """Half of the tokens of every block, written here and copied to the other CTA of the pair, which sends its half.

    The idea ("crossover") is that of FlashMLA's FP8 kernel (DeepSeek 2025), whose threads store everything twice. Here
    the 8 rows that a warp has written of a slab, 1 KB, are one bulk copy. The rows of all slabs are sent at once, since
    the fence before them waits for loads in flight.

    drains: whether producers wait in the end until both CTAs have released all tiles. A cooperative combine, which has
    other things to do before, waits by itself.
    """

    def __init__(self, config: MlaConfig, drains: bool = True):
        self.config, self.drains = config, drains

    def first_row(self, warp):
        rank = cute.arch.block_idx_in_cluster()
        return rank * (BLOCK_TOKENS // 2) + warp * GROUP_TOKENS

    def link(self, memory, first_row) -> PeerLink:
        other = 1 - cute.arch.block_idx_in_cluster()
        distance = numbers.address_in(memory.tiles, other) - memory.tiles
        return PeerLink(cute.arch.make_warp_uniform(first_row), cute.arch.make_warp_uniform(distance))

    @cute.jit
    def publish_flags(self, memory, link, stage, group, valid, lane):
        flags = Uint32(cute.arch.vote_ballot_sync(valid != 0)) & 0xFF
        if lane == 0:
            place = memory.flags + stage * FLAG_BYTES + group * 4
            ptx.store_shared(place, 0, [flags])
            barrier = (memory.full + self.config.part_number(stage, 0)).toint() + link.distance
            numbers.store_async(place + link.distance, [flags], barrier)

    def tile(self, memory, link, stage, group: int, part: int = 0) -> SharedTile:
        address = memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES
        rows = address + link.first_row * wgmma_tiles.ROW_BYTES
        barrier = (memory.full + self.config.part_number(stage, part)).toint() + link.distance
        return SharedTile(address, rows, link.distance, barrier)

    def here(self, tile: SharedTile):
        return tile.address

    def store(self, tile: SharedTile, place, offset: int, values) -> None:
        ptx.store_shared(tile.address + place, offset, values)

    def send(self, tile: SharedTile, part: int = 0) -> None:
        """Copies a warp's rows of all slabs of a part."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for slab in self.config.parts[part]:
                source = tile.rows + slab * SLAB_BYTES
                numbers.copy_to_cluster(source + tile.distance, source, GROUP_BYTES, tile.barrier)

    def finish(self, memory, stage, phase) -> None:
        """Waits for the other CTA after the last tile, see `drains`."""
        if self.drains:
            drain(self.config, memory, stage, phase)

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane, part: cutlass.Constexpr = 0):
        """Announces a part of a tile, after the fence of the copies. The first warp also says how many bytes the other
        CTA sends."""
        barrier = memory.full + self.config.part_number(stage, part)
        if lane == 0:
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.sent_bytes(part))
            else:
                cute.arch.mbarrier_arrive(barrier)


def drain(config: MlaConfig, memory, stage, phase) -> None:
    """Waits until both CTAs of a pair have released all tiles. The other CTA then has all that this one sent or asked
    for, and its last arrival is here, so this one may exit."""
    for _ in range(NUM_STAGES):
        for part in range(config.tile_parts):
            cute.arch.mbarrier_wait(memory.empty + config.part_number(stage, part), phase)
        stage, phase = advance(stage, phase, NUM_STAGES)
