"""Copying warps where every slice of a tile has a ring of its own: see :class:`SliceFiller`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.barriers import announce_ready
from cute_kernels.attention.filler import RingFiller
from cute_kernels.device.ring import advance


class SliceFiller(RingFiller):
    """Fills as many rings as a tile has slices, side by side in the ring's memory, each read by one attending warp.

    A warp starts as soon as its own tokens have come, and their place is asked for again as soon as it has read them:
    warps drift apart by up to a round of the ring, and at the end the last tokens find an SM that has nothing else to
    do. Copying warps share the slices evenly and go round their own in a fixed order, so a place may wait for another
    slice's, of the same tile and copying warp. A slice takes part in a tile if the request has tokens there.
    """

    def own_slices(self, copier) -> list:
        """The slices of one copying warp."""
        return [copier + i * self.config.copiers for i in range(self.config.num_slices // self.config.copiers)]

    @cute.jit
    def start(self, tiles, row, part, parts, pages, early, copier, lane):
        """Initialises the barriers of the warp's slices and asks for what the cache has of the first tile."""
        config = self.config
        # What the first tile needs comes first.
        self.init_stages(tiles.full, 0, config.early_tiles, copier, lane)
        if const_expr(config.early_tiles > 0):
            if early:
                entered = self.copier.enter(tiles, row)
                token = part * config.tile_tokens
                for ring in self.own_slices(copier):
                    first = token + ring * config.slice_tokens
                    self.copier.copy_slice(entered, first, tiles.max_seq_len, Int32(0), ring, lane)
        self.init_stages(tiles.full, config.early_tiles, 2 * config.num_stages, copier, lane)
        announce_ready(config)

    @cute.jit
    def init_stages(self, barriers, begin: int, end: int, copier, lane):
        """Initialises the barriers of the warp's slices: full ones of all stages, then empty ones, from begin to end.

        One lane does, at addresses that differ by constants: the instruction takes one address of a warp at a time. One
        arrival completes any of them.
        """
        if const_expr(begin < end):
            if lane == 0:
                for stage in cutlass.range_constexpr(begin, end):
                    for ring in self.own_slices(copier):
                        cute.arch.mbarrier_init(barriers + (stage * self.config.num_rings + ring), 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()

    @cute.jit
    def fill(self, cta, work, stage: Int32, phase: Int32, issued: Int32, pages, known):
        """Keeps the warp's rings full for one unit; arguments as :meth:`RingFiller.fill` has them."""
        config, lane = self.config, cta.lane
        copier = cta.warp - config.num_warps
        tiles = self.copier.enter(cta.tiles, work.request)
        empty = cta.barriers + config.num_places
        token, stride = work.first_token(config), work.num_parts * config.tile_tokens
        phase = phase ^ 1  # nothing waits on the first round
        if issued > 0:
            token = token + stride
            stage, phase = advance(stage, phase, config.num_stages)
        while token < work.length:
            for ring in self.own_slices(copier):
                first = token + ring * config.slice_tokens
                if first < work.length:
                    cute.arch.mbarrier_wait(empty + (stage * config.num_rings + ring), phase)
                    self.await_append(work, token)
                    self.copier.copy_slice(tiles, first, work.length, stage, ring, lane)
            token = token + stride
            stage, phase = advance(stage, phase, config.num_stages)
