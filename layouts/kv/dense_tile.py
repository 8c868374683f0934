"""How a warp of the decode kernel reads 16-bit KV rows out of shared memory: swizzled tiles and ldmatrix addresses.

A tensor-map copy writes each KV head's tile as ``head_dim / 64`` *panels* of [tokens][64 elements], 128 bytes a row,
with the 128-byte swizzle: 16-byte chunk c of row r lies at chunk ``c ^ (r % 8)``. ``ldmatrix`` then finds the 8 rows of
every 8 x 8 matrix in 8 different bank groups. K (tokens x columns) is read as it lies, V transposed (``.trans``), so
both become the A operand of ``mma.sync.m16n8k16`` with the query heads as its N.
"""

from dataclasses import dataclass

PANEL_COLUMNS = 64
ROW_BYTES = 128  # of a panel
CHUNK_BYTES = 16  # one row of an ldmatrix matrix
MATRIX = 8  # rows of an ldmatrix matrix


@dataclass(frozen=True)
class DenseTile:
    """Shared-memory image of ``num_tokens`` tokens of ``num_heads`` KV heads of 16-bit elements.

    Args:
        head_dim: elements of a row, a multiple of 64.
        num_heads: KV heads, one after the other.
        num_tokens: tokens of the tile, a multiple of 8.
    """

    head_dim: int
    num_heads: int
    num_tokens: int

    @property
    def panel_bytes(self) -> int:
        return self.num_tokens * ROW_BYTES

    @property
    def num_panels(self) -> int:
        """Panels of one head."""
        return self.head_dim // PANEL_COLUMNS

    @property
    def head_bytes(self) -> int:
        return self.num_panels * self.panel_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    def chunk_address(self, token: int, chunk: int) -> int:
        """Byte of the 16-byte chunk ``chunk`` (columns 8 chunk ..) of a token, from the start of its head."""
        panel, place = divmod(chunk, PANEL_COLUMNS // MATRIX)
        return panel * self.panel_bytes + token * ROW_BYTES + (place ^ token % MATRIX) * CHUNK_BYTES

    def k_row(self, lane: int) -> tuple[int, int]:
        """(token, chunk) of a 16 x 16 tile that a lane addresses for ldmatrix of K: matrices in A's register order."""
        return lane % 8 + 8 * (lane // 8 % 2), lane // 16

    def v_row(self, lane: int) -> tuple[int, int]:
        """The same for V, read transposed: tokens are the contraction, columns the rows of A."""
        return lane % 8 + 8 * (lane // 16), lane // 8 % 2
