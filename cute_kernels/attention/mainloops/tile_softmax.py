"""Online softmax over the accumulators of a 64-row MMA: two rows a thread, four threads a row.

If V's rows have scales, the MMAs take probability * scale in fp16. So the softmax reference is the maximum of
score + log2(scale), which bounds this product.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import TILE_SCALE_BYTES
from cute_kernels.attention.loads.powers import powers_in
from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.device.loads import load_word_below
from cute_kernels.device.softmax import MIN_SCORE_SCALE, RESCALE_SLACK, ROW_LANES, OnlineSoftmax, row_of
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.formats.scores.terms import ScoreState, ScoreTerms


@dataclass(frozen=True)
class Rows:
    """A thread's softmax state of its two rows of a work tile.

    Attributes:
        positions: the rows' query positions in the request.
        scales: factors that turn scores into exponents of 2.
        state: the state of score options for both rows.
        masks: the indices of both rows in the tree's mask; empty without a tree.
        online: the softmax references and totals of both rows.
    """

    positions: list[Int32]
    scales: list[Float32]
    state: ScoreState
    masks: list[Int64]
    online: OnlineSoftmax


@dataclass(frozen=True)
class TileScale:
    """The scales of a part of a tile: K's factor, log2 of V's factor, and the reciprocal of V's factor. Factors are
    powers of 2.
    """

    key: Any
    value_log: Any
    value_reciprocal: Any


class Softmax:
    """The softmax over a tile's scores, with the features of a configuration."""

    def __init__(self, config: ExtendConfig):
        self.features = config.features
        self.tokens = config.tile_tokens
        self.count = config.tile_tokens // 2  # scores of a thread
        # Probabilities of E4M3 are up to 2**8, so that its 17 powers of 2 are those of the great ones.
        self.headroom = RESCALE_SLACK if config.fp8 else 0.0
        self.adds_totals = config.ones_rows == 0
        self.tile_scales, self.runs, self.tree = config.tile_scales, config.scale_runs, config.tree
        # A thread's two rows are the columns that terms know, and its keys of a block their rows.
        self.terms = ScoreTerms(self.features, 2, self.count // 2)

    def load_tile_scales(self, address) -> list[Any]:
        """Loads a tile's scales from shared memory, as words for :meth:`scales_in`."""
        if not any(self.tile_scales):
            return []
        return ptx.load_shared_vector(address, 0, TILE_SCALE_BYTES // 4 if self.runs == 1 else self.runs)

    def scales_in(self, words) -> list[TileScale]:
        """Returns the scales of each part of a tile; 1 if tiles have none. Callers convert words as late as possible,
        since scales take three times as many registers, and registers are scarce while scores and accumulators are
        live.
        """
        if not words:
            return [TileScale(Float32(1.0), Float32(0.0), Float32(1.0))]
        if self.runs > 1:
            return [TileScale(*powers_in(word)) for word in words]
        key, _, value_log, reciprocal = (word.bitcast(Float32) for word in words)
        return [TileScale(key, value_log, reciprocal)]

    def run_of(self, index: int) -> int:
        """Returns the part of a tile in which a thread's ``index``-th accumulator lies. Each part has its own scale."""
        return sum_place(index)[1] * self.runs // self.tokens

    def place(self, index: int) -> tuple[int, int]:
        """Returns (index among the thread's keys of a block, row 0 or 1) of a thread's ``index``-th accumulator."""
        return index // 4 * 2 + index % 2, row_of(index)

    @cute.jit
    def take(self, scores, rows: Rows, features, work, block: Int32, masked, tile, lane: Int32):
        """Applies score options to scores in place, then masks them."""
        token = block * self.tokens + lane % 4 * 2
        if const_expr(self.terms.load):
            own = [i for i in range(self.count) if row_of(i) == 0]
            self.terms.ask(rows.state, [token + sum_place(i)[1] for i in own])
        if const_expr(self.terms.change_scores):
            scales = self.scales_in(tile)
            for i in cutlass.range_constexpr(self.count):
                x = scores[i] * self.scale_of(rows, scales[self.run_of(i)], row_of(i))
                scores[i] = self.terms.change(rows.state, self.place(i), x, token + sum_place(i)[1])
        if masked:
            for row in cutlass.range_constexpr(2):
                stop = work.kv_stop - token
                if const_expr(self.features.causal):
                    stop = cutlass.min(rows.positions[row] + 1, work.kv_stop) - token
                bits = []
                if const_expr(self.tree):
                    first = block * self.tokens - work.before
                    words = features.tree_mask + Int64(rows.masks[row]) * features.tree_words * 4
                    bits = self.tree_bits(words, features.tree_words, first, lane)
                for i in cutlass.range_constexpr(self.count):
                    if const_expr(row_of(i) == row):
                        column = sum_place(i)[1]
                        seen = column < stop
                        if const_expr(self.tree):
                            seen = seen & ((bits[column // 32] & Uint32(1 << column % 32)) != 0)
                        scores[i] = cutlass.select_(seen, scores[i], -Float32.inf)
                        hidden = self.terms.hides(rows.state, rows.positions[row], token + column)
                        if const_expr(hidden is not None):
                            scores[i] = cutlass.select_(hidden, -Float32.inf, scores[i])

    def tree_bits(self, address: Int64, num_words: Int32, first: Int32, lane) -> list[Any]:
        """Returns words of a query's tree mask for a block, shifted for the lane. The accumulator in column c belongs
        to bit c % 32 of word c // 32. first: the block's first token, counted from the request's first new token. Older
        tokens, below 0, are always seen.
        """
        whole, shift = first >> 5, Uint32(first & 31)
        words = []
        for k in range(self.tokens // 32 + 1):
            index = whole + k
            word = load_word_below(index, num_words, address + Int64(index) * 4)
            words.append(cutlass.select_(index < 0, Uint32(0xFFFFFFFF), word))
        bits = []
        for low, high in itertools.pairwise(words):
            aligned = (low >> shift) | ((high << Uint32(1)) << (Uint32(31) - shift))
            bits.append(aligned >> Uint32(lane % 4 * 2))
        return bits

    def scale_of(self, rows: Rows, scale: TileScale, row: int):
        """Returns the factor that turns the scores of a part of a tile into exponents of 2.

        The factor is never 0, as a masked score is -inf and -inf * 0 is NaN. For queries or keys of zeros the product
        of scales rounds to 0, so the factor is at least `MIN_SCORE_SCALE`.
        """
        if not self.tile_scales[0]:
            return rows.scales[row]
        return ptx.fmax(rows.scales[row] * scale.key, Float32(MIN_SCORE_SCALE))

    def factor(self, rows: Rows, scale: TileScale, row: int):
        """Returns the factor that turns scores into exponents of 2 after :meth:`take`. It is 1 if :meth:`take` has
        already applied it.
        """
        return Float32(1.0) if const_expr(self.terms.change_scores) else self.scale_of(rows, scale, row)

    def own(self, row: int, run: int) -> list[int]:
        """Returns the indices of a thread's accumulators in row ``row``, 0 or 1, and in part ``run`` of a tile."""
        return [i for i in range(self.count) if row_of(i) == row and self.run_of(i) == run]

    def highest(self, scores, rows: Rows, scales: list[TileScale], row: int):
        """Returns the maximum, over a row's keys in the block, of score + log2(V's scale). The score is an exponent of
        2; V's scale is that of the key's part of the tile.
        """
        tops = [in_pairs(ptx.fmax, [scores[i] for i in self.own(row, run)]) for run in range(self.runs)]
        if self.runs == 1:
            tops = [lane_max(tops[0], ROW_LANES)]
        logs = [scale.value_log if self.tile_scales[1] else Float32(0.0) for scale in scales]
        tops = [
            ptx.fma(top, self.factor(rows, scale, row), log) for top, scale, log in zip(tops, scales, logs, strict=True)
        ]
        return tops[0] if self.runs == 1 else lane_max(in_pairs(ptx.fmax, tops), ROW_LANES)

    def weigh(self, scores, rows: Rows, factors, tile) -> None:
        """Turns scores into probabilities times the scale of V's tile. Adds the probabilities to the totals, unless
        MMAs do.

        factors: fp32 [2] in registers. It receives the factors by which earlier accumulators of the two rows have to be
        multiplied.
        """
        scales = self.scales_in(tile)
        for row in range(2):
            factors[row] = rows.online.follow(row, self.highest(scores, rows, scales, row), self.headroom)
        for row in range(2):
            totals = []
            for run, scale in enumerate(scales):
                factor, shift = self.factor(rows, scale, row), -rows.online.references[row]
                if self.tile_scales[1]:
                    shift = shift + scale.value_log
                parts = [Float32(0.0), Float32(0.0)]
                for i in self.own(row, run):
                    scores[i] = ptx.exp2(ptx.fma(scores[i], factor, shift))
                    parts[i // 4 % 2] = parts[i // 4 % 2] + scores[i]
                total = parts[0] + parts[1]
                totals.append(total * scale.value_reciprocal if self.tile_scales[1] else total)
            if self.adds_totals:
                rows.online.add(row, factors[row], sum(totals[1:], totals[0]))
