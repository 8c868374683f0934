"""The order of steps, warp by warp under random schedules, as :mod:`.test_serial` plays the plain one.

Products may be under way while weights are made and stored; stores are visible to products behind a fence only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla.config import WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import products, stepped
from tests.mla import orders


class Model(orders.Played, stepped.Stepped):
    """The order with products and memory of a machine."""

    additions = stepped.STEPS

    def no_rows(self) -> SimpleNamespace:
        numbers = {name: [0.0, 0.0] for name in ("maxima", "totals")}
        return SimpleNamespace(acc=None, scores=None, packed=[None] * stepped.STEPS, **numbers)

    def common_flags(self, memory, stage) -> int:
        assert self.machine.holds[stage] == self.block
        return 0

    def mask(self, scores, flags, work, memory, stage, block, warp, lane) -> None:
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block

    def rescale(self, *_) -> None:
        assert not self.under_way("accumulators"), "accumulators are multiplied while they are added to"

    def pack_step(self, rows: Any, step: int) -> None:
        assert not self.under_way(("packed", step)), "weights replace those that are read"
        rows.packed[step] = self.block

    def weight_place(self, memory, warp, lane) -> int:
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


orders.run_body(Model, (*orders.METHODS, "first_block", "second_block", "weigh_and_add"))


def play(
    monkeypatch,
    seed: int,
    shares: list[int],
    left_out: int | None = None,
    fenced: bool = True,
    model_class: type[Model] = Model,
    modules: Any = stepped,
) -> None:
    """One CTA from its first to its last share. left_out: a named barrier that nobody waits at; fenced: whether stores
    become visible to products."""
    machine = orders.Machine(seed, MlaConfig(), shares)
    machine.ask(0)
    model = model_class(machine)
    for name, value in (("Float32", float), ("const_expr", lambda value: value)):
        monkeypatch.setattr(stepped, name, value)
    monkeypatch.setattr(stepped.ptx, "pinned", lambda value: value)
    monkeypatch.setattr(stepped.softmax_steps, "begin", model.rescale)
    monkeypatch.setattr(stepped.softmax, "rescale", model.rescale)
    for name in ("weigh_step", "add_totals"):
        monkeypatch.setattr(stepped.softmax_steps, name, lambda *_: None)
    orders.play(monkeypatch, modules, model, left_out, fenced)
    wanted = [(block, step) for block in range(sum(shares)) for step in range(stepped.STEPS)]
    assert all(steps == wanted for steps in model.acc.values())
    assert not any(machine.named.get(barrier_id) for barrier_id in stepped.WEIGHTS_READY)


@pytest.mark.parametrize("shares", orders.SHARES, ids=str)
def test_nobody_waits_for_ever_and_nothing_is_read_early(monkeypatch, shares):
    for seed in range(15):
        play(monkeypatch, seed, shares)


@pytest.mark.parametrize("left_out", [*stepped.WEIGHTS_READY, stepped.WEIGHTS_FREE])
def test_no_barrier_can_be_left_out(monkeypatch, left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, [5, 3], left_out)


def test_the_fence_cannot_be_left_out(monkeypatch):
    with pytest.raises(AssertionError, match="weights are not there"):
        play(monkeypatch, 0, [1], fenced=False)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(monkeypatch, shares):
    """The model finds it if a warp asks when it has its own last scores, or, without any, its own queries."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, shares, products.QUERIES_READ)
