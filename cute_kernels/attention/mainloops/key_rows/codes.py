"""Turns rows of codes in shared memory into A operands of wgmma: keys unchanged, values transposed.

A warp's keys are 16 rows of tokens; its values are 32 columns of all 64 tokens of its warpgroup. ldmatrix moves pairs
of bytes. For keys, a lane gets one word of a row; for values, transposed, it gets the same two bytes of two tokens. Any
columns may go to a lane, as long as the queries' operand and the writer of the sums assign the same columns:

    bytes    keys: step s of 16 columns has 16 s + 4 t + (0, 1) and (2, 3)
             values: sum (m, i) is column 32 w + 16 m + 2 g + i; after a scale 32 w + 4 g + 2 m + i
    nibbles  keys: steps 2 c and 2 c + 1 have 32 c + 8 t + (0, 4), (1, 5) and (2, 6), (3, 7)
             values: sum (m, i) is column 32 w + 4 g + 2 m + i

Lane (g, t) = (lane / 4, lane % 4) of warp w, MMA m of two, row half i. Chunks of 16 bytes of a row are exchanged so
that ldmatrix has no bank conflicts.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.attention.extend_policies import (
    GROUP_TOKENS,
    HEADED_ROW_BYTES,
    PAIRED_NIBBLE_ROW_BYTES,
    PAIRED_ROW_BYTES,
    SCALED_ROW_BYTES,
)
from cute_kernels.device import ptx
from cute_kernels.device.instruction import Asm, pure
from cute_kernels.formats.kv import KvFormat, load_code

CHUNK_BYTES = 16
HEAD_DIM = 128
SCALE_BYTES = 4
WARP_TOKENS = 16
# Of either nibble n of a byte: its mask; what makes 512 + n / 2 or 32 + n / 2 in fp16 of it; what is subtracted again.
LOW_NIBBLES, HIGH_NIBBLES = (0x000F000F, 0x60006000, 0xE000E000), (0x00F000F0, 0x50005000, 0xD000D000)
MAGIC = (LOW_NIBBLES[1], HIGH_NIBBLES[1])
HALF = 0x38003800  # 2**-1 in fp16, twice


def magic_of(number, lane) -> tuple[Uint32, Uint32, Uint32]:
    """Returns three words: both constants of `MAGIC`, and a selector for prmt. A lane of `PairedNibbleRows` takes
    halves of two words with this selector.

    number: any integer of at most 31 bits. It hides the constants from the compiler, which then keeps both in
    registers. An instruction that masks and combines nibbles could encode only one of them.
    """
    low, high = (Uint32(magic) + (Uint32(number) >> 31) for magic in MAGIC)
    return low, high, Uint32(lane // 4 % 2) * Uint32(0x2222) + Uint32(0x5410)


@pure
def twice(word: Uint32, half: int) -> Asm[Uint32]:
    """Copies half 0 or 1 of a word to both halves. The move takes no time: instructions that multiply with the result
    absorb it.
    """
    own = ("low", "high")[half]
    return Asm(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; mov.b32 $0, {{{own}, {own}}}; }}")


def of_lanes(word, index: int):
    """Broadcasts words within a warp: every lane (g, t) gets the word of lane (index, t)."""
    return cute.arch.shuffle_sync(word, 4 * index, mask_and_clamp=3 << 8 | 31)


class ByteRows:
    """Rows of 128 bytes without headers, one code a byte."""

    row_bytes = HEAD_DIM
    shifted = headed = False
    key_words, key_header_words = HEAD_DIM // 8, 0  # of a lane's keys

    def __init__(self, codes):
        self.codes = codes

    def group_place(self, group):
        """Returns the offset in bytes at which a warpgroup's rows begin in a tile."""
        return group * (GROUP_TOKENS * self.row_bytes)

    def shifts(self, rows, head, lane) -> tuple[Any, Any, Any]:
        """Returns how many bytes the lane's rows are shifted in shared memory; see :meth:`ScaledByteRows.shifts`. Rows
        of this class begin aligned, so all shifts are 0.
        """
        return 0, 0, 0

    @staticmethod
    def swizzle(row):
        """Returns the number with which the indices of a row's chunks are xored."""
        return row % 8

    # -- keys -----------------------------------------------------------------------------------------------------

    def key_place(self, warp, lane):
        """Returns the address that a lane gives ldmatrix, as an offset in bytes from its warpgroup's first row."""
        matrix, row = lane // 8, lane % 8
        return (warp * WARP_TOKENS + row + 8 * (matrix % 2)) * self.row_bytes + (matrix // 2 ^ row) * CHUNK_BYTES

    def load_keys(self, address) -> list[Any]:
        return [
            word
            for chunk in range(0, self.row_bytes // CHUNK_BYTES, 2)
            for word in ptx.load_matrix_x4(address ^ (chunk * CHUNK_BYTES), 0, transpose=False)
        ]

    def header_start(self, memory, operand: int, stage) -> Any:
        """Returns the address to which offsets of `key_header_place` and `value_header_place` are added. Here it is 0,
        since there are no headers.
        """
        return 0

    def key_header_place(self, group, warp, lane) -> Any:
        """Returns the offset in bytes from :meth:`header_start` to the headers of a lane's tokens; 0 without
        headers."""
        return 0

    def load_key_headers(self, address) -> list[Any]:
        """Returns an empty list. These rows have no headers; any scale is applied to scores and probabilities."""
        return []

    def key_operands(self, words, headers, magic) -> list[list[Uint32]]:
        """Makes the A registers of keys, for each step of 16 columns. magic: the result of `magic_of`."""
        steps = []
        for low, high in zip(words[0::2], words[1::2], strict=True):
            of_low, of_high = (self.codes.numbers(word) for word in (low, high))
            steps.append([of_low[0], of_high[0], of_low[1], of_high[1]])
        return steps

    # -- values ---------------------------------------------------------------------------------------------------

    def value_place(self, warp, lane):
        matrix, row = lane // 8, lane % 8
        return (row + 8 * (matrix % 2)) * self.row_bytes + ((2 * warp + matrix // 2) ^ row) * CHUNK_BYTES

    def load_values(self, address, odd, tokens: int) -> list[Any]:
        """Loads the words of a warp's columns that :meth:`value_operands` needs. odd: bytes from ``address`` to the
        same columns of the next token; it is used for rows that are shifted in shared memory.
        """
        return [
            word
            for first in range(0, tokens, 16)
            for word in ptx.load_matrix_x4(address, first * self.row_bytes, transpose=True)
        ]

    def value_header_place(self, group, warp, lane) -> Any:
        return 0

    def load_value_headers(self, address, tokens: int) -> list[Any]:
        return []

    def value_operands(self, words, headers, step: int, magic) -> list[list[Uint32]]:
        """Makes the A registers of values, for the two MMAs of a step of 16 tokens."""
        own = words[4 * step : 4 * step + 4]
        result = []
        for mma in range(2):
            low, high = (self.codes.numbers(word, pairs=((0, 2), (1, 3))) for word in own[2 * mma : 2 * mma + 2])
            result.append([*low, *high])
        return result

    @staticmethod
    def column(warp, lane, mma):
        """Returns the column of V of a lane's accumulators in row half 0. The accumulators in row half 1 belong to the
        next column."""
        return 32 * warp + 16 * mma + 2 * (lane // 4)

    @staticmethod
    def query_step(lane) -> tuple[Int32, Int32]:
        """Returns where in the queries' B operand a lane writes: (step of 16 columns, t within the step)."""
        return lane // 4, lane % 4

    @staticmethod
    def query_columns(lane) -> tuple[Int32, int]:
        """Returns which two words of a query a lane reads: (first column of the first word, distance in columns from
        the first word to the second).
        """
        return 4 * lane, 2

    @staticmethod
    def query_pairs(values):
        """Returns a lane's four numbers as the two pairs that the B operand takes."""
        return (values[0], values[1]), (values[2], values[3])


class ScaledByteRows(ByteRows):
    """Rows of 132 bytes: an fp32 scale, then codes. In global memory they begin at any multiple of 4 bytes.

    Rows are copied in aligned pieces of 16 bytes. So shared memory also holds up to 12 bytes before a row, which shift
    the row. ldmatrix cannot read shifted rows: lanes load words. In shared memory, rows lie 36 words apart. Bank
    conflicts, two-way at most, occur only if neighbouring rows have different shifts.
    """

    row_bytes = SCALED_ROW_BYTES
    shifted = headed = True

    @staticmethod
    def swizzle(row):
        return row * 0

    def shifts(self, rows, head, lane) -> tuple[Any, Any, Any]:
        """Returns three numbers of bytes: the shift of the lane's keys, the shift of the values of its even tokens, and
        the additional shift of the values of its odd tokens.

        Of every 8 tokens, lane (g, t) has the keys of token g and the values of tokens 2 t and 2 t + 1. Blocks of the
        cache begin at multiples of 16 bytes and have multiples of 4 tokens.
        """
        start = head * rows.head_bytes.to(Int32)

        def shift(token):
            return (start + token % 4 * rows.token_bytes) & 15

        even = shift(lane % 4 * 2)
        return shift(lane // 4), even, shift(lane % 4 * 2 + 1) - even

    def scale_place(self, group, row):
        """Returns the byte offset in a tile of a row's scale, without the row's shift. row: index among the warpgroup's
        rows.
        """
        return self.group_place(group) + row * self.row_bytes

    # -- keys -----------------------------------------------------------------------------------------------------

    def key_place(self, warp, lane):
        return (warp * WARP_TOKENS + lane // 4) * self.row_bytes + SCALE_BYTES + lane % 4 * 4

    def load_keys(self, address) -> list[Any]:
        chunks = HEAD_DIM // CHUNK_BYTES
        return [
            ptx.load_shared(address, half * 8 * self.row_bytes + chunk * CHUNK_BYTES)
            for chunk in range(chunks)
            for half in range(2)
        ]

    # -- values ---------------------------------------------------------------------------------------------------

    def value_place(self, warp, lane):
        return lane % 4 * 2 * self.row_bytes + SCALE_BYTES + (8 * warp + lane // 4) * 4

    def load_values(self, address, odd, tokens: int) -> list[Any]:
        return [
            ptx.load_shared(start, first * self.row_bytes)
            for first in range(0, tokens, 8)
            for start in (address, address + odd)
        ]

    def value_operands(self, words, headers, step: int, magic) -> list[list[Uint32]]:
        pairs = []
        for even, odd in zip(words[4 * step : 4 * step + 4 : 2], words[4 * step + 1 : 4 * step + 4 : 2], strict=True):
            both = [ptx.prmt(even, odd, Uint32(s)) for s in (0x5140, 0x7362)]
            pairs.append([self.codes.numbers(word) for word in both])
        low, high = pairs
        return [[*low[m], *high[m]] for m in range(2)]

    @staticmethod
    def column(warp, lane, mma):
        return 32 * warp + 4 * (lane // 4) + 2 * mma


class PairedByteRows(ScaledByteRows):
    """Rows of bytes of two neighbouring heads, one head for each warpgroup. In memory, the second head's row of a token
    follows the first head's row.

    In shared memory, tokens lie 68 words apart. In global memory tokens begin at multiples of 16 bytes, so all rows of
    a head have the same shift.
    """

    row_bytes = PAIRED_ROW_BYTES
    heads = 2

    def group_place(self, group):
        return group * (SCALE_BYTES + HEAD_DIM)

    def shifts(self, rows, head, lane) -> tuple[Any, Any, Any]:
        shift = head // self.heads * (self.heads * (SCALE_BYTES + HEAD_DIM)) & (CHUNK_BYTES - 1)
        return shift, shift, 0


class NibbleRows:
    """Rows of INT4 codes, 64 bytes each. A code becomes half of code * scale + shift, rounded once to fp16."""

    row_bytes = HEAD_DIM // 2
    shifted = headed = False

    def __init__(self, num_groups: int):
        self.group_chunks = HEAD_DIM // 32 // num_groups  # chunks of 16 bytes, or warps, of a group
        self.key_words, self.key_header_words = HEAD_DIM // 16, 2 * num_groups  # of a lane's keys

    def shifts(self, rows, head, lane) -> tuple[Any, Any, Any]:
        return 0, 0, 0

    def group_place(self, group):
        return group * (GROUP_TOKENS * self.row_bytes)

    @staticmethod
    def swizzle(row):
        return row // 2 % 4

    def numbers(self, word, magic, scales, shifts) -> list[Uint32]:
        """Decodes a word to four pairs of numbers; pair i has nibbles i and i + 4. shifts: shifts of the codes, divided
        by 2.
        """
        result = []
        for index in range(4):
            own = word if index < 2 else word >> 8
            mask, _, zero = (LOW_NIBBLES, HIGH_NIBBLES)[index % 2]
            codes = ptx.add_f16x2((own & Uint32(mask)) | magic[index % 2], Uint32(zero))
            result.append(ptx.fma_f16x2(codes, scales, shifts))
        return result

    def made(self, scales, shifts) -> tuple[Uint32, Uint32]:
        """Returns scales, and shifts divided by 2, in the form that :meth:`numbers` takes."""
        return scales, ptx.mul_f16x2(shifts, Uint32(HALF))

    def key_place(self, warp, lane):
        matrix, row = lane // 8, lane % 8
        rows = warp * WARP_TOKENS + row + 8 * (matrix % 2)
        return rows * self.row_bytes + (matrix // 2 ^ self.swizzle(row)) * CHUNK_BYTES

    def load_keys(self, address) -> list[Any]:
        return [
            word
            for chunk in range(0, self.row_bytes // CHUNK_BYTES, 2)
            for word in ptx.load_matrix_x4(address ^ (chunk * CHUNK_BYTES), 0, transpose=False)
        ]

    def header_start(self, memory, operand: int, stage):
        return memory.header(operand, stage)

    def key_header_place(self, group, warp, lane):
        return 4 * (group * GROUP_TOKENS + warp * WARP_TOKENS + lane // 4)

    def load_key_headers(self, address) -> list[Any]:
        """Loads the headers of the lane's two tokens. Returns words [group][row half], each a scale and a shift; the
        lane's two tokens lie in different row halves."""
        groups = HEAD_DIM // 32 // self.group_chunks
        return [[ptx.load_shared(address, 512 * group + 32 * i) for i in range(2)] for group in range(groups)]

    def key_operands(self, words, headers, magic) -> list[list[Uint32]]:
        made = [[self.made(twice(word, 0), twice(word, 1)) for word in rows] for rows in headers]
        steps = []
        for chunk in range(4):
            low, high = (
                self.numbers(words[2 * chunk + i], magic, *made[chunk // self.group_chunks][i]) for i in range(2)
            )
            steps += [[low[p], high[p], low[p + 1], high[p + 1]] for p in (0, 2)]
        return steps

    def value_place(self, warp, lane):
        matrix, row = lane // 8, lane % 8
        return (row + 8 * matrix) * self.row_bytes + (warp ^ self.swizzle(row)) * CHUNK_BYTES

    def load_values(self, address, odd, tokens: int) -> list[Any]:
        return [
            word
            for first in range(0, tokens, 32)
            for word in ptx.load_matrix_x4(address, first * self.row_bytes, transpose=True)
        ]

    def value_header_place(self, group, warp, lane):
        """Returns the offset in bytes from :meth:`header_start` to the headers of tokens 8 g + 2 t and 8 g + 2 t +
        1."""
        return 4 * GROUP_TOKENS * group + 512 * (warp // self.group_chunks) + 8 * lane

    def load_value_headers(self, address, tokens: int) -> list[Any]:
        """Loads scales, and shifts divided by 2, of the lane's two tokens of every 8.

        Lanes (g, t) with the same t need the same headers. So each of them converts the headers of two tokens, and
        broadcasts the results to the others.
        """
        even, odd = self.load_two_headers(address)
        scales, shifts = self.made(*(ptx.prmt(even, odd, Uint32(s)) for s in (0x5410, 0x7632)))
        return [[of_lanes(own, index) for own in (scales, shifts)] for index in range(tokens // 8)]

    def load_two_headers(self, address):
        return ptx.load_shared_vector(address, 0, 2)

    def value_word(self, words, index: int, magic):
        """Returns a lane's word of codes for the ``index``-th group of 8 tokens."""
        return words[index]

    def value_operands(self, words, headers, step: int, magic) -> list[list[Uint32]]:
        pairs = []
        for index in (2 * step, 2 * step + 1):
            pairs.append(self.numbers(self.value_word(words, index, magic), magic, *headers[index]))
        low, high = pairs
        return [[low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]] for m in range(2)]

    @staticmethod
    def column(warp, lane, mma):
        return 32 * warp + 4 * (lane // 4) + 2 * mma

    @staticmethod
    def query_step(lane) -> tuple[Int32, Int32]:
        return 2 * (lane // 8) + lane % 2, lane % 8 // 2

    @staticmethod
    def query_columns(lane) -> tuple[Int32, int]:
        return 32 * (lane // 8) + 8 * (lane % 8 // 2) + 2 * (lane % 2), 4

    @staticmethod
    def query_pairs(values):
        return (values[0], values[2]), (values[1], values[3])


class HeadedNibbleRows(NibbleRows):
    """Rows of INT4 with four groups. A row has 80 bytes, a header and codes, and is copied unchanged from the cache.
    Such rows have no bank conflicts.
    """

    row_bytes = HEADED_ROW_BYTES
    headed = True

    @staticmethod
    def swizzle(row):
        return row * 0

    def key_place(self, warp, lane):
        matrix, row = lane // 8, lane % 8
        rows = warp * WARP_TOKENS + row + 8 * (matrix % 2)
        return rows * self.row_bytes + CHUNK_BYTES + matrix // 2 * CHUNK_BYTES

    def load_keys(self, address) -> list[Any]:
        return [
            word
            for chunk in range(0, 4, 2)
            for word in ptx.load_matrix_x4(address, chunk * CHUNK_BYTES, transpose=False)
        ]

    def header_start(self, memory, operand: int, stage):
        return memory.tile(operand, stage)

    def key_header_place(self, group, warp, lane):
        return self.group_place(group) + (warp * WARP_TOKENS + lane // 4) * self.row_bytes

    def load_key_headers(self, address) -> list[Any]:
        rows = [ptx.load_shared_vector(address, 8 * i * self.row_bytes, 4) for i in range(2)]
        return [[rows[i][group] for i in range(2)] for group in range(4)]

    def value_place(self, warp, lane):
        matrix, row = lane // 8, lane % 8
        return (row + 8 * matrix) * self.row_bytes + CHUNK_BYTES + warp * CHUNK_BYTES

    def value_header_place(self, group, warp, lane):
        return self.group_place(group) + lane * 2 * self.row_bytes + 4 * warp

    def load_two_headers(self, address):
        return [ptx.load_shared(address, i * self.row_bytes) for i in range(2)]


class PairedNibbleRows(HeadedNibbleRows):
    """Rows of INT4 with one group, for a CTA with two neighbouring heads, one for each warpgroup. The two rows of a
    token have 68 bytes each and lie one after the other. A row may begin at any multiple of 4 bytes, but ldmatrix needs
    multiples of 16, so lanes load words. In shared memory, tokens are 36 words apart."""

    row_bytes = PAIRED_NIBBLE_ROW_BYTES
    shifted = True
    heads, head_bytes = 2, SCALE_BYTES + HEAD_DIM // 2

    def __init__(self):
        super().__init__(1)

    def group_place(self, group):
        return group * self.head_bytes

    def shifts(self, rows, head, lane) -> tuple[Any, Any, Any]:
        shift = head // self.heads * (self.heads * self.head_bytes) & (CHUNK_BYTES - 1)
        return shift, shift, 0

    def key_place(self, warp, lane):
        return (warp * WARP_TOKENS + lane // 4) * self.row_bytes + SCALE_BYTES + lane % 4 * 4

    def load_keys(self, address) -> list[Any]:
        return [
            ptx.load_shared(address, half * 8 * self.row_bytes + chunk * CHUNK_BYTES)
            for chunk in range(HEAD_DIM // 2 // CHUNK_BYTES)
            for half in range(2)
        ]

    def load_key_headers(self, address) -> list[Any]:
        return [[ptx.load_shared(address, 8 * i * self.row_bytes) for i in range(2)]]

    def value_place(self, warp, lane):
        return lane % 4 * 2 * self.row_bytes + SCALE_BYTES + warp * CHUNK_BYTES + lane // 8 * 4

    def load_values(self, address, odd, tokens: int) -> list[Any]:
        """Loads words of the lane's tokens, each with codes for two neighbouring lanes."""
        return [
            ptx.load_shared(start, first * self.row_bytes)
            for first in range(0, tokens, 8)
            for start in (address, address + odd)
        ]

    def value_word(self, words, index: int, magic):
        """Returns a word with the lane's two bytes of each of two tokens."""
        return ptx.prmt(words[2 * index], words[2 * index + 1], magic[2])

    def value_header_place(self, group, warp, lane):
        return self.group_place(group) + lane * 2 * self.row_bytes


def rows_of(form: KvFormat, paired: bool = False) -> ByteRows | NibbleRows:
    """Returns the object that makes operands of a format's rows. paired: whether the rows of two heads are contiguous
    in shared memory.
    """
    if form.code_bits < 8:
        if paired:
            return PairedNibbleRows()
        return HeadedNibbleRows(4) if form.header_bytes == CHUNK_BYTES else NibbleRows(form.num_groups)
    kind = ByteRows if not form.header_bytes else PairedByteRows if paired else ScaledByteRows
    assert form.extend is not None  # `ExtendConfig.can_implement` has said so
    return kind(load_code(form.extend.words)())
