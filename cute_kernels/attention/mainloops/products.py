"""The MMAs of a block of tokens, Q K^T and P V, with operands of 16 bits or E4M3."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float8E4M3FN

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import WARPGROUP_ROWS
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.mainloops import fp8
from cute_kernels.device import wgmma_tiles

MMA_K = 16  # the K of a 16-bit MMA


class HalfProducts:
    """The MMAs with operands of 16 bits."""

    def __init__(self, config: ExtendConfig):
        self.config, (self.keys, self.values) = config, map(of_name, config.operand_types)
        self.packed_words = config.tile_tokens // 4  # of a thread's probabilities

    def score(self, scores, memory, group, stage) -> None:
        """Issues the MMAs of a block's scores. The caller commits them."""
        config = self.config
        place = memory.tile_pointer + memory.tile(KEYS, stage)
        keys = wgmma_tiles.tile(place, config.tile_tokens, config.columns, self.keys.type)
        place = memory.query_pointer + group * config.query_bytes
        queries = wgmma_tiles.tile(place, WARPGROUP_ROWS, config.columns, self.keys.type)
        wgmma_tiles.begin()
        steps = range(config.head_dim // MMA_K)  # what follows is zeros
        wgmma_tiles.multiply(scores, queries, keys, config.tile_tokens, zero=True, steps=steps)

    def multiply_values(self, sums, packed, memory, stage) -> None:
        """Issues sums += P V of a block. The caller commits the MMAs."""
        config, columns = self.config, self.config.operand_columns[VALUES]
        place = memory.tile_pointer + memory.tile(VALUES, stage)
        values = wgmma_tiles.transposed_tile(place, config.tile_tokens, columns, self.values.type)
        layout = cute.make_layout(((2, 2, 2), 1, config.tile_tokens // MMA_K))
        weights = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=self.values.type), layout)
        wgmma_tiles.begin()
        wgmma_tiles.multiply(sums, weights, values, columns, b_transposed=True)

    def pack(self, values, packed) -> None:
        """Packs probabilities as the A operand of the next MMA."""
        for i in range(0, self.config.tile_tokens // 2, 2):
            packed[i // 2] = self.values.pack(values[i], values[i + 1])


class Fp8Products:
    """The MMAs with operands in E4M3. Accumulators begin at zero for each block."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.rows = config.columns + config.ones_rows  # of V's transpose, and those of ones after them
        self.packed_words = config.tile_tokens // 8

    def score(self, scores, memory, group, stage) -> None:
        config = self.config
        place = memory.tile_pointer + memory.tile(KEYS, stage)
        keys = wgmma_tiles.tile(place, config.tile_tokens, config.columns, Float8E4M3FN)
        place = memory.code_pointer + group * config.query_code_bytes
        queries = wgmma_tiles.tile(place, WARPGROUP_ROWS, config.columns, Float8E4M3FN)
        wgmma_tiles.begin()
        fp8.multiply(scores, queries, keys, config.tile_tokens)

    def multiply_values(self, sums, packed, memory, stage) -> None:
        """Issues sums = P V of a block, and P times the rows of ones. The caller commits the MMAs."""
        config = self.config
        place = memory.tile_pointer + memory.tile(VALUES, stage)
        values = wgmma_tiles.tile(place, self.rows, config.tile_tokens, Float8E4M3FN)
        layout = cute.make_layout(((4, 2, 2), 1, config.tile_tokens // fp8.MMA_K))
        weights = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=Float8E4M3FN), layout)
        wgmma_tiles.begin()
        fp8.multiply(sums, weights, values, self.rows)

    def pack(self, values, packed) -> None:
        for word in range(self.packed_words):
            packed[word] = fp8.pack_e4m3x4([values[i] for i in fp8.accumulators_of(word)])
