"""Weights of 16 tokens at a time, lane by lane in NumPy: where they are stored, and that they add up to the softmax."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cute_kernels.device.softmax import RESCALE_SLACK

pytest.importorskip("cutlass")

from cute_kernels.mla.config import BLOCK_TOKENS, WEIGHT_BYTES, MlaConfig
from cute_kernels.mla.mainloops import softmax, softmax_steps, stepped
from simulator import LANES, Float32, Int32, Meanings, Registers, Warp
from simulator.registers import bf16_bits
from tests.mla.test_output import SCORE_SCALE, accumulators, assert_no_conflicts, assert_softmax_of
from tests.mla.test_tiles import place_of


def test_weights_lie_as_the_second_warpgroup_reads_them(run_on):
    machine = Warp(np.zeros(WEIGHT_BYTES, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    weights = np.random.default_rng(0).random((64, BLOCK_TOKENS)).astype(np.float32)
    memory: Any = SimpleNamespace(weight_pointer=SimpleNamespace(toint=lambda: Int32(0)))
    for warp in range(4):
        scores = accumulators(weights, warp)
        packed = [machine.pack_bf16x2(scores[i], scores[i + 1]) for i in range(0, len(scores), 2)]
        weigher = stepped.Stepped(MlaConfig()).weights
        place = weigher.place(memory, Int32(warp), Int32(LANES))
        for step in range(BLOCK_TOKENS // softmax_steps.STEP_TOKENS):
            weigher.publish_step(packed, place, step)
    words = machine.shared_memory.view(np.uint16)
    for row, column in np.ndindex(weights.shape):
        assert words[place_of(row, column) // 2] == bf16_bits(weights[row, column])
    assert_no_conflicts(machine)


class Voting(Warp):
    """A warp whose votes are kept."""

    def __init__(self, shared_memory: np.ndarray, global_memory: np.ndarray):
        super().__init__(shared_memory, global_memory)
        self.votes: list[bool] = []

    def meanings(self) -> Meanings:
        known = super().meanings()
        return replace(known, arch={**known.arch, "vote_any_sync": self.vote})

    def vote(self, lanes: Any) -> bool:
        self.votes.append(bool(np.any(lanes)))
        return self.votes[-1]


@pytest.mark.parametrize("slack", [RESCALE_SLACK, 0.0])
def test_softmax_over_blocks(run_on, slack):
    """Weights, accumulators and factors of several blocks add up to the softmax, whatever the lazy maximum does, which
    the warp raises where one of its lanes has to.

    A maximum that may not fall behind is the greatest score."""
    machine = Voting(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    generator = np.random.default_rng(2)
    blocks = [generator.standard_normal((64, BLOCK_TOKENS)) * 20 * growth for growth in (1, 0.1, 3, 3, 8, 0.1)]
    blocks[0][5], blocks[1][5] = -np.inf, -np.inf
    scale = Float32(SCORE_SCALE)
    maxima, totals, factors = [Registers(2, Float32) for _ in range(3)]
    maxima.fill(softmax.LOWEST)
    acc = Registers(4, Float32)  # of weights, as accumulators that both rows have two of
    for block in blocks:
        scores = accumulators(block.astype(np.float32), 0)
        rows = SimpleNamespace(scores=scores, maxima=maxima, totals=totals, acc=acc)
        with np.errstate(over="ignore"):  # of weights by maxima that do not stay
            softmax_steps.begin(rows, factors, scale, slack, len(acc))
        for step in range(1, BLOCK_TOKENS // softmax_steps.STEP_TOKENS):
            softmax_steps.weigh_step(scores, maxima, scale, step)
        softmax_steps.add_totals(rows, factors)
        for i in range(softmax.NUM_SCORES):
            acc[i % 4] = acc[i % 4] + scores[i]
            assert scores[i].max() <= 2.0**slack * 1.01
    assert machine.votes[0] and not machine.votes[-1]
    of_rows = [acc[2 * row] + acc[2 * row + 1] for row in range(2)]
    assert_softmax_of(blocks, maxima, totals, of_rows, exact=not slack)
