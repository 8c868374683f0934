"""The destinations of decoded rows: tiles in the CTA's own shared memory, or in the shared memory of both CTAs of a
pair (crossover).

A destination has methods that say which rows of a block a warp decodes, store these rows, send them to the other CTA,
and announce a tile to consumers.
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
    """The destination of a CTA that decodes whole tiles for itself."""

    def __init__(self, config: MlaConfig):
        self.config = config

    def first_row(self, warp):
        """Returns the first row of a block that a warp loads."""
        return warp * (self.config.warp_groups * GROUP_TOKENS)

    def link(self, memory, first_row):
        """Returns None, since there is no other CTA."""
        return

    def publish_flags(self, memory, link, stage, group, valid, lane) -> None:
        """Stores which of a group's 8 tokens exist, for the consumers."""
        write_flags(memory, stage, group, valid, lane)

    def tile(self, memory, link, stage, group: int):
        """Returns the address, in a tile's first slab, of the warp's ``group``-th group of 8 rows. Lanes add their
        offsets to it."""
        return memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES

    def here(self, tile):
        """Returns the address of a tile in the CTA's own memory."""
        return tile

    def store(self, tile, place, offset: int, values) -> None:
        """Stores 16 bytes of a tile."""
        ptx.store_shared(tile + place, offset, values)

    def send(self, tile) -> None:
        """Does nothing, since no other CTA needs the rows that a warp has written."""

    def finish(self, memory, stage, phase) -> None:
        """Does nothing after the last tile, since there is no other CTA for which to wait."""

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane):
        """Arrives on the full barrier of a tile, when the warp's rows are written."""
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
    """The destination of a warp's rows in the two CTAs of a pair; run-time values. It has the address of the rows in
    this CTA, the distance in bytes to the same rows in the other CTA's memory, and the other CTA's barrier, which
    counts the bytes of the rows that it receives.
    """

    address: Int32
    rows: Int32  # of the warp's group, the same in all lanes
    distance: Int32
    barrier: Int32


class CrossoverTiles:
    """The destination of a CTA that decodes half of every block's tokens. It writes rows to its own tile and copies
    them to the other CTA, which decodes the other half.

    Crossover is from FlashMLA's FP8 kernel (DeepSeek 2025), whose threads store everything twice. Here one bulk copy
    sends the 8 rows of a slab that a warp has written, 1 KB. The rows of all slabs are sent after one fence, since a
    fence waits for loads in flight.

    drains: whether producers wait at the end until both CTAs have released all tiles. A cooperative combine does other
    work first, then waits itself.
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
        """Copies a warp's rows of all slabs of a part to the other CTA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for slab in self.config.parts[part]:
                source = tile.rows + slab * SLAB_BYTES
                numbers.copy_to_cluster(source + tile.distance, source, GROUP_BYTES, tile.barrier)

    def finish(self, memory, stage, phase) -> None:
        """Waits for the other CTA after the last tile, if ``drains`` is set."""
        if self.drains:
            drain(self.config, memory, stage, phase)

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane, part: cutlass.Constexpr = 0):
        """Arrives on the full barrier of a part of a tile, after the fence of :meth:`send`. The first warp also
        announces the bytes that the other CTA sends."""
        barrier = memory.full + self.config.part_number(stage, part)
        if lane == 0:
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.sent_bytes(part))
            else:
                cute.arch.mbarrier_arrive(barrier)


def drain(config: MlaConfig, memory, stage, phase) -> None:
    """Waits until both CTAs of a pair have released all tiles. By then the other CTA has received everything that this
    CTA sent or loaded for it, and will not arrive at a barrier of this CTA again. So this CTA may exit.
    """
    for _ in range(NUM_STAGES):
        for part in range(config.tile_parts):
            cute.arch.mbarrier_wait(memory.empty + config.part_number(stage, part), phase)
        stage, phase = advance(stage, phase, NUM_STAGES)
