"""The order of products and hand-overs, warp by warp under random schedules: nobody waits for ever, nothing is read
or overwritten early.

The warpgroups' own code runs on the machine of :mod:`.orders`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla.config import WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import pipeline, serial, weights
from tests.mla import orders


class Model(orders.Played):
    """Products and memory of a machine."""

    def weigh(self, rows: Any, work, memory, stage, block, scale, warp, lane):
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block
        rows.packed = self.block
        return [1.0, 1.0]

    def publish(self, packed, tile, warp, lane) -> None:
        self.machine.step()
        assert not self.machine.readers("weights"), "weights replace those that are read"
        block, warps = self.machine.holds.get("weights", (None, set()))
        self.machine.holds["weights"] = packed, {warp} | (warps if block == packed else set())

    def add_values(self, acc, weights, memory, stage, half: int) -> None:
        machine = self.machine
        assert machine.holds[stage] == self.block
        assert not self.under_way("accumulators"), "accumulators are added to twice at a time"
        if half:
            assert machine.holds["weights"] == (self.block, set(range(WARPGROUP_WARPS)))
            machine.issue({stage, "accumulators", "weights"})
        else:
            assert weights == self.block
            machine.issue({stage, "accumulators"})
        self.acc[machine.warp].append(self.block)


def play(seed: int, shares: list[int], left_out: int | None = None) -> None:
    """One CTA from its first to its last work tile. left_out: a named barrier that nobody waits at."""
    machine = orders.Machine(seed, MlaConfig(), shares, left_out)
    model = Model(machine)
    orders.play_persistent(machine, model.seat(serial.Serial(machine.config)))
    assert all(blocks == list(range(sum(shares))) for blocks in model.acc.values())
    assert not machine.named.get(weights.WEIGHTS_READY[0])


@pytest.mark.parametrize("shares", orders.SHARES, ids=str)
def test_nobody_waits_for_ever_and_nothing_is_read_early(shares):
    for seed in range(15):
        play(seed, shares)


@pytest.mark.parametrize("left_out", [weights.WEIGHTS_READY[0], weights.WEIGHTS_FREE])
def test_neither_barrier_can_be_left_out(left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(seed, [5, 3], left_out)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(shares):
    """The model finds it if a warp asks when it has its own last scores, or, without any, its own queries."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(seed, shares, pipeline.QUERIES_READ)
