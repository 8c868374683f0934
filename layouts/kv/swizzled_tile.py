"""How a warp of the decode kernel reads KV rows without scales out of shared memory: swizzled tiles and ldmatrix.

A tensor-map copy writes each KV head's tile as *panels* of [tokens][128 bytes], or [tokens][64 bytes] if a row has no
more bytes. Panels are swizzled: 16-byte chunk c of row r is stored as chunk ``c ^ (r % 8)`` of a 128-byte row, or ``c ^
(r / 2 % 4)`` of a 64-byte row. For ``ldmatrix``, the 8 rows of every 8 x 8 matrix are then in 8 different groups of
banks. K (tokens x columns) is read without transposing, V is transposed (``.trans``). So both become the A operand of
``mma.sync.m16n8k16``; its dimension N has the query heads. ldmatrix moves units of 16 bits: one element of bf16 and
fp16 rows, two elements of byte rows. So after a transposed load of bytes, a lane holds two neighbouring columns of two
tokens. The lane separates them when it decodes them.

The last panel of a row may be partly empty. The copy fills the empty part with zeros, which nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from layouts.kv.tile import BLOCK_TOKENS, NATURAL_ORDER, TokenBits, block_token

CHUNK_BYTES = 16  # one row of an ldmatrix matrix
MATRIX = 8  # rows of an ldmatrix matrix
PANEL_BYTES = 128  # of a row in a panel, with the 128-byte swizzle
NARROW_PANEL_BYTES = 64  # with the 64-byte swizzle, for rows that have no more
LOAD_CHUNKS = 2  # chunks of a row that one ldmatrix.x4 takes
LOAD_WAVEFRONTS = 4  # of one ldmatrix.x4 without bank conflicts


@dataclass(frozen=True)
class SwizzledTile:
    """A tile in shared memory: ``num_tokens`` tokens of ``num_heads`` KV heads, with elements of 8 or 16 bits.

    Args:
        head_dim: elements of a row; a row is a multiple of 16 bytes.
        element_bytes: bytes of an element: 1 or 2.
        num_heads: number of KV heads, which follow each other in memory.
        num_tokens: number of tokens of the tile, a multiple of 32.
        token_bits: which token is in which MMA row, see :mod:`layouts.kv.tile`.
    """

    head_dim: int
    element_bytes: int
    num_heads: int
    num_tokens: int
    token_bits: TokenBits = NATURAL_ORDER

    @property
    def num_chunks(self) -> int:
        """16-byte pieces of a row."""
        return self.head_dim * self.element_bytes // CHUNK_BYTES

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row in one panel."""
        return NARROW_PANEL_BYTES if self.num_chunks * CHUNK_BYTES <= NARROW_PANEL_BYTES else PANEL_BYTES

    @property
    def row_chunks(self) -> int:
        """Number of chunks of a row in one panel."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def num_panels(self) -> int:
        """Panels of one head."""
        return -(-self.num_chunks // self.row_chunks)

    @property
    def padded_dim(self) -> int:
        """Number of elements of a row for which its panels have space."""
        return self.num_panels * self.row_bytes // self.element_bytes

    @property
    def panel_bytes(self) -> int:
        return self.num_tokens * self.row_bytes

    @property
    def head_bytes(self) -> int:
        return self.num_panels * self.panel_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    @property
    def num_copies(self) -> int:
        """The number of TMA copies: one for each head."""
        return self.num_heads

    # -- where chunks lie -----------------------------------------------------------------------------------------

    def swizzle(self, token):
        """Returns the number that is XORed with the chunk indices of a token's row."""
        return token % MATRIX if self.row_bytes == PANEL_BYTES else token // 2 % 4

    def chunk_address(self, token: int, chunk: int) -> int:
        """Returns the offset in bytes of 16-byte chunk ``chunk`` of a token, from the start of its head."""
        panel, place = divmod(chunk, self.row_chunks)
        return panel * self.panel_bytes + token * self.row_bytes + (place ^ self.swizzle(token)) * CHUNK_BYTES

    def load_offset(self, pair: int, load: int) -> int:
        """Returns the distance in bytes from the first ldmatrix.x4 of a block to another one, which reads the
        ``load``-th pair of chunks of the ``pair``-th 16 tokens.

        The distance includes only rows and whole panels. It does not include the chunk's offset inside a panel, since
        the swizzle XORs that offset.
        """
        token = pair << self.token_bits[4]
        return token * self.row_bytes + load * LOAD_CHUNKS // self.row_chunks * self.panel_bytes

    # -- which row of a matrix a lane addresses -------------------------------------------------------------------

    def k_row(self, lane):
        """Returns which row of a 16-token tile a lane addresses for ldmatrix of K, as (token, chunk). The matrices are
        in the order of A's registers.
        """
        return block_token(self.token_bits, lane % MATRIX, lane // MATRIX % 2), lane // 16

    def v_row(self, lane):
        """Returns which row of a 16-token tile a lane addresses for transposed ldmatrix of V, as (token, chunk). The
        product sums over tokens, and columns are the rows of A.
        """
        return block_token(self.token_bits, lane % MATRIX, lane // 16), lane // MATRIX % 2

    # -- the choice of a token order (:func:`layouts.kv.tile.plan_tiles`) -----------------------------------------

    @property
    def orders(self) -> tuple[TokenBits, ...]:
        """The possible token orders. The rows of an 8 x 8 matrix must be eight consecutive tokens, in any order;
        otherwise some of the rows are in the same banks.
        """
        return tuple((*bits, 3, 4) for bits in permutations(range(3)))

    @property
    def wavefronts(self) -> int:
        loads = BLOCK_TOKENS // 16 * -(-self.num_chunks // LOAD_CHUNKS)
        return loads * LOAD_WAVEFRONTS
