"""The producer warps of a decode attention CTA, which keep its ring of K and V tiles full."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.barriers import announce_ready, await_merged, await_rows, sync_producers
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.loads.copies import TileCopier
from cute_kernels.device.pipeline import PipelineState, fence_init


class RingFiller:
    """The producer warps' loop: it loads tiles, with :class:`TileCopier`, into stages that the consumer warps have
    released.

    Every stage has two barriers: full, on which a tile's bytes arrive, and empty, on which every consumer warp arrives
    when it has read the tile.

    writes_rows: whether the kernel's own consumer warps write the newest token's rows.
    """

    def __init__(self, config: DecodeConfig, copier: TileCopier, writes_rows: bool = False):
        self.config = config
        self.copier = copier
        self.writes_rows = writes_rows

    def make_pages(self):
        """Makes registers for (page, row of the page) pairs: one pair for each stage of the ring, and one more."""
        pages = cute.make_rmem_tensor(2 * (self.config.pipeline.num_stages + 1), Int32)
        pages.fill(0)
        return pages

    def make_early_pages(self):
        """Makes registers for the pages of the unit that a CTA expects. Returns None if the CTA loads no pages before
        it knows its unit."""
        config = self.config
        # A window's first tile is not known before the length is; warps that lend registers have none left for pages.
        early = config.page_tokens > 0 and not config.features.window and not config.lends_registers
        return self.make_pages() if early else None

    @cute.jit
    def find_pages(self, tiles, row, token: Int32, stride: Int32, pages, lane):
        """Starts loading the pages of tiles into ``pages``. The first tile begins with ``token``, the following tiles
        begin ``stride`` tokens apart.
        """
        for i in cutlass.range_constexpr(self.config.pipeline.num_stages + 1):
            page, place = self.copier.find_pages(tiles, row, token + i * stride, lane)
            pages[2 * i], pages[2 * i + 1] = page, place

    @cute.jit
    def start(self, tiles, row, part, parts, pages, early, producer, lane):
        """Initialises the barriers, unless the kernel has done so (``writes_rows``). Then starts loading the tile that
        the CTA expects to be the first of its unit, if the configuration has an early tile and ``early`` holds. The
        tile may lie beyond the request's end.

        pages: registers for the pages of the expected unit's first tiles, whose loads are started, too; None: no pages
        are loaded. If the CTA gets another unit, tile and pages are not used.
        """
        config = self.config
        alone = config.filling_warps == 1
        # Barriers that the first tile needs are initialised before it, the others after its loads are issued.
        first = config.pipeline.early_tiles if alone else 2 * config.pipeline.num_stages
        token = part * config.tile_tokens
        if const_expr(pages is not None):
            self.find_pages(tiles, row, token, parts * config.tile_tokens, pages, lane)
        if const_expr(not self.writes_rows):  # else `DecodeKernel.kernel` has, before it waited for the previous launch
            self.init_barriers(tiles.pipeline, 0, first, producer, lane)
        sync_producers(config)
        if const_expr(config.pipeline.early_tiles > 0):
            if early:
                page, place = (
                    (pages[0], pages[1]) if pages is not None else self.copier.find_pages(tiles, row, token, lane)
                )
                entered = self.copier.enter(tiles, row)
                begin = tiles.pipeline.producer_state()
                self.copier.copy_tile(entered, row, token, tiles.max_seq_len, begin, producer, lane, page, place)
        if const_expr(not self.writes_rows):
            self.init_barriers(tiles.pipeline, first, 2 * config.pipeline.num_stages, producer, lane)
        announce_ready(config)

    @cute.jit
    def init_barriers(self, pipeline, begin: int, end: int, producer, lane):
        """Initialises barriers ``begin`` to ``end`` - 1. Full barriers have the lower indices, empty barriers the
        higher ones.
        """
        if const_expr(begin < end):
            if producer == 0:
                if lane == 0:
                    for i in cutlass.range_constexpr(begin, end):
                        arrivals = pipeline.fills if i < pipeline.num_stages else pipeline.releases
                        cute.arch.mbarrier_init(pipeline.full + i, arrivals)
                    fence_init()
                cute.arch.sync_warp()

    @cute.jit
    def fill(self, cta, work, state: PipelineState, issued: Int32, pages, known, later):
        """Loads the tiles of one unit as stages become free. Loads of the unit's first ``issued`` tiles have been
        issued already.

        Args:
            state: the consumer warps' pipeline state at the unit's first tile.
            known: whether ``pages``, if any, are the pages of this unit's tiles.
            later: whether the CTA has processed a unit before.
        """
        config, lane = self.config, cta.lane
        producer = cta.warp - config.num_warps
        tiles = self.copier.enter(cta.tiles, work.request)
        pipeline = cta.pipeline
        token, stride = work.begin, work.stride
        # The consumers' state with the other parity: a new empty barrier passes it, so the first round does not wait.
        state = PipelineState(state.stage, state.phase ^ 1)
        if const_expr(config.after_append and "word" in config.copies):
            # Copies of words go through L1, which may keep the beginning of a new row from before it was written.
            cute.arch.griddepcontrol_wait()
        page, place = Int32(0), Int32(0)
        if const_expr(config.page_tokens > 0):
            if const_expr(pages is None):
                pages = self.make_pages()
                self.find_pages(tiles, work.request, token, stride, pages, lane)
            elif not known:
                self.find_pages(tiles, work.request, token, stride, pages, lane)
        if const_expr(config.units and not config.merge_offset):
            if later:
                await_merged(config)
        if const_expr(config.page_tokens > 0):
            for i in cutlass.range_constexpr(config.pipeline.num_stages):
                if (issued <= i) & (token < work.stop):
                    self.acquire(pipeline, state, work, token)
                    self.copier.copy_tile(
                        tiles, work.request, token, work.length, state, producer, lane, pages[2 * i], pages[2 * i + 1]
                    )
                token = token + stride
                state = pipeline.next(state)
            page, place = pages[2 * config.pipeline.num_stages], pages[2 * config.pipeline.num_stages + 1]
        elif issued > 0:
            token = token + stride
            state = pipeline.next(state)
        while token < work.stop:
            self.acquire(pipeline, state, work, token)
            self.copier.copy_tile(tiles, work.request, token, work.length, state, producer, lane, page, place)
            token = token + stride
            page, place = self.copier.find_pages(tiles, work.request, token, lane)
            state = pipeline.next(state)

    @cute.jit
    def acquire(self, pipeline, state: PipelineState, work, token: Int32):
        """Waits until a tile's stage is empty and the tile's tokens are in the cache.

        A warp may have nothing to copy of a partial tile. The tile can then be filled, read and released without this
        warp. If the warp is late, it mistakes the stage's next phase for this phase. So producer warps wait for each
        other before a partial tile. With copies by words they need not wait, since every producer thread arrives for
        each tile.
        """
        pipeline.producer_acquire(state)
        if const_expr("word" not in self.config.copies):
            if token + self.config.tile_tokens > work.length:
                sync_producers(self.config)
        self.await_append(work, token)

    def finish(self) -> None:
        """Ends the producers' work. It is called when all tiles of the CTA's units are in flight."""
        self.copier.drain()
        self.let_next_begin()

    def let_next_begin(self) -> None:
        """Lets the next launch begin, once all tiles of this CTA are in flight and the append has ended. It does so
        only in kernels that follow an append.

        If the next launch began together with this CTA, the two would only compete. This method also waits for the
        append, so that the next launch finds all earlier launches finished; the append has usually ended by now.
        """
        if const_expr(self.config.after_append):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def await_append(self, work, token):
        """Waits until a tile's new tokens are in the cache, before the tile is loaded. Waiting again costs nothing.

        In a kernel that writes the newest rows itself, only a tile that may hold the newest token waits. In a kernel
        after an append, a unit's first tile waits only if it has new tokens; all later tiles wait. Loading later tiles
        during the append would delay the append's loads, and would save no time.
        """
        if const_expr(self.writes_rows):
            if token + self.config.tile_tokens >= work.length:
                await_rows(self.config)
                cute.arch.fence_proxy("async.global")
        elif const_expr(self.config.after_append and "word" not in self.config.copies):
            later = token > work.begin
            if later | (token + self.config.tile_tokens > work.length - work.place.shape.q_len):
                cute.arch.griddepcontrol_wait()
                # Rows were written by ordinary stores and are read by bulk copies, whose order among each other only a
                # fence makes, or a kernel's end; the PTX ISA does not say that the wait stands for the latter.
                cute.arch.fence_proxy("async.global")
