"""How a warp of the decode kernel reads INT4 rows out of shared memory: addresses, bank conflicts, element order.

The kernel copies raw rows (the bytes of :class:`layouts.kv.int4.Int4Row`) into shared memory and lets each lane read,
with 32-bit loads, exactly the words whose nibbles are its operands of ``mma.sync.m16n8k16``. The contraction orders of
Q K^T (head_dim) and of P V (tokens) are free, so nothing is ever permuted or stored back: :class:`Int4Tile` chooses
which token stands in which row of the MMA tile, and the padding between bulk copies, so that those loads touch all 32
banks.

Terms: a *block* is 32 tokens of one KV head, the unit a warp works on: two MMA tiles of 16 rows, each with rows ``g``
and ``g + 8``. ``g = lane // 4`` and ``t = lane % 4`` are the PTX names of a lane's place in an MMA fragment; ``j`` in
0..3 numbers the four row halves (tile ``j // 2``, half ``j % 2``). A *word* is 4 bytes.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

BLOCK_TOKENS = 32
WORD_BYTES = 4
NUM_BANKS = 32
NIBBLES_PER_WORD = 8
FEWEST_WAVEFRONTS = 2  # of one K word load plus one V word load


@dataclass(frozen=True)
class Int4Tile:
    """Shared-memory image of ``num_tokens`` tokens of ``num_heads`` KV heads, as INT4 rows.

    Args:
        head_dim: elements of a row, a multiple of 64.
        num_groups: quantisation groups of a row (1, 2, 4 or 8).
        num_heads: KV heads that lie next to each other for every token.
        num_tokens: tokens of the tile, a power of two, at least 32.
        contiguous: whether consecutive tokens touch in global memory. If they do, one bulk copy may take many tokens;
            if not (the tile holds some of the cache's heads), one bulk copy takes the heads of one token.
        copy_words: words that a copy's size and address are multiples of: 4 for bulk copies, 1 for copies by words.
    """

    head_dim: int
    num_groups: int
    num_heads: int
    num_tokens: int
    contiguous: bool = True
    copy_words: int = 4

    @property
    def header_words(self) -> int:
        """Words of (scale, shift) pairs at the start of a row."""
        return self.num_groups

    @property
    def row_words(self) -> int:
        return self.header_words + self.head_dim // NIBBLES_PER_WORD

    @property
    def token_words(self) -> int:
        """Words of one token: the rows of all heads of the tile."""
        return self.num_heads * self.row_words

    @property
    def group_width(self) -> int:
        """Columns of head_dim that share one (scale, shift)."""
        return self.head_dim // self.num_groups

    # -- which elements a lane takes ------------------------------------------------------------------------------

    @property
    def k_unit(self) -> int:
        """Columns of one step through K: 32, which are the words of four lanes, unless a group is narrower."""
        return min(self.group_width, 32)

    @property
    def v_unit(self) -> int:
        """Columns of the output per unit of MMA rows: lane g takes ``v_unit // 8`` neighbouring nibbles."""
        return min(self.group_width, 64)

    def k_column(self, unit: int, t: int, mma: int, register: int, half: int) -> int:
        """Column at slot (mma, register, half) of lane t's A operand: nibbles n and n + 4 make one packed pair."""
        nibble = {32: 0, 16: 2 * (t % 2), 8: t}[self.k_unit] + 2 * mma + register + 4 * half
        word = t * self.k_unit // 32
        return self.k_unit * unit + NIBBLES_PER_WORD * word + nibble

    def v_column(self, unit: int, g: int, nibble: int) -> int:
        """Column of head_dim of the ``nibble``-th output row that lane g holds in a unit."""
        return self.v_unit * unit + self.v_unit // 8 * g + nibble

    # -- where they lie -------------------------------------------------------------------------------------------

    @property
    def token_bits(self) -> tuple[int, ...]:
        """Bit b of (g, j) (three bits of g, two of j) is bit ``token_bits[b]`` of the token's place in its block."""
        return self._plan[0]

    @property
    def copy_tokens(self) -> int:
        """Tokens that one bulk copy brings."""
        return self._plan[1]

    @property
    def copy_pitch_words(self) -> int:
        """Words from one bulk copy's destination to the next one's: its data and the padding after it."""
        return self.copy_tokens * self.token_words + self._plan[2]

    @property
    def num_copies(self) -> int:
        return self.num_tokens // self.copy_tokens

    @property
    def num_words(self) -> int:
        """Words of the whole tile, padding included."""
        return self.num_copies * self.copy_pitch_words

    @property
    def num_bytes(self) -> int:
        return self.num_words * WORD_BYTES

    def token_offset(self, token: int) -> int:
        """First word of a token's rows."""
        return token // self.copy_tokens * self.copy_pitch_words + token % self.copy_tokens * self.token_words

    def row_strides(self) -> tuple[int, ...]:
        """Words that each bit of (g, j) adds to a row's address: the layout ((2,2,2),(2,2)) of a block's rows."""
        return tuple(self.token_offset(1 << bit) for bit in self.token_bits)

    def block_token(self, g: int, j: int) -> int:
        """The token (0..31 within its block) in row g of row half j."""
        return sum(((g | j << 3) >> bit & 1) << place for bit, place in enumerate(self.token_bits))

    # -- accesses, as the word that each lane of a warp reads -----------------------------------------------------

    def k_words(self, j: int, unit: int) -> list[int]:
        """Word read by each lane for row half j and one unit of columns of K."""
        return [
            self.token_offset(self.block_token(lane // 4, j))
            + self.header_words
            + self.k_unit // 8 * unit
            + lane % 4 * self.k_unit // 32
            for lane in range(32)
        ]

    def v_words(self, j: int, parity: int, unit: int) -> list[int]:
        """Word read by each lane for token row 2t + parity of row half j and one unit of columns of V."""
        return [
            self.token_offset(self.block_token(2 * (lane % 4) + parity, j))
            + self.header_words
            + self.v_unit // 8 * unit
            + lane // 4 * self.v_unit // 64
            for lane in range(32)
        ]

    def header_reads(self, j: int) -> list[int]:
        """First header word read by each lane for row half j (the same words for the four lanes of a row)."""
        return [self.token_offset(self.block_token(lane // 4, j)) for lane in range(32)]

    # -- the choice -----------------------------------------------------------------------------------------------

    @property
    def _plan(self) -> tuple[tuple[int, ...], int, int]:
        """(token_bits, copy_tokens, padding words) with the fewest shared-memory wavefronts, then the fewest copies."""
        return _best_plan(self)

    def _copy_candidates(self) -> list[tuple[int, int]]:
        """(tokens, padding words) of the copies worth trying."""
        counts = [self.num_tokens, 4, 2, 1] if self.contiguous else [1]
        sizes = [count for count in counts if count * self.token_words % self.copy_words == 0]
        return [(count, pad) for count in sizes for pad in ((0,) if count == self.num_tokens else (0, 4))]

    def _wavefronts(self, g_strides: list[int]) -> int:
        """Wavefronts of one K word load plus one V word load when bit b of g moves ``g_strides[b]`` words."""
        rows = [sum((g >> bit & 1) * stride for bit, stride in enumerate(g_strides)) for g in range(8)]
        k = {row + t * self.k_unit // 32 for row in rows for t in range(4)}
        v = {rows[2 * t] + g * self.v_unit // 64 for t in range(4) for g in range(8)}
        return _max_words_per_bank(k) + _max_words_per_bank(v)


@lru_cache(maxsize=1024)
def _best_plan(tile: Int4Tile) -> tuple[tuple[int, ...], int, int]:
    best: tuple[tuple[int, int, int], tuple[tuple[int, ...], int, int]] | None = None
    # The candidates come by rising number of copies, then padding: the first without conflicts is the best of all.
    for copy_tokens, padding in tile._copy_candidates():
        pitch = copy_tokens * tile.token_words + padding
        bases = [
            token // copy_tokens * pitch + token % copy_tokens * tile.token_words
            for token in (1 << bit for bit in range(5))
        ]
        for bits in permutations(range(5), 3):
            cost = tile._wavefronts([bases[bit] for bit in bits])
            key = (cost, tile.num_tokens // copy_tokens, padding)
            if best is None or key < best[0]:
                rest = tuple(bit for bit in range(5) if bit not in bits)
                best = key, (bits + rest, copy_tokens, padding)
            if cost == FEWEST_WAVEFRONTS:
                return best[1]
    assert best is not None
    return best[1]


def _max_words_per_bank(words: set[int]) -> int:
    """Wavefronts of a 32-bit warp load: the most different words that fall into one bank."""
    counts = [0] * NUM_BANKS
    for word in words:
        counts[word % NUM_BANKS] += 1
    return max(counts)
