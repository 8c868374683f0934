"""The order of products and hand-overs, warp by warp under random schedules: nobody waits for ever, nothing is read
or overwritten early.

The warpgroups' own code runs on the machine of :mod:`.orders`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla.config import WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import products, serial
from tests.mla import orders


class Model(orders.Played, serial.Serial):
    """The order with products and memory of a machine."""

    def no_rows(self) -> SimpleNamespace:
        return SimpleNamespace(acc=None, scores=None, packed=None, maxima=[0.0, 0.0], totals=[0.0, 0.0])

    def weigh(self, rows: Any, work, memory, stage, block, scale, warp, lane):
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block
        rows.packed = self.block
        return [1.0, 1.0]

    def publish_weights(self, packed, tile, warp, lane) -> None:
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


orders.run_body(Model, orders.METHODS)


def play(monkeypatch, seed: int, shares: list[int], left_out: int | None = None) -> None:
    """One CTA from its first to its last share. left_out: a named barrier that nobody waits at."""
    machine = orders.Machine(seed, MlaConfig(), shares)
    machine.ask(0)
    model = Model(machine)
    monkeypatch.setattr(serial.softmax, "rescale", lambda *_: None)
    orders.play(monkeypatch, serial, model, left_out)
    assert all(blocks == list(range(sum(shares))) for blocks in model.acc.values())
    assert not machine.named.get(serial.WEIGHTS_READY)


@pytest.mark.parametrize("shares", orders.SHARES, ids=str)
def test_nobody_waits_for_ever_and_nothing_is_read_early(monkeypatch, shares):
    for seed in range(15):
        play(monkeypatch, seed, shares)


@pytest.mark.parametrize("left_out", [serial.WEIGHTS_READY, serial.WEIGHTS_FREE])
def test_neither_barrier_can_be_left_out(monkeypatch, left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, [5, 3], left_out)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(monkeypatch, shares):
    """The model finds it if a warp asks when it has its own last scores, or, without any, its own queries."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, shares, products.QUERIES_READ)
