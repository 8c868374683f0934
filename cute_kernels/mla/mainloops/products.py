"""The MMAs of a tile (scores, and weights times values), and the registers that they change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import wgmma_tiles
from cute_kernels.device.types import RegisterTensor
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, V_HEAD_DIM, MlaConfig
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.layout import HALF_SLABS
from cute_kernels.mla.loads.gather import SLAB_BYTES
from cute_kernels.mla.mainloops import softmax
from cute_kernels.mla.mainloops.pipeline import TilePipeline

HALF = V_HEAD_DIM // 2  # columns of the output that a warpgroup keeps
HALF_ACC = HALF // 2  # accumulators of a thread


@dataclass(frozen=True)
class Rows:
    """A thread's state of its two rows, in registers that every block of tokens updates."""

    acc: RegisterTensor[Float32]  # fp32 [128] of the output
    scores: RegisterTensor[Float32]  # fp32 [32]
    packed: RegisterTensor[Uint32]  # weights, pairs of 16-bit numbers [16]
    maxima: RegisterTensor[Float32]  # fp32 [2]: of unscaled scores, among all that the row has seen
    totals: RegisterTensor[Float32]  # fp32 [2]: of weights

    @staticmethod
    def make() -> Rows:
        """Makes the state of rows before the first token."""
        rows = Rows(
            wgmma_tiles.make_sums(HALF),
            wgmma_tiles.make_sums(BLOCK_TOKENS),
            cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32),
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
        )
        rows.acc.fill(0.0)
        rows.maxima.fill(softmax.LOWEST)
        rows.totals.fill(0.0)
        return rows


@dataclass(frozen=True)
class Scoring:
    """The first warpgroup's state over the blocks of a work tile.

    Attributes:
        rows: a thread's registers for its two rows.
        scale: the factor that turns scores into exponents of 2.
        factors: fp32 [2], by which a block rescales earlier accumulators; only for `Stepped` and `DelayedPV`.
        places: the address of a thread's weights in shared memory; only for `Stepped` and `DelayedPV`.
        held: the queries in registers, by slab; only for `DelayedPV`.
    """

    rows: Rows
    scale: Float32
    factors: RegisterTensor[Float32] | None = None
    places: Int32 | None = None
    held: dict[int, Any] | None = None


class Products:
    """The MMAs that warpgroups issue. Mainloops wait for them."""

    def __init__(self, config: MlaConfig, pipeline: TilePipeline):
        self.config, self.pipeline = config, pipeline
        self.elements = of_name(config.layout.dtype)

    def score(self, scores, memory, stage, phase) -> None:
        """Waits for a tile, issues scores = queries times its keys, and commits."""
        self.pipeline.await_tile(memory, stage, phase)
        wgmma_tiles.begin()
        for first, count in self.config.layout.score_runs:
            columns = count * wgmma_tiles.SLAB_COLUMNS
            place = memory.tile_pointer + (stage * self.config.tile_bytes + first * SLAB_BYTES)
            keys = wgmma_tiles.tile(place, BLOCK_TOKENS, columns, self.elements.type)
            place = memory.query_pointer + first * SLAB_BYTES
            queries = wgmma_tiles.tile(place, BLOCK_HEADS, columns, self.elements.type)
            wgmma_tiles.multiply(scores, queries, keys, BLOCK_TOKENS, zero=first == 0)
        wgmma_tiles.commit()

    def add_values(self, acc, weights, memory, stage, half: int, steps: range | None = None) -> None:
        """Issues accumulators += weights times half of the values of a tile; the caller commits. half: 0 left, 1 right.

        steps: the steps of 16 tokens to add; default all.
        """
        place = memory.tile_pointer + (stage * self.config.tile_bytes + half * HALF_SLABS * SLAB_BYTES)
        width = self.config.value_columns
        wgmma_tiles.begin()
        for part in range(HALF // width):
            slabs = place + part * (width // wgmma_tiles.SLAB_COLUMNS * SLAB_BYTES)
            values = wgmma_tiles.transposed_tile(slabs, BLOCK_TOKENS, width, self.elements.type)
            own = wgmma_tiles.part_of_sums(acc, width, part)
            wgmma_tiles.multiply(own, weights, values, width, b_transposed=True, steps=steps)

    def weight_tile(self, memory) -> cute.Tensor:
        """Returns the weights in shared memory as an A operand [64 heads, 64 tokens]."""
        return wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.elements.type)

    def weight_fragment(self, packed) -> cute.Tensor:
        """Returns packed weights, in the order of the scores' accumulators, as an A operand in registers."""
        layout = cute.make_layout(((2, 2, 2), 1, BLOCK_TOKENS // 16))
        return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=self.elements.type), layout)
