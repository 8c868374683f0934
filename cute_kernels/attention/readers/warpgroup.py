"""INT4 rows with one group of 128 columns, multiplied by the four warps of a warpgroup together.

Where 32 queries want the same rows, mma.sync has no rate left: m16n8k16 takes 1.6 cycles of an SM, four of them for
every 16 x 16 codes 205 of the 223 cycles in which 32 tokens arrive. wgmma m64n32k16 takes 128. A is decoded codes in
registers, as for mma.sync; B lies in shared memory.

Scores: a warp brings the tokens of its own slice, 16 rows of the 64, and meets queries that the CTA shares. Values: a
warp brings its own 32 of the 128 columns, of all tokens of the warpgroup, and meets the probabilities of all four
warps. So each code is decoded once, by the warp that needs it, and a lane accumulates 32 sums instead of 128. The price
is that the four warps have one maximum and wait for each other's probabilities.

B operands are rows of 64 elements of 16 bits with 128-byte swizzling (:mod:`cute_kernels.device.wgmma`): for queries
[32 queries, head_dim], for probabilities [32 queries, 128 tokens], where the tokens of warp w's row half j are the
eight from 32 w + 8 j on.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.policies import BLOCK_QUERIES, WARPGROUP_WARPS, WGMMA_QUERIES, WGMMA_ROW_BYTES, WarpgroupMma
from cute_kernels.attention.readers.common import State
from cute_kernels.attention.readers.int4 import Int4KeyReader, Int4ValueReader, unit_of
from cute_kernels.device import ptx, wgmma
from cute_kernels.device.lanes import lane_sum
from layouts.kv.tile import WORD_BYTES

CHUNK_BYTES = 16  # 8 elements of an operand's row, what swizzling moves
BOX_CHUNKS = WGMMA_ROW_BYTES // CHUNK_BYTES
BOX_BYTES = WGMMA_QUERIES * WGMMA_ROW_BYTES  # of 64 columns of a B operand
BOX_STEPS = WGMMA_ROW_BYTES // wgmma.STEP_BYTES
LEAST_SCALE = 2.0**-126
ROW_HALVES = 4  # of a block of 32 tokens
STEPS_AT_ONCE = 2  # k16 steps of P V whose operands are handed over together
VALUE_GROUPS = 2  # of P V of a tile: registers of the first one's operands are free while the second one is running


def chunk_offset(chunk: int) -> tuple[int, int]:
    """What is exclusive-or-ed to, and then added to, the address of a row's chunk 0 for another chunk."""
    return chunk % BOX_CHUNKS * CHUNK_BYTES, chunk // BOX_CHUNKS * BOX_BYTES


def step_offset(step: int) -> int:
    """Bytes from a B operand's first 16 columns to those of another k16 step."""
    return step // BOX_STEPS * BOX_BYTES + step % BOX_STEPS * wgmma.STEP_BYTES


def store_numbers(t: Int32, address: Int32, values) -> None:
    """Writes a number of each of lane t's columns, alike in all g, to its query's place from ``address`` on."""
    for column in range(0, len(values), 2):
        ptx.store_shared(address + 8 * t, 4 * BLOCK_QUERIES * (column // 2), values[column : column + 2])


def load_numbers(t: Int32, address: Int32, columns: int) -> list[Any]:
    """What :func:`store_numbers` has written, by column."""
    pairs = [ptx.load_shared_vector(address + 8 * t, 4 * BLOCK_QUERIES * block, 2) for block in range(columns // 2)]
    return [word.bitcast(Float32) for pair in pairs for word in pair]


class WarpgroupKeyReader(Int4KeyReader):
    """Scores of a warp's 32 tokens against the 32 queries of its CTA."""

    def store_query(self, state: State, address: Int32):
        """Writes the B operand of the queries, from the registers that are those of mma.sync; one warp of a CTA.

        address: of the operand, a multiple of 1024.
        """
        row = address + state.g * (WGMMA_ROW_BYTES + CHUNK_BYTES) + 4 * state.t
        store_numbers(state.t, address + WarpgroupMma.sum_offset, [sums[0] for sums in state.query_sums])
        for block, registers in enumerate(state.query):
            for chunk, word in enumerate(registers):
                flipped, added = chunk_offset(chunk)
                rows = block * BLOCK_QUERIES * WGMMA_ROW_BYTES
                ptx.store_shared(row ^ flipped, added + rows, [word])

    def load_query_sums(self, state: State) -> list[Any]:
        """The sums of the lane's queries: rather loaded for every tile than held in as many registers."""
        return load_numbers(state.t, state.query_sum_address, self.config.columns)

    def load_headers(self, state: State, tile_address: Int32) -> list[Any]:
        """Headers of the warp's tokens, by row half."""
        address = state.header_offset + tile_address
        return [self._load_header(address, 0, j)[0] for j in range(ROW_HALVES)]

    def start_scores(self, state: State, tile_address: Int32, half: int) -> list[Any]:
        """Starts the dot products of half of the warp's 32 tokens, a group of their own."""
        address, rows = state.lane_offsets + tile_address, (2 * half, 2 * half + 1)
        words = [
            [ptx.load_shared(address, self._code_offset(j, unit)) for unit in range(self.tile.k_units)] for j in rows
        ]
        dots: list[Any] = []
        for unit in range(self.tile.k_units):
            operands = self.unit_operands(state, words[0][unit], words[1][unit])
            ready = wgmma.fence([word for step in operands for word in step])
            for step in range(len(operands)):
                b = wgmma.advanced(state.query_operand, step_offset(unit * len(operands) + step))
                a = ready[4 * step : 4 * step + 4]
                if dots:
                    dots = wgmma.mma(dots, a, b, dtype="f16")
                else:
                    dots = wgmma.first_mma(2 * self.config.columns, a, b, dtype="f16")
        wgmma.commit()
        return dots

    def rows(self, sums) -> list[list[Any]]:
        """Dot products [j][column] of two row halves, from what was waited for."""
        columns = range(self.config.columns)
        return [[sums[4 * (column // 2) + 2 * j + column % 2] for column in columns] for j in range(2)]

    def scaled(self, state: State, dots, headers):
        """Scores without ``state.score_scale``: [j][column], of as many tokens as there are headers."""
        totals = self.load_query_sums(state)
        return [
            [self.add_group(None, header, dot, total) for dot, total in zip(row, totals, strict=True)]
            for row, header in zip(dots, headers, strict=True)
        ]

    def lines(self, state: State, headers) -> list[tuple[Any, Any]]:
        """For each token (a, b): a * dot + b * (sum of the query) is the logit in powers of two; a is not 0."""
        result = []
        for header in headers:
            scale = ptx.half2_low_to_float(header) * state.score_scale
            # A hidden dot product is -inf, which 0 would make a NaN.
            scale = cutlass.select_(scale == 0.0, Float32(LEAST_SCALE), scale)
            result.append((scale, ptx.half2_high_to_float(header) * state.score_scale))
        return result


class WarpgroupValueReader(Int4ValueReader):
    """P V of a warpgroup's 128 tokens in 32 columns of head_dim a warp: lane g has four of them, neighbours."""

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.lane_codes = 4
        self.unit_mmas = 2  # m64: columns 4 g and 4 g + 1 of all warps, then the next two
        self.num_accumulators = 4 * self.unit_mmas
        self.slice_words = self.tile.token_offset(config.slice_tokens)
        # Accumulators in the order of the registers of each MMA.
        self._places = [
            [self.place(m, i % 4 // 2, i // 4 * 2 + i % 2) for i in range(2 * config.columns)]
            for m in range(self.unit_mmas)
        ]

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        state = super().make_state(lane, head, slice_index, given_scale, keys)
        state.warp = slice_index % WARPGROUP_WARPS
        # What recentring has taken off this warp's columns alone is rarely needed: in shared memory, all lanes alike.
        state.centres = keys.centres
        store_numbers(state.t, state.centres, [Float32(0.0)] * self.config.columns)
        # The lane's row of a probability operand, chunk 0 of the warp.
        chunk = state.warp % 2 * ROW_HALVES
        swizzled = (chunk ^ lane % BOX_CHUNKS) * CHUNK_BYTES
        state.probability_row = state.warp // 2 * BOX_BYTES + lane * WGMMA_ROW_BYTES + swizzled
        return state

    def _codes_start(self, state: State, head: Int32, slice_index: Int32):
        warp = slice_index % WARPGROUP_WARPS
        first = self._warp_offset(head, slice_index - warp) + self._row_t(state)
        return first + WARPGROUP_WARPS * warp + state.g // 2

    def store_probabilities(self, state: State, address: Int32, first: int, probabilities, headers):
        """Writes P * scale of the warp's tokens, fp16, into the B operand at ``address``; the largest pair of them.

        probabilities: fp32 [j][column], of row halves from ``first`` on, as headers.
        """
        largest, row = None, address + state.probability_row
        for j, header in enumerate(headers):
            scale = self.scale(header[0])
            scaled = [p * scale for p in probabilities[j]]
            words = [ptx.pack_f16x2(*scaled[column : column + 2]) for column in range(0, len(scaled), 2)]
            ptx.store_matrix_x4(row ^ (first + j) * CHUNK_BYTES, 0, words, transpose=True)
            for word in words:
                largest = word if largest is None else ptx.max_f16x2(largest, word)
        return largest

    def load_codes(self, state: State, tile_address: Int32):
        """The lane's words of all tokens of the warpgroup: [k16 step][row half of the step][parity of the token]."""
        address = state.lane_offsets + tile_address
        return [
            [
                [
                    ptx.load_shared(address, WORD_BYTES * self.slice_words * warp + self._code_offset(j, parity, 0))
                    for parity in range(2)
                ]
                for j in (2 * pair, 2 * pair + 1)
            ]
            for warp in range(WARPGROUP_WARPS)
            for pair in range(2)
        ]

    def start_products(self, state: State, tile_address: Int32, probabilities):
        """Starts adding P V of the warpgroup's tokens; probabilities: their descriptor.

        The codes have been read when it returns. Until a wait the accumulators are the tensor cores'.
        """
        words, mmas = self.load_codes(state, tile_address), range(self.unit_mmas)
        sums = [[state.accumulators[place] for place in places] for places in self._places]
        for first in range(0, len(words), STEPS_AT_ONCE):
            rows = [[self.code_pairs(state, *pair) for pair in step] for step in words[first : first + STEPS_AT_ONCE]]
            operands = [
                word
                for low, high in rows
                for m in mmas
                for word in (low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1])
            ]
            ready = wgmma.fence(operands)
            for i in range(STEPS_AT_ONCE):
                b = wgmma.advanced(probabilities, step_offset(first + i))
                for m in mmas:
                    start = 4 * (self.unit_mmas * i + m)
                    sums[m] = wgmma.mma(sums[m], ready[start : start + 4], b, dtype="f16")
            if (first + STEPS_AT_ONCE) % (len(words) // VALUE_GROUPS) == 0:
                wgmma.commit()
        wgmma.wait(VALUE_GROUPS - 1)
        self._set_accumulators(state, [value for total in sums for value in total])

    def wait_for(self, state: State, sums, pending: int) -> list[Any]:
        """Waits for all products but the last ``pending`` groups; the accumulators are there then, and so are ``sums``.

        sums: of other products that will have ended.
        """
        own = [state.accumulators[place] for places in self._places for place in places]
        finished = wgmma.wait_for([*own, *sums], pending)
        self._set_accumulators(state, finished[: len(own)])
        return finished[len(own) :]

    def _set_accumulators(self, state: State, values):
        """``values`` in the order of the registers of the MMAs."""
        for place, value in zip((place for places in self._places for place in places), values, strict=True):
            state.accumulators[place] = value

    def shift(self, header):
        """The shift in a header, fp32."""
        return ptx.half2_high_to_float(header)

    def recentre(self, state: State):
        """As the base class does, for the warp's columns alone."""
        centres = self._load_centres(state)
        for column in range(self.config.columns):
            places = [self.accumulator(0, code, column) for code in range(self.lane_codes)]
            total = Float32(0.0)
            for code, place in enumerate(places):
                total = ptx.fma(state.accumulators[place], Float32(unit_of(code)), total)
            mean = lane_sum(total, (4, 8, 16)) * (1.0 / (8 * self.lane_codes))
            for code, place in enumerate(places):
                state.accumulators[place] = ptx.fma(mean, Float32(-1.0 / unit_of(code)), state.accumulators[place])
            centres[column] = centres[column] + mean
        store_numbers(state.t, state.centres, centres)

    def _load_centres(self, state: State):
        centres = load_numbers(state.t, state.centres, self.config.columns)
        cute.arch.sync_warp()  # before any lane writes
        return centres

    def rescale(self, state: State, factors):
        super().rescale(state, factors)
        centres = [centre * factor for centre, factor in zip(self._load_centres(state), factors, strict=True)]
        store_numbers(state.t, state.centres, centres)

    def output_terms(self, state: State):
        terms, centres = super().output_terms(state), self._load_centres(state)
        return [term + centre for term, centre in zip(terms, centres, strict=True)]

    def outputs(self, state: State):
        """The warp's columns of P V of its warpgroup: (column, first column of head_dim, four fp32 values)."""
        terms = self.output_terms(state)
        first = 8 * self.lane_codes * state.warp + self.lane_codes * state.g
        return [
            (
                column,
                first,
                [
                    self.output(state.accumulators[self.accumulator(0, code, column)], 0, code, column, terms)
                    for code in range(self.lane_codes)
                ],
            )
            for column in range(self.config.columns)
        ]
