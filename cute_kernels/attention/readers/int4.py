"""Turns INT4 rows into MMA operands.

Nibbles become fp16 operands without an arithmetic instruction. A nibble masked out of a word at bit 0 or 4 of a 16-bit
half *is* an fp16 subnormal, q * 2**-24 or q * 2**-20. Tensor cores multiply subnormals exactly and at full speed. The
factor 16 between the two positions goes into Q (exactly) and into the output rows. So 8 elements of K cost one shift
and four masks. V's pairs run along tokens, which costs two more byte permutes for 16 elements. The usual magic-number
decode (Kim et al. 2022, "Who says elephants can't run", FasterTransformer) also needs an exact subtraction for each
pair.

Elements are not multiplied by their scale. With x = q * scale + shift,
    S = scale_t * (q_t . Q) + shift_t * sum(Q)            per group of columns
    O = sum_t (P_t scale_t) q_t + sum_t P_t shift_t        per group of columns
so scale and shift change only scores and probabilities. The MMA takes P * scale as fp16. To bound it by a constant,
the softmax reference is the maximum of s + log2(scale of V) instead of the maximum of s.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.readers.common import Query, State
from cute_kernels.attention.readers.rows import RowKeyReader, RowValueReader
from cute_kernels.device import ptx
from cute_kernels.device.lanes import lane_sum

LOW_NIBBLES = 0x000F000F
HIGH_NIBBLES = 0x00F000F0
LOW_NIBBLE_UNIT = 2.0**24  # 1 / value of the fp16 subnormal that stands for nibble 1 at bit 0
HIGH_NIBBLE_UNIT = 2.0**20


class Int4KeyReader(RowKeyReader):
    """The key reader of INT4 rows. A packed pair has nibbles n and n + 4 of the lane's word. If several lanes share a
    word, each lane's pairs have only nibbles of its share.
    """

    code_unit = LOW_NIBBLE_UNIT
    sum_factor = 1.0 / LOW_NIBBLE_UNIT

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.lane_codes = self.tile.k_unit // 4
        half = self.lane_codes // 2
        self.pairs = tuple((code, code + half) for code in range(half))
        # Odd registers meet the high nibble of a byte, which is worth 16 times as much.
        self.factors = tuple(1.0 / 16.0 if register % 2 else 1.0 for register in range(half))

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        state = super().make_state(lane, head, slice_index)
        state.shift = Uint32({8: 0, 4: 8 * (state.t % 2), 2: 4 * state.t}[self.lane_codes])
        return state

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the query columns of a lane, in every block of queries. addresses: for each block, the address
        of the lane's query head.
        """
        t = lane % 4
        column = {8: 8 * t, 4: 8 * (t // 2) + 2 * (t % 2), 2: 2 * (t // 2)}[self.lane_codes]
        words = []
        for address in addresses:
            units = []
            for unit in range(self.tile.k_units):
                offset = unit * self.tile.k_unit * 2
                if self.lane_codes == 8:
                    units.append(self.load_queries(address + 2 * column, offset, 4))
                else:
                    # The lane's first nibbles, and those four further on.
                    places = (offset, offset + 8)
                    loads = [self.load_queries(address + 2 * column, p, 1) for p in places]
                    units.append([load[0] for load in loads])
            words.append(units)
        return Query(words)

    def unit_queries(self, state: State, words):
        if self.lane_codes == 2:
            words = [ptx.prmt(words[0], words[1], Uint32(0x5410) + Uint32(state.t % 2) * 0x2222)]
        return self.floats(words)

    def unit_operands(self, state: State, low_row, high_row):
        if self.lane_codes == 8:
            pairs = [(low_row, high_row), (low_row >> 8, high_row >> 8)]
        else:
            pairs = [(low_row >> state.shift, high_row >> state.shift)]
        if self.lane_codes == 2:
            return [[low & LOW_NIBBLES, high & LOW_NIBBLES] for low, high in pairs]
        return [[low & LOW_NIBBLES, high & LOW_NIBBLES, low & HIGH_NIBBLES, high & HIGH_NIBBLES] for low, high in pairs]

    def add_group(self, score, header, dot, query_sum):
        offset = ptx.half2_high_to_float(header) * query_sum
        if score is not None:
            offset = score + offset
        return offset + ptx.half2_low_to_float(header) * dot


class Int4ValueReader(RowValueReader):
    """The value reader of INT4 rows, which also adds up P * shift."""

    min_scale = 2.0**-24  # the least positive fp16

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        state = super().make_state(lane, head, slice_index, given_scale, keys)
        state.select = Uint32(self._selector(state.g))
        state.shift = Uint32(4 * (state.g % 2))
        state.shift_sums = cute.make_rmem_tensor(self.config.columns * self.num_groups, Float32)
        state.shift_sums.fill(0.0)
        return state

    def _selector(self, g: Int32):
        """Returns the prmt selector that moves the lane's nibbles of two tokens into the two halves of a word."""
        if self.lane_codes == 8:
            return 0x5410
        if self.lane_codes == 4:
            return 0x5410 + (g % 2) * 0x2222
        byte = g % 4 if self.lane_codes == 2 else g // 2
        return 0x4400 + byte * 0x1111

    def scale(self, header):
        return ptx.half2_low_to_float(header)

    def add_header(self, state: State, group: int, header, probabilities):
        shift = ptx.half2_high_to_float(header)
        for column, p in enumerate(probabilities):
            index = self._shift_sum(group, column)
            state.shift_sums[index] = state.shift_sums[index] + p * shift

    def _shift_sum(self, group: int, column: int) -> int:
        return self.config.columns * group + column

    def code_pairs(self, state: State, even, odd):
        if self.lane_codes == 8:
            words = [ptx.prmt(even, odd, Uint32(0x5410)), ptx.prmt(even, odd, Uint32(0x7632))]
        else:
            words = [ptx.prmt(even, odd, state.select)]
        if self.lane_codes == 1:
            return [(words[0] >> state.shift) & LOW_NIBBLES]
        rows = []
        for word in words:
            rows += [word & LOW_NIBBLES, word & HIGH_NIBBLES]
            if self.lane_codes >= 4:
                rest = word >> 8
                rows += [rest & LOW_NIBBLES, rest & HIGH_NIBBLES]
        return rows

    def recentre(self, state: State):
        """Moves the mean of the accumulators of each group of columns to the shift sums.

        Codes are positive, so the accumulators grow with every token, and in the output they cancel with the shifts.
        Tensor cores round sums toward zero: over 100,000 tokens the error of large accumulators would exceed the
        output. The mean is no larger than the largest accumulator. So moving it adds no more error than rounding does,
        whatever the rows' scales are.
        """
        for group in range(self.num_groups):
            units = [unit for unit in range(self.tile.v_units) if self.group_of(unit) == group]
            places = [(unit, code) for unit in units for code in range(self.lane_codes)]
            for column in range(self.config.columns):
                total = Float32(0.0)
                for unit, code in places:
                    value = state.accumulators[self.accumulator(unit, code, column)]
                    total = ptx.fma(value, Float32(unit_of(code)), total)
                mean = lane_sum(total, (4, 8, 16)) * (1.0 / (8 * len(places)))
                for unit, code in places:
                    index = self.accumulator(unit, code, column)
                    state.accumulators[index] = ptx.fma(mean, Float32(-1.0 / unit_of(code)), state.accumulators[index])
                # The shift sums are added up over lanes at the end: one lane takes the amount.
                index = self._shift_sum(group, column)
                amount = cutlass.select_(state.g == 0, mean, Float32(0.0))
                state.shift_sums[index] = state.shift_sums[index] + amount

    def rescale(self, state: State, factors):
        super().rescale(state, factors)
        for group in range(self.num_groups):
            for column, factor in enumerate(factors):
                index = self._shift_sum(group, column)
                state.shift_sums[index] = state.shift_sums[index] * factor

    def output_terms(self, state: State):
        # Each lane held the tokens of its own g.
        count = self.config.columns * self.num_groups
        return [lane_sum(state.shift_sums[index], (4, 8, 16)) for index in range(count)]

    def output(self, value, unit: int, code: int, column: int, terms):
        return value * unit_of(code) + terms[self._shift_sum(self.group_of(unit), column)]


def unit_of(code: int) -> float:
    """Returns the output that an accumulator of 1 stands for. It depends on whether nibble ``code`` is the lower or the
    upper nibble of its byte.
    """
    return HIGH_NIBBLE_UNIT if code % 2 else LOW_NIBBLE_UNIT
