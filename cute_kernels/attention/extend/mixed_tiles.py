"""The producers of caches of which K or V is of 16 bits and the other one of codes.

Half of the warps decode rows as in :mod:`.decode`; of the other half the first one asks for tiles as in
:mod:`.tma_tiles`. Consumers want V's powers of 2 with K's tile: where V's rows have scales, all of K's warps look at
them, each at those of the rows that one of V's warps decodes.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.attention.extend.config import ExtendConfig
from cute_kernels.attention.extend.decode import RowProducer, RowRuns
from cute_kernels.attention.extend.memory import KEYS, VALUES
from cute_kernels.attention.extend.powers import word_of
from cute_kernels.attention.extend.tma_tiles import TmaTileProducer


class MixedProducer:
    """The producer warps."""

    def __init__(self, config: ExtendConfig):
        self.config, self.runs = config, RowRuns(config)
        self.decoder, self.copier = RowProducer(config), TmaTileProducer(config)
        self.tells_powers = config.tile_scales[VALUES]

    def make_maps(self, k_cache: cute.Tensor, v_cache: cute.Tensor):
        """On the host: a tensor map of the one in 16 bits; None for the other."""
        caches = k_cache, v_cache
        return tuple(
            None if self.config.decoded[operand] else self.copier.make_map(operand, caches[operand])
            for operand in (KEYS, VALUES)
        )

    @cute.jit
    def fill(self, source, work, span, first_valid, memory, warp: Int32, lane: Int32, stage: Int32, phase: Int32):
        """Fills the tiles of a work tile, the last block first; the ring's next stage and phase."""
        given = (source, work, span, first_valid, memory)
        if warp < self.config.tile_warps:
            stage, phase = self.fill_tiles(KEYS, *given, warp, lane, stage, phase)
        else:
            stage, phase = self.fill_tiles(VALUES, *given, warp - self.config.tile_warps, lane, stage, phase)
        return stage, phase

    def fill_tiles(self, operand: int, *given):
        """K's or V's."""
        if self.config.decoded[operand]:
            return self.decoder.fill_tiles(operand, *given)
        return self.copier.fill_by(partial(self.copy_tile, operand), *given)

    @cute.jit
    def copy_tile(
        self,
        operand: cutlass.Constexpr,
        source,
        work,
        memory,
        block: Int32,
        first_valid: Int32,
        found: Int32,
        place: Int32,
        warp: Int32,
        lane: Int32,
        stage: Int32,
        phase: Int32,
    ):
        """One of 16 bits. warp: of those that have K's or V's."""
        if const_expr(operand == KEYS and self.tells_powers):
            self.tell_powers(source, work, first_valid, memory, block, warp, lane, stage, phase)
        if warp == 0:
            self.copier.copy(operand, source, work, memory, block, first_valid, found, place, lane, stage, phase)

    @cute.jit
    def tell_powers(
        self, source, work, first_valid, memory, block: Int32, warp: Int32, lane: Int32, stage: Int32, phase: Int32
    ):
        """With K's tile, once it is free, what the rows of V that are the warp's are to be multiplied with. The first
        warp says with the copy that it has."""
        writer = self.decoder.writers[VALUES]
        places, scales = self.runs.make(), cute.make_rmem_tensor(self.config.scale_words[VALUES], Uint32)
        self.runs.ask(places, source, work, block, warp)
        writer.rows.load_scales(scales, places, source, work, first_valid, block, warp, lane)
        number = memory.barrier(KEYS, stage)
        cute.arch.mbarrier_wait(memory.empty + number, phase)
        exponent = writer.exponent_of(scales, self.config.scale_words[VALUES])
        writer.tell(word_of(Int32(0), exponent), memory.scales_of(KEYS, stage) + warp * 4, lane)
        cute.arch.sync_warp()
        if (lane == 0) & (warp > 0):
            cute.arch.mbarrier_arrive(memory.full + number)
