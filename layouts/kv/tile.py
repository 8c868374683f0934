"""How a warp of the decode kernel reads raw cache rows out of shared memory: which codes it reads, at which addresses,
and with how many bank conflicts.

The kernel copies rows that contain their scales (:class:`layouts.kv.int4.Int4Row`,
:class:`layouts.kv.scaled.ScaledRow`) into shared memory without changing them. With 32-bit loads, each lane reads
exactly the words whose codes are its operands of ``mma.sync.m16n8k16``. The contractions of Q K^T (over head_dim) and P
V (over tokens) may run in any order, so nothing is ever permuted or stored back. :func:`plan_tiles` chooses the order
of tokens in the rows of the MMA tile, which is the same for K and V, and the padding between copies. With its choice,
each load reads from all 32 banks.

Terms: a *block* is the 32 tokens of one KV head that a warp processes at a time. It has two MMA tiles of 16 rows. In
each tile a lane has rows ``g`` and ``g + 8``. ``g = lane // 4`` and ``t = lane % 4`` are the PTX names of a lane's
place in an MMA fragment; ``j``, from 0 to 3, is the index of one of the four *row halves*: half ``j % 2`` of the rows
of tile ``j // 2``. A *word* is 4 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Protocol, TypeVar, cast

BLOCK_TOKENS = 32
WORD_BYTES = 4
WORD_BITS = 32
NUM_BANKS = 32
MMA_LANES = 4  # lanes that share a row of an A operand
MMA_ROWS = 8  # row groups of a warp
HEADER_VECTOR = 4  # most words of scales in one load

TokenBits = tuple[int, ...]
"""Bit b of (g, j) (three bits of g, two of j) is bit ``token_bits[b]`` of a token's place in its block."""

ORDERS: tuple[TokenBits, ...] = tuple(
    bits + tuple(bit for bit in range(5) if bit not in bits) for bits in permutations(range(5), 3)
)
NATURAL_ORDER: TokenBits = ORDERS[0]


class Tile(Protocol):
    """The properties of a tile of K or of V that decide the order of its tokens."""

    @property
    def token_bits(self) -> TokenBits: ...

    @property
    def orders(self) -> tuple[TokenBits, ...]:
        """Token orders in which the tile can be read."""
        ...

    @property
    def wavefronts(self) -> int:
        """Number of shared-memory wavefronts of all loads of one block."""
        ...

    @property
    def num_copies(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


TileT = TypeVar("TileT", bound=Tile)
KeyTile = TypeVar("KeyTile", bound=Tile)
ValueTile = TypeVar("ValueTile", bound=Tile)


def run_codes(code_bits: int) -> int:
    """Returns the number of codes in a *run*, which is the smallest number of codes that fill whole words."""
    return math.lcm(WORD_BITS, code_bits) // code_bits


def run_words(code_bits: int) -> int:
    """Returns the number of words that `run_codes` codes fill."""
    return math.lcm(WORD_BITS, code_bits) // WORD_BITS


def block_token(token_bits: TokenBits, g, j):
    """Returns the token (0 to 31 within its block) in row g of row half j; g and j may be run-time integers."""
    if token_bits[:3] == NATURAL_ORDER[:3]:
        row = g
    else:
        row = sum(((g >> bit) % 2) << place for bit, place in enumerate(token_bits[:3]))
    return row + (((j % 2) << token_bits[3]) + ((j // 2) << token_bits[4]))


@dataclass(frozen=True)
class RowTile:
    """A tile in shared memory: ``num_tokens`` tokens of ``num_heads`` KV heads, as raw rows: scales, then codes.

    Args:
        head_dim: elements of a row.
        code_bits: bits of a code, an even number up to 8. A lane reads whole words with whole codes: one word of 4-bit
            or 8-bit codes, three words of 6-bit codes.
        num_groups: number of quantisation groups of a row (1, 2, 4 or 8). Each group has a multiple of 8 columns, and a
            header of one word.
        num_heads: number of KV heads whose rows follow each other for every token.
        num_tokens: number of tokens of the tile, a power of two, at least 32.
        operand: "k" or "v", which decides how lanes read the tile.
        contiguous: whether consecutive tokens are contiguous in global memory. If they are, one bulk copy may copy many
            tokens. If they are not (since the tile has only some of the cache's heads), one bulk copy copies the heads
            of one token.
        copy_words: the unit of a copy's size and address, in words: 4 for bulk copies, 1 for copies by words.
        token_bits: which token is in which MMA row; chosen by :func:`plan_tiles`.
        copy_tokens: number of tokens of one copy; chosen by :func:`plan_tiles`.
        padding_words: number of words between the bytes of one copy and those of the next copy; chosen by
            :func:`plan_tiles`.
    """

    head_dim: int
    code_bits: int
    num_groups: int
    num_heads: int
    num_tokens: int
    operand: str
    contiguous: bool = True
    copy_words: int = 4
    token_bits: TokenBits = NATURAL_ORDER
    copy_tokens: int = 1
    padding_words: int = 0

    @property
    def run_codes(self) -> int:
        """Number of codes in a run, which is the smallest number of codes that fill whole words. A lane decodes one run
        at a time.
        """
        return run_codes(self.code_bits)

    @property
    def run_words(self) -> int:
        """Number of words in a run."""
        return run_words(self.code_bits)

    def words_of(self, columns: int) -> int:
        """Returns the number of words that the codes of ``columns`` columns fill."""
        return columns // self.run_codes * self.run_words

    @property
    def header_words(self) -> int:
        """Number of words of scales (and shifts) at the start of a row."""
        return self.num_groups

    @property
    def header_vector(self) -> int:
        """Number of words of scales that one load reads."""
        return min(HEADER_VECTOR, self.header_words)

    @property
    def row_words(self) -> int:
        return self.header_words + self.words_of(self.head_dim)

    @property
    def token_words(self) -> int:
        """Number of words of one token, which are the rows of all heads of the tile."""
        return self.num_heads * self.row_words

    @property
    def group_width(self) -> int:
        """Number of columns that share one header."""
        return self.head_dim // self.num_groups

    # -- which elements a lane takes ------------------------------------------------------------------------------

    @property
    def k_unit(self) -> int:
        """Number of columns of one step through K. It is the number of columns in the runs of four lanes, halved until
        it divides a group.
        """
        return self._unit(MMA_LANES)

    @property
    def v_unit(self) -> int:
        """Number of output columns for each unit of MMA rows. Lane g reads ``v_unit // 8`` neighbouring codes."""
        return self._unit(MMA_ROWS)

    def _unit(self, lanes: int) -> int:
        """Returns the number of columns of a unit. It is the number of columns in ``lanes`` runs, halved until it
        divides a group. So a whole unit has the same header.

        Lanes may share a run of one word, down to units of 8 columns. If runs are longer, each lane needs its own run.
        """
        least = MMA_ROWS if self.run_words == 1 else lanes * self.run_codes
        unit = lanes * self.run_codes
        while self.group_width % unit:
            unit //= 2
            if unit < least:
                raise ValueError(f"groups of {self.group_width} columns; want a multiple of {least}")
        return unit

    @property
    def k_units(self) -> int:
        return self.head_dim // self.k_unit

    @property
    def v_units(self) -> int:
        return self.head_dim // self.v_unit

    @property
    def k_unit_words(self) -> int:
        """Number of words from one unit of K to the next."""
        return self.words_of(self.k_unit)

    @property
    def v_unit_words(self) -> int:
        """Number of words from one unit of V to the next."""
        return self.words_of(self.v_unit)

    def k_word(self, t):
        """Returns the index, within a unit, of the first word that lane t reads. Lanes share a word if a unit has fewer
        words than four lanes read.
        """
        word = t * self.k_unit // (MMA_LANES * self.run_codes)
        return word if self.run_words == 1 else self.run_words * word

    def v_word(self, g):
        """Returns the index, within a unit, of the first word that lane g reads."""
        word = g * self.v_unit // (MMA_ROWS * self.run_codes)
        return word if self.run_words == 1 else self.run_words * word

    def v_column(self, unit: int, g, code: int):
        """Returns the column of head_dim that belongs to the ``code``-th output row that lane g holds in a unit."""
        return self.v_unit * unit + self.v_unit // MMA_ROWS * g + code

    # -- where they lie -------------------------------------------------------------------------------------------

    @property
    def copy_pitch_words(self) -> int:
        """Number of words from one copy's destination to the next copy's destination, which are the copy's data and the
        padding after it.
        """
        return self.copy_tokens * self.token_words + self.padding_words

    @property
    def num_copies(self) -> int:
        return self.num_tokens // self.copy_tokens

    @property
    def num_words(self) -> int:
        """Number of words of the whole tile, including padding."""
        return self.num_copies * self.copy_pitch_words

    @property
    def num_bytes(self) -> int:
        return self.num_words * WORD_BYTES

    def token_offset(self, token):
        """Returns the index of the first word of a token's rows."""
        return token // self.copy_tokens * self.copy_pitch_words + token % self.copy_tokens * self.token_words

    def row_strides(self) -> tuple[int, ...]:
        """Returns how many words each bit of (g, j) adds to a row's address. These are the strides of the layout of a
        block's rows, which has the shape ((2,2,2),(2,2)).
        """
        pitch, words, tokens = self.copy_pitch_words, self.token_words, self.copy_tokens
        return tuple((1 << bit) // tokens * pitch + (1 << bit) % tokens * words for bit in self.token_bits)

    def block_token(self, g: int, j: int) -> int:
        """Returns the token (0 to 31 within its block) in row g of row half j."""
        return block_token(self.token_bits, g, j)

    # -- accesses, as the word that each lane of a warp reads -----------------------------------------------------

    def k_words(self, j: int, unit: int) -> list[int]:
        """Returns, for each lane, the index of the first word that it reads for row half j and one unit of columns of
        K.
        """
        first = self.header_words + self.k_unit_words * unit
        return [self.token_offset(self.block_token(lane // 4, j)) + first + self.k_word(lane % 4) for lane in range(32)]

    def v_words(self, j: int, parity: int, unit: int) -> list[int]:
        """Returns, for each lane, the index of the first word that it reads for token row 2t + parity of row half j and
        one unit of columns of V.
        """
        first = self.header_words + self.v_unit_words * unit
        return [
            self.token_offset(self.block_token(2 * (lane % 4) + parity, j)) + first + self.v_word(lane // 4)
            for lane in range(32)
        ]

    def header_reads(self, j: int) -> list[int]:
        """Returns, for each lane, the index of the first header word that it reads for row half j. The four lanes of a
        row read the same words.
        """
        return [self.token_offset(self.block_token(lane // 4, j)) for lane in range(32)]

    # -- the choice -----------------------------------------------------------------------------------------------

    @property
    def orders(self) -> tuple[TokenBits, ...]:
        """The possible token orders. All orders are possible, since a lane computes the address of each of its rows."""
        return ORDERS

    @property
    def wavefronts(self) -> int:
        """Number of wavefronts of a block's loads. All loads of a kind need the same number, since their addresses
        differ by a constant.
        """
        one, two, four = self.row_strides()[:3]
        rows = [0, one, two, one + two, four, one + four, two + four, one + two + four]
        reads = _reads(self.head_dim, self.code_bits, self.num_groups, self.operand)
        header = {row + word for row in rows for word in range(reads.header_vector)}
        codes = {row + word for row in (rows if self.operand == "k" else rows[::2]) for word in reads.lane_words}
        return reads.header_loads * _most_words_per_bank(header) + reads.code_loads * _most_words_per_bank(codes)

    @property
    def fewest_wavefronts(self) -> int:
        """The number of wavefronts that a block's loads would need without bank conflicts."""
        reads = _reads(self.head_dim, self.code_bits, self.num_groups, self.operand)
        return reads.code_loads + reads.header_loads

    def copies(self) -> list[tuple[int, int]]:
        """Returns (tokens, padding words) of the copies that are worth trying, sorted by the number of copies, then by
        padding.
        """
        counts = [self.num_tokens, 4, 2, 1] if self.contiguous else [1]
        sizes = [count for count in counts if count * self.token_words % self.copy_words == 0]
        return [(count, pad) for count in sizes for pad in ((0,) if count == self.num_tokens else (0, 4))]


@dataclass(frozen=True)
class _Reads:
    """The properties of a block's loads that depend on neither token order nor copies: the number of loads of headers
    and of codes, the number of words of a header load, and the first word of a unit that each lane reads.
    """

    header_loads: int
    header_vector: int
    code_loads: int
    lane_words: tuple[int, ...]


@lru_cache(maxsize=256)
def _reads(head_dim: int, code_bits: int, num_groups: int, operand: str) -> _Reads:
    """Returns how lanes read the rows of a tile. The result is cached, as `plan_tiles` needs it thousands of times."""
    tile = RowTile(head_dim, code_bits, num_groups, 1, BLOCK_TOKENS, operand)
    header_loads = 4 * tile.header_words // tile.header_vector
    if operand == "k":
        words = tuple(tile.k_word(t) for t in range(MMA_LANES))
        return _Reads(header_loads, tile.header_vector, 4 * tile.k_units * tile.run_words, words)
    words = tuple(tile.v_word(g) for g in range(MMA_ROWS))
    return _Reads(header_loads, tile.header_vector, 8 * tile.v_units * tile.run_words, words)


def plan_tiles(keys: KeyTile, values: ValueTile) -> tuple[KeyTile, ValueTile]:
    """Returns both tiles with the token order and the copies for which a block's loads are the cheapest. Both tiles get
    the same order.

    The best choice has the fewest wavefronts. Among equal choices it has the fewest copies, then the smallest memory.
    Raises ValueError if a tile has rows that lanes cannot read.
    """
    return cast("tuple[KeyTile, ValueTile]", _plan_tiles(keys, values))


@lru_cache(maxsize=1024)
def _plan_tiles(keys: Tile, values: Tile) -> tuple[Tile, Tile]:
    best: tuple[tuple[int, ...], tuple[Tile, Tile]] | None = None
    for order in keys.orders:
        if order not in values.orders:
            continue
        pair = _in_order(keys, order), _in_order(values, order)
        key = (
            sum(tile.wavefronts for tile in pair),
            sum(tile.num_copies for tile in pair),
            sum(tile.num_bytes for tile in pair),
        )
        if best is None or key < best[0]:
            best = key, pair
    assert best is not None
    return best[1]


def _in_order(tile: TileT, order: TokenBits) -> TileT:
    """Returns the tile with a token order. A `RowTile` also gets the best copies for the order."""
    if not isinstance(tile, RowTile):
        return cast("TileT", replace(cast("Any", tile), token_bits=order))
    best: tuple[int, RowTile] | None = None
    for copy_tokens, padding in tile.copies():
        found = replace(tile, token_bits=order, copy_tokens=copy_tokens, padding_words=padding)
        cost = found.wavefronts
        if best is None or cost < best[0]:
            best = cost, found
        if cost == tile.fewest_wavefronts:
            break
    assert best is not None, f"no copy brings rows of {tile.token_words} words"
    return cast("TileT", best[1])


def _most_words_per_bank(words: set[int]) -> int:
    """Returns the number of wavefronts of a warp load: the largest number of different words in one bank."""
    counts = [0] * NUM_BANKS
    for word in words:
        counts[word % NUM_BANKS] += 1
    return max(counts)
