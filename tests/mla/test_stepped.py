"""The order of steps, warp by warp under random schedules, as :mod:`.test_serial` plays the plain one.

Products may be under way while weights are made and stored; stores are visible to products behind a fence only.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import multiply, stepped
from cute_kernels.mla.config import MULTIPLYING_WARPS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig
from tests.mla.test_serial import PRODUCER, WARP_THREADS, Items, Scheduler


class Machine:
    """A CTA: tiles with what they hold, barriers, and the products that have been issued and not waited for."""

    def __init__(self, seed: int, config: MlaConfig, shares: list[int]):
        self.scheduler, self.config, self.shares = Scheduler(seed), config, shares
        self.local = threading.local()
        self.named: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.full: dict[int, int] = {}
        self.empty: dict[int, int] = {}
        self.holds: dict[Any, Any] = {}
        self.issued: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.groups: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.visible: dict[int, dict] = {warp: {} for warp in range(MULTIPLYING_WARPS)}
        self.asked = 0  # how often queries were asked for, which come at once

    def ask(self, share: int) -> None:
        """New queries in the place of the old ones."""
        assert not self.readers("queries"), "queries replace those that are read"
        self.holds["queries"] = share
        self.asked += 1

    @property
    def warp(self) -> int:
        return self.local.warp

    def step(self, condition=lambda: True) -> None:
        self.scheduler.until(condition, self.warp)

    def arrive(self, barrier_id: int, number_of_threads: int) -> None:
        self.step()
        arrived = self.named.setdefault(barrier_id, [])
        assert self.warp not in arrived, f"warp {self.warp} arrives at {barrier_id} twice"
        arrived.append(self.warp)
        if len(arrived) * WARP_THREADS == number_of_threads:
            self.named[barrier_id] = []
            self.generations[barrier_id] = self.generations.get(barrier_id, 0) + 1

    def sync(self, barrier_id: int, number_of_threads: int) -> None:
        self.step()
        generation = self.generations.get(barrier_id, 0)
        self.arrive(barrier_id, number_of_threads)
        self.step(lambda: self.generations.get(barrier_id, 0) > generation)

    def readers(self, place: Any) -> list[int]:
        return [warp for warp in self.groups if self.reads(warp, place)]

    def reads(self, warp: int, place: Any) -> bool:
        """Whether a product that a warp has not waited for reads or writes ``place``."""
        return any(place in group for group in (*self.issued[warp], *self.groups[warp]))

    def issue(self, places: set) -> None:
        self.issued[self.warp].append(places)

    def commit(self) -> None:
        self.groups[self.warp] += self.issued[self.warp]
        self.issued[self.warp] = []

    def wait(self) -> None:
        self.step()
        self.groups[self.warp].clear()

    def fence(self) -> None:
        """What has been stored, as far as the warp has heard of it, is visible to its products."""
        self.step()
        stored = {place: what for place, what in self.holds.items() if isinstance(place, tuple)}
        self.visible[self.warp] = {place: (block, set(warps)) for place, (block, warps) in stored.items()}

    def produce(self, num_blocks: int) -> None:
        """The gathering warpgroup as one: tiles in order, each when it is given back."""
        self.local.warp = PRODUCER
        for block in range(num_blocks):
            stage, turn = block % NUM_STAGES, block // NUM_STAGES
            arrivals = turn * self.config.empty_arrivals
            self.step(lambda stage=stage, arrivals=arrivals: self.empty.get(stage, 0) >= arrivals)
            assert not self.readers(stage), f"block {block} overwrites what is read"
            self.holds[stage] = block
            self.full[stage] = turn + 1


class Model(stepped.Stepped):
    """The order with products and memory of a :class:`Machine`."""

    def __init__(self, machine: Machine):
        super().__init__(machine.config)
        self.machine, self.sums = machine, {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.published = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.loaded = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.writer: Any = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())
        self.loader: Any = SimpleNamespace(ask=lambda queries, memory, row, head_block: machine.ask(row))

    def await_queries(self, memory, phase) -> None:
        """A barrier knows no more of its last phase than the parity."""
        self.machine.step(lambda: self.machine.asked > 0 and (self.machine.asked - 1) % 2 == phase)

    def await_tile(self, memory, stage, phase) -> None:
        turn = self.block // NUM_STAGES
        assert (stage, phase) == (self.block % NUM_STAGES, turn % 2)
        self.machine.step(lambda: self.machine.full.get(stage, 0) > turn)

    @property
    def block(self) -> int:
        """The one that a warp is at, of all shares: it has added all steps of those before."""
        return len(self.sums[self.machine.warp]) // stepped.STEPS

    def under_way(self, place: Any) -> bool:
        return self.machine.reads(self.machine.warp, place)

    @property
    def share(self) -> int:
        """The one of the block that a warp is at."""
        return next(i for i, end in enumerate(itertools.accumulate(self.machine.shares)) if self.block < end)

    def score(self, scores, memory, stage, phase) -> None:
        self.await_tile(memory, stage, phase)
        assert self.machine.holds[stage] == self.block
        assert self.machine.holds["queries"] == self.share
        self.machine.issue({stage, "scores", "queries"})
        self.machine.commit()

    def common_flags(self, memory, stage) -> int:
        assert self.machine.holds[stage] == self.block
        return 0

    def mask(self, scores, flags, work, memory, stage, block, warp, lane) -> None:
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block

    def rescale(self, *_) -> None:
        assert not self.under_way("sums"), "sums are multiplied while they are added to"

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

    def publish_factors(self, values, memory, warp, lane) -> None:
        self.machine.step()
        assert self.published[warp] == self.loaded[warp], "factors replace those that nobody has read"
        self.published[warp] += 1

    def load_rows(self, memory, warp, lane) -> Any:
        self.machine.step()
        self.loaded[warp] += 1
        assert self.loaded[warp] == self.published[warp], "factors of another block"
        return [1.0, 1.0]

    def add_steps(self, sums, weights, memory, stage, half: int, steps: range) -> None:
        machine, block = self.machine, self.block
        assert machine.holds[stage] == block
        for step in steps:
            if half:
                assert machine.visible[machine.warp].get(("weights", step)) == (block, set(range(WARPGROUP_WARPS))), (
                    "weights are not there"
                )
                machine.issue({stage, "sums", ("weights", step)})
            else:
                assert weights[step] == block
                machine.issue({stage, "sums", ("packed", step)})
            self.sums[machine.warp].append((block, step))

    def weight_fragment(self, packed) -> Any:
        return packed

    def release(self, memory, stage, lane) -> None:
        self.machine.step()
        assert self.machine.warp not in self.machine.readers(stage)
        self.machine.empty[stage] = self.machine.empty.get(stage, 0) + 1


for method in ("first", "first_share", "weigh_and_add", "second", "second_share", "ask_next_queries"):
    setattr(Model, method, inspect.unwrap(getattr(stepped.Stepped, method)))


def no_rows() -> SimpleNamespace:
    numbers = {name: [0.0, 0.0] for name in ("maxima", "totals")}
    return SimpleNamespace(sums=None, scores=None, packed=[None] * stepped.STEPS, **numbers)


def play(monkeypatch, seed: int, shares: list[int], left_out: int | None = None, fenced: bool = True) -> None:
    """One CTA from its first to its last share. left_out: a named barrier that nobody waits at; fenced: whether stores
    become visible to products."""
    machine = Machine(seed, MlaConfig(), shares)
    machine.ask(0)
    model = Model(machine)

    def barrier(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.sync(barrier_id, number_of_threads)

    def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.arrive(barrier_id, number_of_threads)

    def fence_proxy(kind: str, space: str) -> None:
        machine.fence() if fenced else machine.step()

    arch = SimpleNamespace(barrier=barrier, barrier_arrive=barrier_arrive, fence_proxy=fence_proxy)
    cute = SimpleNamespace(arch=arch, make_rmem_tensor=lambda *_: [0.0, 0.0])
    ranges = SimpleNamespace(range=lambda a, b, step, unroll: range(a, b, step), range_constexpr=range)
    for name, value in (
        ("cute", cute),
        ("cutlass", ranges),
        ("Float32", float),
        ("const_expr", lambda value: value),
        ("wgmma_tiles", SimpleNamespace(commit=machine.commit, wait=machine.wait, tile=lambda *_: "weights")),
        ("Rows", SimpleNamespace(make=no_rows)),
        ("advance", lambda stage, phase, stages: ((stage + 1) % stages, phase ^ (stage + 1 == stages))),
    ):
        monkeypatch.setattr(stepped, name, value)
    for name, value in (
        ("cute", cute),
        ("cutlass", ranges),
        ("Int32", int),
        ("lane_sum", lambda value, offsets: value),
    ):
        monkeypatch.setattr(multiply, name, value)
    monkeypatch.setattr(stepped.ptx, "pinned", lambda value: value)
    monkeypatch.setattr(stepped.softmax_steps, "begin", model.rescale)
    monkeypatch.setattr(stepped.softmax, "rescale", model.rescale)
    for name in ("weigh_step", "add_totals"):
        monkeypatch.setattr(stepped.softmax_steps, name, lambda *_: None)
    num_blocks = sum(shares)
    memory = SimpleNamespace(queries=0, weight_pointer=SimpleNamespace(toint=lambda: 0))

    def run_warp(warp: int) -> None:
        machine.local.warp = warp
        run = model.second if warp >= WARPGROUP_WARPS else model.first
        run(Items(shares), None, memory, 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(run_warp, warp) for warp in range(MULTIPLYING_WARPS)]
    machine.scheduler.run([*bodies, functools.partial(machine.produce, num_blocks)])
    wanted = [(block, step) for block in range(num_blocks) for step in range(stepped.STEPS)]
    assert all(steps == wanted for steps in model.sums.values())
    assert not any(machine.named.get(barrier_id) for barrier_id in stepped.WEIGHTS_READY)


@pytest.mark.parametrize("shares", [[0], [1], [9], [3, 2], [1, 1, 1, 1], [0, 0, 0], [0, 2, 0, 0, 3, 0]], ids=str)
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
            play(monkeypatch, seed, shares, multiply.QUERIES_READ)
