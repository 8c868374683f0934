"""The stepped mainloop, warp by warp under random schedules, as :mod:`.test_serial` plays the serial one.

Products may be under way while weights are made and stored; stores are visible to products behind a fence only.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla.config import WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import pipeline, stepped, weights
from tests.mla import orders


class Model(orders.Played):
    """Products and memory of a machine."""

    additions = weights.STEPS

    def common_flags(self, memory, stage) -> int:
        assert self.machine.holds[stage] == self.block
        return 0

    def mask(self, scores, flags, work, memory, stage, block, warp, lane) -> None:
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block

    def pack_step(self, rows: Any, step: int) -> None:
        assert not self.under_way(("packed", step)), "weights replace those that are read"
        rows.packed[step] = self.block

    def place(self, memory, warp, lane) -> int:
        return warp

    def publish_step(self, packed, warp, step: int) -> None:
        self.machine.step()
        stored = "weights", step
        assert not self.machine.readers(stored), "weights replace those that are read"
        if self.machine.holds.get(stored, (None,))[0] != packed[step]:
            self.machine.holds[stored] = packed[step], set()
        self.machine.holds[stored][1].add(warp)

    def add_values(self, acc, weights, memory, stage, half: int, steps: range | None = None) -> None:
        assert steps is not None
        machine, block = self.machine, self.block
        assert machine.holds[stage] == block
        for step in steps:
            if half:
                assert machine.visible[machine.warp].get(("weights", step)) == (block, set(range(WARPGROUP_WARPS))), (
                    "weights are not there"
                )
                machine.issue({stage, "accumulators", ("weights", step)})
            else:
                assert weights[step] == block
                machine.issue({stage, "accumulators", ("packed", step)})
            self.acc[machine.warp].append((block, step))


def assert_all_added(model: orders.Played) -> None:
    """That every warp has added every step of every block, in order."""
    wanted = [(block, step) for block in range(sum(model.machine.shares)) for step in range(weights.STEPS)]
    assert all(steps == wanted for steps in model.acc.values())


def play(seed: int, shares: list[int], left_out: int | None = None, fenced: bool = True) -> None:
    """One CTA from its first to its last work tile. left_out: a named barrier that nobody waits at; fenced: whether
    stores become visible to products."""
    machine = orders.Machine(seed, MlaConfig(), shares, left_out, fenced)
    model = Model(machine)
    orders.play_persistent(machine, model.seat(stepped.Stepped(machine.config)))
    assert_all_added(model)
    assert not any(machine.named.get(barrier_id) for barrier_id in weights.WEIGHTS_READY)


@pytest.mark.parametrize("shares", orders.SHARES, ids=str)
def test_nobody_waits_for_ever_and_nothing_is_read_early(shares):
    for seed in range(15):
        play(seed, shares)


@pytest.mark.parametrize("left_out", [*weights.WEIGHTS_READY, weights.WEIGHTS_FREE])
def test_no_barrier_can_be_left_out(left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(seed, [5, 3], left_out)


def test_the_fence_cannot_be_left_out():
    with pytest.raises(AssertionError, match="weights are not there"):
        play(0, [1], fenced=False)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(shares):
    """The model finds it if a warp asks when it has its own last scores, or, without any, its own queries."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(seed, shares, pipeline.QUERIES_READ)
