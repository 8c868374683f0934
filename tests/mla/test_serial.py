"""The order of products and hand-overs, warp by warp under random schedules: nobody waits for ever, nothing is read
or overwritten early.

The warpgroups' own code runs, a thread for every warp of which one goes on at a time; products, tiles and barriers are
models that know who still reads what.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import serial
from cute_kernels.mla.config import MULTIPLYING_WARPS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig

WARP_THREADS = 32
PRODUCER = MULTIPLYING_WARPS


class Scheduler:
    """Threads of which one runs at a time; at every step the next is drawn among those that can go on."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.waiting: dict[int, Any] = {}
        self.running: int | None = None
        self.error: BaseException | None = None

    def run(self, bodies: list) -> None:
        threads = [threading.Thread(target=self._body, args=(i, body), daemon=True) for i, body in enumerate(bodies)]
        self.waiting = {i: lambda: True for i in range(len(bodies))}
        with self.turn:
            self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if self.error is not None:
            raise self.error

    def until(self, condition, who: int) -> None:
        """Lets others go on until ``condition`` holds."""
        with self.turn:
            self.waiting[who] = condition
            self._next()
            self._resume(who)

    def _body(self, who: int, body) -> None:
        try:
            with self.turn:
                self._resume(who)
            body()
        except BaseException as error:
            self.error = self.error or error
        with self.turn:
            if self.error is None:
                self._next()
            self.turn.notify_all()

    def _resume(self, who: int) -> None:
        self.turn.wait_for(lambda: self.running == who or self.error is not None)
        if self.error is not None:
            raise SystemExit
        del self.waiting[who]

    def _next(self) -> None:
        able = [who for who, condition in self.waiting.items() if condition()]
        self.running = self.random.choice(able) if able else None
        if not able and self.waiting:
            self.error = self.error or AssertionError(f"deadlock: {sorted(self.waiting)} wait for each other")
        self.turn.notify_all()


class Machine:
    """A CTA: tiles with what they hold, barriers, and the products that have been issued and not waited for."""

    def __init__(self, seed: int, config: MlaConfig):
        self.scheduler, self.config = Scheduler(seed), config
        self.local = threading.local()
        self.named: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.full: dict[int, int] = {}
        self.empty: dict[int, int] = {}
        self.holds: dict[Any, Any] = {}
        self.issued: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.groups: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.visible: dict[int, dict] = {warp: {} for warp in range(MULTIPLYING_WARPS)}

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


class Model(serial.Serial):
    """The order with products and memory of a :class:`Machine`."""

    def __init__(self, machine: Machine):
        super().__init__(machine.config)
        self.machine, self.sums = machine, {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.published = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.loaded = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.writer: Any = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())

    def await_queries(self, memory) -> None:
        self.machine.step()

    def await_tile(self, memory, stage, phase) -> None:
        turn = self.block // NUM_STAGES
        assert (stage, phase) == (self.block % NUM_STAGES, turn % 2)
        self.machine.step(lambda: self.machine.full.get(stage, 0) > turn)

    @property
    def block(self) -> int:
        """The one that a warp is at: it has added all steps of those before."""
        return len(self.sums[self.machine.warp]) // serial.STEPS

    def under_way(self, place: Any) -> bool:
        return self.machine.reads(self.machine.warp, place)

    def score(self, scores, memory, stage, phase) -> None:
        self.await_tile(memory, stage, phase)
        assert self.machine.holds[stage] == self.block
        self.machine.issue({stage, "scores"})
        self.machine.commit()

    def common_flags(self, memory, stage) -> int:
        assert self.machine.holds[stage] == self.block
        return 0

    def mask(self, scores, flags, work, memory, stage, block, warp, lane) -> None:
        assert not self.under_way("scores"), "scores are not there"
        assert self.machine.holds[stage] == block == self.block

    def rescale(self, *_) -> None:
        assert not self.under_way("sums"), "sums are multiplied while they are added to"

    def pack_step(self, rows: Any, step: int) -> None:
        assert not self.under_way(("packed", step)), "weights replace those that are read"
        rows.packed[step] = self.block

    def weight_place(self, memory, warp, lane) -> int:
        return warp

    def publish_weights(self, packed, warp, step: int) -> None:
        self.machine.step()
        stored = "weights", step
        assert not self.machine.readers(stored), "weights replace those that are read"
        if self.machine.holds.get(stored, (None,))[0] != packed[step]:
            self.machine.holds[stored] = packed[step], set()
        self.machine.holds[stored][1].add(warp)

    def publish_rows(self, values, memory, warp, lane) -> None:
        self.machine.step()
        assert self.published[warp] == self.loaded[warp], "factors replace those that nobody has read"
        self.published[warp] += 1

    def load_rows(self, memory, warp, lane) -> Any:
        self.machine.step()
        self.loaded[warp] += 1
        assert self.loaded[warp] == self.published[warp], "factors of another block"
        return [1.0, 1.0]

    def add_values(self, sums, weights, memory, stage, half: int, steps: range) -> None:
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


for method in ("first", "weigh_and_add", "second"):
    setattr(Model, method, inspect.unwrap(getattr(serial.Serial, method)))


def no_rows() -> SimpleNamespace:
    numbers = {name: [0.0, 0.0] for name in ("maxima", "totals", "factors")}
    return SimpleNamespace(sums=None, scores=None, packed=[None] * serial.STEPS, **numbers)


def play(monkeypatch, seed: int, num_blocks: int, left_out: int | None = None, fenced: bool = True) -> None:
    """One CTA from its first to its last block. left_out: a named barrier that nobody waits at; fenced: whether stores
    become visible to products."""
    machine = Machine(seed, MlaConfig())
    model = Model(machine)

    def barrier(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.sync(barrier_id, number_of_threads)

    def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.arrive(barrier_id, number_of_threads)

    def fence_proxy(kind: str, space: str) -> None:
        machine.fence() if fenced else machine.step()

    arch = SimpleNamespace(barrier=barrier, barrier_arrive=barrier_arrive, fence_proxy=fence_proxy)
    ranges = SimpleNamespace(range=lambda a, b, step, unroll: range(a, b, step), range_constexpr=range)
    for name, value in (
        ("cute", SimpleNamespace(arch=arch)),
        ("cutlass", ranges),
        ("Int32", int),
        ("const_expr", lambda value: value),
        ("wgmma_tiles", SimpleNamespace(commit=machine.commit, wait=machine.wait, tile=lambda *_: "weights")),
        ("lane_sum", lambda value, offsets: value),
        ("Rows", SimpleNamespace(make=no_rows)),
        ("advance", lambda stage, phase, stages: ((stage + 1) % stages, phase ^ (stage + 1 == stages))),
    ):
        monkeypatch.setattr(serial, name, value)
    monkeypatch.setattr(serial.ptx, "pinned", lambda value: value)
    for name in ("begin", "rescale"):
        monkeypatch.setattr(serial.softmax, name, model.rescale)
    for name in ("weigh_step", "add_totals"):
        monkeypatch.setattr(serial.softmax, name, lambda *_: None)
    work = SimpleNamespace(begin=0, end=num_blocks, shape=SimpleNamespace(slack=8.0))
    memory = SimpleNamespace(queries=0, weight_pointer=SimpleNamespace(toint=lambda: 0))

    def multiply(warp: int) -> None:
        machine.local.warp = warp
        run = model.second if warp >= WARPGROUP_WARPS else model.first
        run(work, None, memory, 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(multiply, warp) for warp in range(MULTIPLYING_WARPS)]
    machine.scheduler.run([*bodies, functools.partial(machine.produce, num_blocks)])
    wanted = [(block, step) for block in range(num_blocks) for step in range(serial.STEPS)]
    assert all(steps == wanted for steps in model.sums.values())
    assert not any(machine.named.get(barrier_id) for barrier_id in serial.WEIGHTS_READY)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 8, 9])
def test_nobody_waits_for_ever_and_nothing_is_read_early(monkeypatch, num_blocks):
    for seed in range(15):
        play(monkeypatch, seed, num_blocks)


@pytest.mark.parametrize("left_out", [*serial.WEIGHTS_READY, serial.WEIGHTS_FREE])
def test_no_barrier_can_be_left_out(monkeypatch, left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, 8, left_out)


def test_the_fence_cannot_be_left_out(monkeypatch):
    with pytest.raises(AssertionError, match="weights are not there"):
        play(monkeypatch, 0, 1, fenced=False)
