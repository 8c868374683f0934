"""INT4 rows to MMA operands: what one warp does with 32 tokens of one KV head.

Nibbles become fp16 operands without an arithmetic instruction: a nibble masked out of a word at bit 0 or 4 of a 16-bit
half *is* an fp16 subnormal, q * 2**-24 or q * 2**-20, which tensor cores multiply exactly and at full speed. The factor
16 between the two positions is taken into Q (exact) and into the output rows. So 8 elements of K cost one shift and
four masks; V, whose pairs run along tokens, costs two byte permutes more per 16 elements. The usual magic-number decode
(Kim et al. 2022, "Who says elephants can't run", FasterTransformer) needs an exact subtraction per pair on top.

Scale and shift stay out of the elements: with x = q * scale + shift,
    S = scale_t * (q_t . Q) + shift_t * sum(Q)            per group of columns
    O = sum_t (P_t scale_t) q_t + sum_t P_t shift_t        per group of columns
so they touch the score and probability fragments only. P scale is what goes through the MMA as fp16; to bound it by
a constant the softmax reference is the maximum of s + log2(scale of V) instead of the maximum of s.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.config import HEADS_PER_WARP, DecodeConfig
from cute_kernels.attention.tiles import int4_tile
from cute_kernels.device import ptx
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES

LOW_NIBBLES = 0x000F000F
HIGH_NIBBLES = 0x00F000F0
LOW_NIBBLE_UNIT = 2.0**24  # 1 / value of the fp16 subnormal that stands for nibble 1 at bit 0
HIGH_NIBBLE_UNIT = 2.0**20
MIN_SCALE = 2.0**-24  # the least positive fp16, so that log2 of a zero scale stays finite
# Queries are scaled so that the largest lies in [2**14, 2**15): fp16 keeps all bits of bf16 and fp16.
QUERY_EXPONENT = 14


class Int4Reader:
    """Per-warp operations on INT4 tiles; see the module's text for the arithmetic."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.tile = int4_tile(config)
        self.num_groups = self.tile.num_groups
        self.k_units = config.head_dim // self.tile.k_unit
        self.k_mmas = max(self.tile.k_unit // 16, 1)  # MMAs per unit of columns
        self.v_units = config.head_dim // self.tile.v_unit
        self.v_rows = self.tile.v_unit // 8  # output rows of a lane per unit
        self.v_mmas = max(self.v_rows // 2, 1)
        self.num_accumulators = self.v_units * self.v_mmas * 4
        header = self.tile.header_words
        self.header_vector = min(4, header)

    # -- setup ----------------------------------------------------------------------------------------------------

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32):
        """Registers that live as long as the warp: lane offsets, queries, accumulators."""
        state = _State()
        g, t = lane // 4, lane % 4
        strides = self.tile.row_strides()
        row_k = (g % 2) * strides[0] + (g // 2 % 2) * strides[1] + (g // 4) * strides[2]
        row_v = (t % 2) * strides[1] + (t // 2) * strides[2]
        base = head * self.tile.row_words + slice_index * self.tile.token_offset(self.config.slice_tokens)
        k_word = t * self.tile.k_unit // 32
        v_word = g * self.tile.v_unit // 64
        state.k_lane = ptx.pinned(Int32(WORD_BYTES * (base + row_k + k_word)))
        state.header = state.k_lane - WORD_BYTES * k_word  # cheaper to compute again than to keep
        state.v_lane = ptx.pinned(Int32(WORD_BYTES * (base + row_v + v_word)))
        state.lane = lane
        state.g, state.t = g, t
        state.k_shift = Uint32({32: 0, 16: 8 * (t % 2), 8: 4 * t}[self.tile.k_unit])
        state.v_select = Uint32(self._v_selector(g))
        state.v_shift = Uint32(4 * (g % 2))
        state.accumulators = cute.make_rmem_tensor(self.num_accumulators, Float32)
        state.shift_sums = cute.make_rmem_tensor(2 * self.num_groups, Float32)
        state.accumulators.fill(0.0)
        state.shift_sums.fill(0.0)
        return state

    def _v_selector(self, g: Int32):
        """prmt selector that gathers lane g's nibbles of two tokens into the two halves of a word."""
        if self.tile.v_unit == 64:
            return 0x5410
        if self.tile.v_unit == 32:
            return 0x5410 + (g % 2) * 0x2222
        byte = g % 4 if self.tile.v_unit == 16 else g // 2
        return 0x4400 + byte * 0x1111

    def fetch_query(self, q: Int64, row: Int32, first_query: Int32, group: Int32, lane: Int32):
        """Starts loading the lane's part of its query head; returns raw words per unit of columns.

        q: address of the queries; row: first query head of the KV head among all of them. Lanes past the last query
        head take that one: their results are never stored.
        """
        t = lane % 4
        head = row + cutlass.min(first_query + lane // 4, group - 1)
        column = {32: 8 * t, 16: 8 * (t // 2) + 2 * (t % 2), 8: 2 * (t // 2)}[self.tile.k_unit]
        address = q + (Int64(head) * self.config.head_dim + column) * 2
        units = []
        for unit in range(self.k_units):
            offset = unit * self.tile.k_unit * 2
            if self.tile.k_unit == 32:
                units.append(ptx.load_global_words(address, offset, 4))
            else:
                units.append([ptx.load_global_words(address, offset + byte, 1)[0] for byte in (0, 8)])
        return units

    def _query_pairs(self, words, t: Int32):
        """Packed pairs of one unit in the order of the B registers: columns as :meth:`Int4Tile.k_column` has them."""
        low, high = Uint32(0x5410), Uint32(0x7632)
        if self.tile.k_unit == 8:
            return [ptx.prmt(words[0], words[1], low + Uint32(t % 2) * 0x2222)]
        half = len(words) // 2
        return [ptx.prmt(words[i], words[i + half], select) for i in range(half) for select in (low, high)]

    def take_query(self, state, words, softmax_scale: Float32):
        """Makes B operands of the queries, scaled by a power of two into fp16, and their sums per group of columns."""
        pairs = [
            (unit, i, pair)
            for unit in range(self.k_units)
            for i, pair in enumerate(self._query_pairs(words[unit], state.t))
        ]
        low, high = {
            "bf16": (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float),
            "fp16": (ptx.half2_low_to_float, ptx.half2_high_to_float),
        }[self.config.q_dtype]
        values = [(low(pair), high(pair)) for _, _, pair in pairs]
        largest = Float32(0.0)
        for pair in values:
            largest = ptx.fmax(largest, ptx.fmax(ptx.absolute(pair[0]), ptx.absolute(pair[1])))
        to_fp16, from_fp16 = self._query_scale(_lane_max(largest, (1, 2, 4, 8, 16)))
        state.score_scale = from_fp16 * (softmax_scale * (ptx.LOG2_E * LOW_NIBBLE_UNIT))
        state.query = []
        sums = [Float32(0.0) for _ in range(self.num_groups)]
        for (unit, i, _), pair in zip(pairs, values, strict=True):
            group = unit * self.tile.k_unit // self.tile.group_width
            scaled = [value * to_fp16 for value in pair]
            sums[group] = sums[group] + (scaled[0] + scaled[1])
            # Odd registers meet the high nibble of a byte, which is worth 16 times as much.
            factor = 1.0 / 16.0 if i % 2 == 1 else 1.0
            state.query.append(ptx.pack_f16x2(scaled[0] * factor, scaled[1] * factor))
        # A lane summed columns of head g; it needs the sums of heads 2t and 2t + 1.
        state.query_sums = []
        for group in range(self.num_groups):
            total = _lane_sum(sums[group], (1, 2)) * (1.0 / LOW_NIBBLE_UNIT)
            state.query_sums += [cute.arch.shuffle_sync(total, 8 * state.t + 4 * column) for column in range(2)]

    def _query_scale(self, largest: Float32):
        """(2**k, 2**-k) that bring the largest query into [2**14, 2**15); k is bounded so that both are normal."""
        exponent = cutlass.max((Int32(largest.bitcast(Int32)) >> 23) - 127, -100)
        to_fp16 = ((127 + QUERY_EXPONENT - exponent) << 23).bitcast(Float32)
        from_fp16 = ((127 - QUERY_EXPONENT + exponent) << 23).bitcast(Float32)
        return to_fp16, from_fp16

    # -- scores ---------------------------------------------------------------------------------------------------

    def scores(self, state, tile_address: Int32, block_offset: int):
        """Scores of 32 tokens x 8 heads without ``state.score_scale``: [j][column], token (g, j), head 2t + column."""
        result = []
        for pair in range(2):
            rows = (2 * pair, 2 * pair + 1)
            words = [
                [
                    ptx.load_shared(state.k_lane + tile_address, block_offset + self._k_offset(j, unit))
                    for unit in range(self.k_units)
                ]
                for j in rows
            ]
            headers = [self._load_header(state.header + tile_address, block_offset, j) for j in rows]
            result += self._score_pair(state, words, headers)
        return result

    def _k_offset(self, j: int, unit: int) -> int:
        return WORD_BYTES * (self._row_offset(j) + self.tile.header_words + self.tile.k_unit // 8 * unit)

    def _row_offset(self, j: int, parity: int = 0) -> int:
        strides = self.tile.row_strides()
        return parity * strides[0] + (j % 2) * strides[3] + (j // 2) * strides[4]

    def _load_header(self, address: Int32, block_offset: int, j: int):
        """The (scale, shift) pairs of row half j, one packed word a group."""
        words = []
        for first in range(0, self.num_groups, self.header_vector):
            offset = block_offset + WORD_BYTES * (self._row_offset(j) + first)
            words += ptx.load_shared_vector(address, offset, self.header_vector)
        return words

    def _score_pair(self, state, words, headers):
        """Scores of the two row halves of one MMA tile."""
        units_per_group = self.k_units // self.num_groups
        scores = [[None, None], [None, None]]
        scales = [[ptx.half2_low_to_float(word) for word in header] for header in headers]
        shifts = [[ptx.half2_high_to_float(word) for word in header] for header in headers]
        for group in range(self.num_groups):
            dot = [Float32(0.0)] * 4
            for unit in range(group * units_per_group, (group + 1) * units_per_group):
                for mma, operand in enumerate(self._k_operands(state, words[0][unit], words[1][unit])):
                    dot = self._multiply_query(state, dot, operand, unit, mma)
            for half in range(2):
                for column in range(2):
                    offset = scores[half][column]
                    shift, query_sum = shifts[half][group], state.query_sums[2 * group + column]
                    offset = shift * query_sum if offset is None else offset + shift * query_sum
                    scores[half][column] = offset + scales[half][group] * dot[2 * half + column]
        return scores

    def _k_operands(self, state, low_row: Uint32, high_row: Uint32):
        """A operands of the MMAs of one unit of columns, from the words of rows g and g + 8."""
        if const_expr(self.tile.k_unit == 32):
            low_rest, high_rest = low_row >> 8, high_row >> 8
            pairs = [(low_row, high_row), (low_rest, high_rest)]
        else:
            pairs = [(low_row >> state.k_shift, high_row >> state.k_shift)]
        if const_expr(self.tile.k_unit == 8):
            return [[low & LOW_NIBBLES, high & LOW_NIBBLES] for low, high in pairs]
        return [[low & LOW_NIBBLES, high & LOW_NIBBLES, low & HIGH_NIBBLES, high & HIGH_NIBBLES] for low, high in pairs]

    def _multiply_query(self, state, accumulator, operand, unit: int, mma: int):
        if const_expr(self.tile.k_unit == 8):
            return ptx.mma_m16n8k8(accumulator, operand, [state.query[unit]], dtype="f16")
        first = 2 * (unit * self.k_mmas + mma)
        return ptx.mma_m16n8k16(accumulator, operand, state.query[first : first + 2], dtype="f16")

    # -- values ---------------------------------------------------------------------------------------------------

    def load_value_scales(self, state, tile_address: Int32, block_offset: int):
        """The (scale, shift) words of V per row half, as :meth:`scores` numbers tokens: [j * num_groups + group]."""
        headers = cute.make_rmem_tensor(4 * self.num_groups, Uint32)
        for j in range(4):
            for group, word in enumerate(self._load_header(state.header + tile_address, block_offset, j)):
                headers[j * self.num_groups + group] = word
        return headers

    def log_scale(self, headers, j: int):
        """log2 of the largest scale of a row: what its probabilities are multiplied by on their way through the MMA."""
        largest = Float32(MIN_SCALE)
        for group in range(self.num_groups):
            largest = ptx.fmax(largest, ptx.half2_low_to_float(headers[j * self.num_groups + group]))
        return ptx.log2(largest)

    def block_offset(self, block: int) -> int:
        """Bytes from a slice's first block of tokens to another."""
        return WORD_BYTES * self.tile.token_offset(BLOCK_TOKENS * block)

    def token(self, state, j: int):
        """Place within its block of the token that the lane holds in row half j of the scores."""
        bits = self.tile.token_bits
        g = state.g
        row = ((g % 2) << bits[0]) + ((g // 2 % 2) << bits[1]) + ((g // 4) << bits[2])
        return row + (j % 2 << bits[3]) + (j // 2 << bits[4])

    def mask_values(self, state, tile_address: Int32, block_offset: int, headers, remaining: Int32):
        """Sets scale and shift of tokens from ``remaining`` on to zero: what lies there may be anything."""
        for j in range(4):
            for group in range(self.num_groups):
                word = headers[j * self.num_groups + group]
                headers[j * self.num_groups + group] = cutlass.select_(
                    self.token(state, j) < remaining, word, Uint32(0)
                )

    def rescale(self, state, factors):
        """Multiplies everything accumulated by a factor per head column."""
        for i in range(0, self.num_accumulators, 2):
            for column in range(2):
                state.accumulators[i + column] = state.accumulators[i + column] * factors[column]
        for group in range(self.num_groups):
            for column in range(2):
                index = 2 * group + column
                state.shift_sums[index] = state.shift_sums[index] * factors[column]

    def recentre(self, state):
        """Moves the mean of the accumulators of each group over to its shift sum.

        Codes are positive, so the accumulators grow with every token, and tensor cores round sums toward zero: over
        100,000 tokens the bias would outgrow the output, in which shift and codes cancel. Since the mean is no larger
        than the largest accumulator, moving it costs no more than rounding, whatever the rows' scales are.
        """
        for group in range(self.num_groups):
            units = [unit for unit in range(self.v_units) if self._group_of(unit) == group]
            places = [(unit, nibble) for unit in units for nibble in range(self.v_rows)]
            for column in range(2):
                total = Float32(0.0)
                for unit, nibble in places:
                    value = state.accumulators[self._accumulator(unit, nibble, column)]
                    total = ptx.fma(value, Float32(_unit_of(nibble)), total)
                mean = _lane_sum(total, (4, 8, 16)) * (1.0 / (8 * len(places)))
                for unit, nibble in places:
                    index = self._accumulator(unit, nibble, column)
                    state.accumulators[index] = ptx.fma(
                        mean, Float32(-1.0 / _unit_of(nibble)), state.accumulators[index]
                    )
                # The shift sums are added up over lanes at the end: one lane takes the amount.
                index = 2 * group + column
                amount = cutlass.select_(state.g == 0, mean, Float32(0.0))
                state.shift_sums[index] = state.shift_sums[index] + amount

    def _group_of(self, unit: int) -> int:
        """Group of the columns of a unit of the output."""
        return unit * self.tile.v_unit // self.tile.group_width

    def _accumulator(self, unit: int, nibble: int, column: int) -> int:
        """Accumulator of a lane's ``nibble``-th output row of a unit, head 2t + column."""
        return 4 * (unit * self.v_mmas + nibble // 2) + 2 * (nibble % 2) + column

    def accumulate(self, state, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens; probabilities [j][column] in fp32, headers as :meth:`load_value_scales` gives them."""
        operands = self._probability_operands(state, probabilities, headers)
        for pair in range(2):
            for unit in range(self.v_units):
                words = [
                    [
                        ptx.load_shared(
                            state.v_lane + tile_address, block_offset + self._v_offset(2 * pair + half, parity, unit)
                        )
                        for parity in range(2)
                    ]
                    for half in range(2)
                ]
                self._accumulate_unit(state, unit, words, operands[pair][self._group_of(unit)])

    def _probability_operands(self, state, probabilities, headers):
        """B operands [pair][group] of P * scale, tokens along the contraction; adds P * shift to its own sums."""
        result = []
        for pair in range(2):
            groups = []
            for group in range(self.num_groups):
                operand = []
                for j in (2 * pair, 2 * pair + 1):
                    scale = ptx.half2_low_to_float(headers[j * self.num_groups + group])
                    shift = ptx.half2_high_to_float(headers[j * self.num_groups + group])
                    low, high = probabilities[j]
                    for column, p in enumerate((low, high)):
                        index = 2 * group + column
                        state.shift_sums[index] = state.shift_sums[index] + p * shift
                    operand.append(ptx.transpose_8x8(ptx.pack_f16x2(low * scale, high * scale)))
                groups.append(operand)
            result.append(groups)
        return result

    def _v_offset(self, j: int, parity: int, unit: int) -> int:
        words = self._row_offset(j, parity) + self.tile.header_words + self.tile.v_unit // 8 * unit
        return WORD_BYTES * words

    def _accumulate_unit(self, state, unit: int, words, operand):
        """One unit of columns: words [half][parity] of four tokens, operand the B registers of their probabilities."""
        rows = [self._v_rows(state, *pair) for pair in words]  # [half][output row of the lane]
        for mma in range(self.v_mmas):
            if const_expr(self.v_rows == 1):
                a = [rows[0][0], Uint32(0), rows[1][0], Uint32(0)]
            else:
                a = [rows[0][2 * mma], rows[0][2 * mma + 1], rows[1][2 * mma], rows[1][2 * mma + 1]]
            first = 4 * (unit * self.v_mmas + mma)
            total = [state.accumulators[first + i] for i in range(4)]
            total = ptx.mma_m16n8k16(total, a, operand, dtype="f16")
            for i in range(4):
                state.accumulators[first + i] = total[i]

    def _v_rows(self, state, even: Uint32, odd: Uint32):
        """Packed pairs (even token, odd token) of a lane's neighbouring output rows."""
        if const_expr(self.v_rows == 8):
            words = [ptx.prmt(even, odd, Uint32(0x5410)), ptx.prmt(even, odd, Uint32(0x7632))]
        else:
            words = [ptx.prmt(even, odd, state.v_select)]
        if const_expr(self.v_rows == 1):
            return [(words[0] >> state.v_shift) & LOW_NIBBLES]
        rows = []
        for word in words:
            rows += [word & LOW_NIBBLES, word & HIGH_NIBBLES]
            if const_expr(self.v_rows >= 4):
                rest = word >> 8
                rows += [rest & LOW_NIBBLES, rest & HIGH_NIBBLES]
        return rows

    # -- results --------------------------------------------------------------------------------------------------

    def outputs(self, state):
        """The warp's sums P V: a list of (head column, first column of head_dim, consecutive fp32 values)."""
        # Each lane held the tokens of its own g.
        shifts = [_lane_sum(state.shift_sums[i], (4, 8, 16)) for i in range(2 * self.num_groups)]
        result = []
        for unit in range(self.v_units):
            group = self._group_of(unit)
            first_column = self.tile.v_column(unit, 0, 0) + state.g * self.v_rows
            for column in range(2):
                values = []
                for nibble in range(self.v_rows):
                    value = state.accumulators[self._accumulator(unit, nibble, column)]
                    values.append(value * _unit_of(nibble) + shifts[2 * group + column])
                result.append((column, first_column, values))
        return result


class _State:
    """Registers of one warp; a plain namespace filled by :meth:`Int4Reader.make_state` and ``take_query``."""

    header: Any
    k_lane: Any
    v_lane: Any
    lane: Any
    g: Any
    t: Any
    k_shift: Any
    v_select: Any
    v_shift: Any
    accumulators: Any
    shift_sums: Any
    centred: Any
    score_scale: Any
    query: list[Any]
    query_sums: list[Any]


def _unit_of(nibble: int) -> float:
    """What an accumulator of 1 stands for, by the place that its nibbles have in their byte."""
    return HIGH_NIBBLE_UNIT if nibble % 2 else LOW_NIBBLE_UNIT


def _lane_max(value: Float32, offsets) -> Float32:
    for offset in offsets:
        value = ptx.fmax(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


def _lane_sum(value: Float32, offsets) -> Float32:
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


assert HEADS_PER_WARP == 8  # the N of the MMA: the reader's columns are 2t and 2t + 1
