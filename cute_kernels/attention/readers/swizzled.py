"""Bare elements in swizzled tiles: which rows of a matrix a lane addresses. See :mod:`layouts.kv.swizzled_tile`."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.tiles import tiles_of
from cute_kernels.device import ptx
from layouts.kv.swizzled_tile import CHUNK_BYTES, LOAD_CHUNKS, SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS


class SwizzledLoads:
    """ldmatrix loads of the rows of a block: each of 16 tokens and two chunks of a row."""

    config: DecodeConfig
    tile: SwizzledTile
    transposed: bool

    def _take_tile(self, config: DecodeConfig, operand: int):
        tile = tiles_of(config)[operand]
        assert isinstance(tile, SwizzledTile)
        self.config, self.tile, self.transposed = config, tile, operand == 1
        self.num_loads = -(-tile.num_chunks // LOAD_CHUNKS)  # per 16 tokens
        self.panel_loads = tile.row_chunks // LOAD_CHUNKS

    def block_offset(self, block: int) -> int:
        """Bytes from a slice's first block of tokens to another."""
        return block * BLOCK_TOKENS * self.tile.row_bytes

    def lane_offsets(self, lane: Int32, head: Int32, slice_index: Int32) -> list[Any]:
        """A lane's ldmatrix address for each load of a panel; the swizzle makes it more than a sum."""
        tile = self.tile
        token, chunk = (tile.v_row if self.transposed else tile.k_row)(lane)
        base = Int32(head * tile.head_bytes) + slice_index * (self.config.slice_tokens * tile.row_bytes)
        row = base + token * tile.row_bytes
        loads = range(1 if self.config.shares_queries else min(self.panel_loads, self.num_loads))
        return [ptx.pinned(row + ((chunk + LOAD_CHUNKS * i) ^ tile.swizzle(token)) * CHUNK_BYTES) for i in loads]

    def load(self, lane_offsets, tile_address: Int32, block_offset: int, pair: int, load: int) -> list[Any]:
        """Four 8 x 8 matrices of 16-bit units, of the 16 tokens of row halves 2 pair and 2 pair + 1."""
        offset = block_offset + self.tile.load_offset(pair, load)
        place = load % self.panel_loads
        if place < len(lane_offsets):
            address = lane_offsets[place] + tile_address
        else:
            # Rows are aligned to panels: chunks of a row differ in bits of the address, swizzled or not.
            address = (lane_offsets[0] + tile_address) ^ (place * LOAD_CHUNKS * CHUNK_BYTES)
        return ptx.load_matrix_x4(address, offset, transpose=self.transposed)
