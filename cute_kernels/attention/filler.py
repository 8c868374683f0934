"""What the copying warps of a decode attention CTA do: they keep its ring of K and V tiles full."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.barriers import announce_ready, sync_copying
from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.copies import TileCopier
from cute_kernels.device.ring import advance


class RingFiller:
    """Asks for tiles, as :class:`TileCopier` does it, into places of the ring that the attending warps have left.

    Every place has two barriers: one on which a tile's bytes arrive, and one on which every attending warp says that it
    has read the tile.
    """

    def __init__(self, config: DecodeConfig, copier: TileCopier):
        self.config = config
        self.copier = copier

    @cute.jit
    def start(self, tiles, row, part, early, copier, lane):
        """Initialises the barriers and asks for the first tile if the cache, maybe not the request, has it."""
        config = self.config
        alone = config.copiers == 1
        # What the first tile needs comes first.
        first = config.early_tiles if alone else 2 * config.num_stages
        self.init_barriers(tiles.full, 0, first, copier, lane)
        sync_copying(config)
        if const_expr(config.early_tiles > 0):
            if early:
                token = part * config.tile_tokens
                page, place = self.copier.find_pages(tiles, row, token, lane)
                entered = self.copier.enter(tiles, row)
                self.copier.copy_tile(
                    entered, row, token, tiles.max_seq_len, Int32(0), copier, lane, page, place
                )  # fmt: skip
        self.init_barriers(tiles.full, first, 2 * config.num_stages, copier, lane)
        announce_ready(config)

    @cute.jit
    def init_barriers(self, barriers, begin: int, end: int, copier, lane):
        """Initialises some of the barriers: those of full stages, then those of empty ones."""
        if const_expr(begin < end):
            if copier == 0:
                if lane == 0:
                    for i in cutlass.range_constexpr(begin, end):
                        full = i < self.config.num_stages
                        arrivals = self.copier.arrivals if full else self.config.num_warps
                        cute.arch.mbarrier_init(barriers + i, arrivals)
                    cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()

    @cute.jit
    def fill(self, cta, work, stage: Int32, phase: Int32, issued: Int32):
        """Keeps the ring full for one unit; ``issued`` of its tiles are on their way.

        stage, phase: of the ring's place that the attending warps read first.
        """
        config, lane = self.config, cta.lane
        copier = cta.warp - config.num_warps
        tiles = self.copier.enter(cta.tiles, work.request)
        empty = cta.barriers + config.num_stages
        token, stride = work.first_token(config), work.num_parts * config.tile_tokens
        phase = phase ^ 1  # nothing waits on the first round
        if const_expr(config.after_append and "word" in config.copies):
            # Copies of words go through L1, which may keep the beginning of a new row from before it was written.
            cute.arch.griddepcontrol_wait()
        page, place = Int32(0), Int32(0)
        if const_expr(config.page_tokens > 0):
            # The pages of a whole ring are asked for at once.
            pages = [
                self.copier.find_pages(tiles, work.request, token + i * stride, lane)
                for i in range(config.num_stages + 1)
            ]
            for i in cutlass.range_constexpr(config.num_stages):
                if (issued <= i) & (token < work.length):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    self.await_append(work, token)
                    self.copier.copy_tile(tiles, work.request, token, work.length, stage, copier, lane, *pages[i])
                token = token + stride
                stage, phase = advance(stage, phase, config.num_stages)
            page, place = pages[-1]
        elif issued > 0:
            token = token + stride
            stage, phase = advance(stage, phase, config.num_stages)
        while token < work.length:
            cute.arch.mbarrier_wait(empty + stage, phase)
            self.await_append(work, token)
            self.copier.copy_tile(tiles, work.request, token, work.length, stage, copier, lane, page, place)
            token = token + stride
            page, place = self.copier.find_pages(tiles, work.request, token, lane)
            stage, phase = advance(stage, phase, config.num_stages)
        self.copier.drain()

    @cute.jit
    def await_append(self, work, token):
        """Before a tile with new tokens, waits until they are in the cache. Waiting again costs nothing.

        So it does before every tile but the unit's first: whatever else is asked for delays the append's own loads, and
        cannot be used before it is done.
        """
        if const_expr(self.config.after_append and "word" not in self.config.copies):
            later = token > work.first_token(self.config)
            if later | (token + self.config.tile_tokens > work.length - work.place.shape.q_len):
                cute.arch.griddepcontrol_wait()
                # Rows were written by ordinary stores and are read by bulk copies, whose order among each other only a
                # fence makes, or a kernel's end; the PTX ISA does not say that the wait stands for the latter.
                cute.arch.fence_proxy("async.global")
