"""Decodes FP8 tokens of a cache into rows of a bf16 tile: the loads, the arithmetic and the stores of a lane.

A warp loads 8 tokens at a time; lane l has token l % 8. Its i-th load takes 16 bytes from byte 64 i + 16 (l / 8) of the
token's 512 or 448 codes. Shared memory handles a 16-byte store 8 lanes at a time. These lanes write different pieces of
the 8 rows of a swizzle atom, so there are no bank conflicts. Every address is one of three addresses that a lane keeps,
plus a constant. Loads for the next 8 tokens go into the registers that have just been decoded. So all loads of a warp
are always in flight, even while it waits for a free tile.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.mla.config import MlaConfig
from cute_kernels.mla.loads.dequantize import Dequantizer, Factors
from cute_kernels.mla.loads.destination import CrossoverTiles, OwnTiles
from cute_kernels.mla.loads.gather import SLAB_BYTES, LanePlaces
from cute_kernels.mla.loads.locate import Token

ROPE_LOADS = 2  # of 16 bytes a lane; codes take one for every slab


class TokenDecoder:
    """The loads and stores of a producer lane for its token.

    Attributes:
        tiles: the destination of rows, `OwnTiles` or `CrossoverTiles`.
        constant: whether loads of tokens are marked as loads of constant memory. The compiler may postpone such loads.
    """

    def __init__(self, config: MlaConfig, tiles: OwnTiles | CrossoverTiles, constant: bool):
        self.config, self.tiles, self.constant = config, tiles, constant
        self.layout = config.layout
        self.num_loads = self.layout.code_slabs + ROPE_LOADS
        self.last_chunk = (self.num_loads - 1) // config.tiles.load.chunk * config.tiles.load.chunk  # its first piece
        self.scale_words = self.layout.scale_bytes // 4
        self.dequantizer = Dequantizer(config.tiles.load.scales, self.scale_words, exponents=self.layout.is_split)

    def registers(self) -> tuple[Any, Any]:
        """Makes the registers for (a token's words, its scales)."""
        words = cute.make_rmem_tensor(4 * self.num_loads, Uint32)
        return words, cute.make_rmem_tensor(self.scale_words, Uint32)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def load_piece(self, words, token: Token, place: LanePlaces, i: int, constant: bool = True) -> None:
        """Starts loading a lane's i-th 16 bytes; the codes come first, then the RoPE columns. constant: see
        :meth:`load`."""
        codes = self.layout.code_slabs
        offset = 64 * i if i < codes else self.layout.rope_offset + 64 * (i - codes)
        for j, word in enumerate(self.load(token.valid, token.address + place.source, offset, 4, constant)):
            words[4 * i + j] = word

    def load_scales(self, scales, token: Token, constant: bool = True) -> None:
        """Starts loading a token's scales. constant: see :meth:`load`."""
        offset = self.layout.scales_offset
        base = token.behind if offset is None else token.address
        for j, word in enumerate(self.load(token.valid, base, offset or 0, self.scale_words, constant)):
            scales[j] = word

    def load(self, condition, address, offset: int, num_words: int, constant: bool) -> list[Uint32]:
        """Starts loading words of the cache; they are zeros if condition is 0.

        constant: whether this load is marked as a load of constant memory, which the compiler may postpone. No load is
        marked if ``self.constant`` is False.
        """
        return numbers.load_global_if(condition, address, offset, num_words, constant=constant and self.constant)

    # -- tiles --------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_group(self, words, scales, token, tile, place):
        """Decodes the tokens held in registers into rows of the tile, and starts loading most of ``token`` into the
        same registers. :meth:`load_last` loads the rest.

        The compiler postpones loads to the end of a basic block, since only later blocks use them. So each chunk is in
        a branch of its own, which is always taken: its loads cannot leave the branch.
        """
        factors = self.factors(scales)
        for chunk in cutlass.range_constexpr(0, self.num_loads, self.config.tiles.load.chunk):
            if const_expr(chunk < self.last_chunk):
                if numbers.active_lanes() != 0:
                    self.write_chunk(words, factors, tile, place, chunk, token)
            else:
                self.write_chunk(words, factors, tile, place, chunk, None)
        self.raise_large(factors, self.tiles.here(tile), place, range(self.layout.code_slabs))
        self.tiles.send(tile)

    def load_last(self, words, scales, token, place) -> None:
        """Starts loading the scales of ``token``, and its pieces for the registers of the last chunk. These loads must
        be issued after the fence that follows the tile's stores, since a fence waits for loads in flight. The compiler
        may move constant loads, so they are not marked constant.
        """
        self.load_scales(scales, token, constant=False)
        for i in range(self.last_chunk, self.num_loads):
            self.load_piece(words, token, place, i, constant=False)

    def factors(self, scales) -> Factors:
        """Returns the factors of a token's codes."""
        return self.dequantizer.factors(scales, self.layout.num_scales)

    def pieces_from(self, first: int) -> range:
        """Returns the indices of the lane's pieces in the chunk that begins with piece ``first``."""
        return range(first, min(first + self.config.tiles.load.chunk, self.num_loads))

    def write_chunk(self, words, factors: Factors, tile, place, first: int, token: Token | None) -> None:
        """Decodes and stores a chunk of the current token, which begins with piece ``first``. Unless ``token`` is None,
        starts loading the same pieces of ``token`` into the freed registers."""
        codes = self.layout.code_slabs
        for i in self.pieces_from(first):
            if i < codes:
                own = factors.scales[i // self.layout.slabs_per_scale]
                values = self.decode([words[4 * i + j] for j in range(4)], own)
                if token is not None:
                    self.load_piece(words, token, place, i)
                self.store_latent(values, i, tile, place)
            else:
                self.write_rope(words, i - codes, tile, place)
                if token is not None:
                    self.load_piece(words, token, place, i)

    def decode(self, codes: list[Uint32], factors) -> list[Uint32]:
        """Multiplies 16 codes, 4 words, by their scale; returns 8 words of two bf16."""
        return [pair for word in codes for pair in self.dequantizer.word(word, factors)]

    def store_latent(self, values: list[Uint32], slab: int, tile, place) -> None:
        """Stores a lane's 16 columns of a slab."""
        self.tiles.store(tile, place.even, slab * SLAB_BYTES, values[:4])
        self.tiles.store(tile, place.odd, slab * SLAB_BYTES, values[4:])

    @cute.jit
    def raise_large(self, factors: Factors, tile, place, slabs: cutlass.Constexpr):
        """Multiplies values that a lane has stored in ``slabs`` by 2**120, if their scale is too large to contain this
        factor. Such scales are very rare. tile: the tile's address.
        """
        if const_expr(self.dequantizer.any_scale):
            if cute.arch.vote_any_sync(reduce(or_, factors.large) != 0):
                for slab in slabs:
                    for half in (place.even, place.odd):
                        address = tile + half + slab * SLAB_BYTES
                        products = ptx.load_shared_vector(address, 0, 4)
                        raised = self.dequantizer.raised(products, factors, slab // self.layout.slabs_per_scale)
                        ptx.store_shared(address, 0, raised)

    def write_rope(self, words, i: int, tile, place) -> None:
        """Stores a lane's i-th 8 RoPE columns unchanged, from the registers into which they were loaded."""
        first = 4 * (self.layout.code_slabs + i)
        self.store_rope([words[first + j] for j in range(4)], i, tile, place)

    def store_rope(self, values: list[Uint32], i: int, tile, place) -> None:
        """Stores a lane's i-th 8 RoPE columns. values: 4 words."""
        # Piece 4 + p of a row is 4 pieces from p whatever the row: the swizzle leaves that bit to itself.
        offset = place.rope ^ (4 * wgmma_tiles.PIECE_BYTES * i)
        self.tiles.store(tile, offset, self.layout.code_slabs * SLAB_BYTES, values)
