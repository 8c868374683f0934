"""A CTA whose warps are threads of which one goes on at a time, for the orders of a block: products, tiles and barriers
are models that know who still reads what."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cute_kernels.mla.config import CONSUMER_WARPS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import products

WARP_THREADS = 32
PRODUCER = CONSUMER_WARPS
METHODS = ("first", "second", "score_tile", "value_tile", "ask_next_queries", "end_first", "end_second")
"""Of an order, what the models run as it is."""
SHARES = [[0], [1], [9], [3, 2], [1, 1, 1, 1], [0, 0, 0], [0, 2, 0, 0, 3, 0], [2, 1, 3], [1, 0, 1]]
"""Blocks of the shares of a CTA."""


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


@dataclass(frozen=True)
class WorkTiles:
    """Shares with so many blocks; every row is one, the first one the end of a row, the last one the beginning."""

    shares: list[int]
    machine: Any
    row: int = 0
    start: int = 0
    head_block: int = 0
    queries: Any = None

    @property
    def left(self) -> int:
        return len(self.shares)

    @property
    def exchange(self) -> SimpleNamespace:
        return SimpleNamespace(publish=lambda *_: self.machine.step(), resume=lambda *_: self.machine.step())

    def work(self, row: int, start: int, left: int) -> SimpleNamespace:
        assert left == len(self.shares) - row
        before, shape = sum(self.shares[:row]), SimpleNamespace(slack=8.0)
        ends = {"publishes": self.cut and row == 0, "resumes": self.cut and left == 1}
        share = {"row": row, "begin": 0, "end": self.shares[row], "before": before, "left": left - 1}
        return SimpleNamespace(shape=shape, **share, **ends)

    @property
    def cut(self) -> bool:
        """Whether the first and the last row are cut: those of odd numbers of shares are."""
        return len(self.shares) % 2 == 1


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
        self.issued: dict[int, list[set]] = {warp: [] for warp in range(CONSUMER_WARPS)}
        self.groups: dict[int, list[set]] = {warp: [] for warp in range(CONSUMER_WARPS)}
        self.visible: dict[int, dict] = {warp: {} for warp in range(CONSUMER_WARPS)}
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
        self.groups[self.warp].append(set().union(*self.issued[self.warp]))
        self.issued[self.warp] = []

    def wait(self, pending: int = 0) -> None:
        self.step()
        groups = self.groups[self.warp]
        del groups[: len(groups) - pending]

    def fence(self) -> None:
        """What has been stored, as far as the warp has heard of it, is visible to its products."""
        self.step()
        stored = {place: what for place, what in self.holds.items() if isinstance(place, tuple)}
        self.visible[self.warp] = {place: (block, set(warps)) for place, (block, warps) in stored.items()}

    def produce(self, num_blocks: int) -> None:
        """The producer warps as one: tiles in order, each part of one when it is given back."""
        self.local.warp = PRODUCER
        for block in range(num_blocks):
            stage, turn = block % NUM_STAGES, block // NUM_STAGES
            arrivals, parts = turn * self.config.empty_arrivals, self.config.tile_parts
            for place in range(stage * parts, (stage + 1) * parts):
                self.step(lambda place=place, arrivals=arrivals: self.empty.get(place, 0) >= arrivals)
                assert not self.readers(place), f"block {block} overwrites what is read"
                self.holds[place] = block
                self.full[place] = turn + 1


class Played:
    """What all orders do with a :class:`Machine` instead of products and memory; goes before the order's class."""

    additions = 1  # to a warp's accumulators, of a block

    def __init__(self, machine: Machine):
        super().__init__(machine.config)  # pyright: ignore[reportCallIssue]
        self.machine, self.acc = machine, {warp: [] for warp in range(CONSUMER_WARPS)}
        self.published = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.loaded = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.writer: Any = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())
        self.loader: Any = SimpleNamespace(ask=lambda queries, memory, row, head_block: machine.ask(row))

    @property
    def block(self) -> int:
        """The one that a warp is at, of all shares: it has added all of those before."""
        return len(self.acc[self.machine.warp]) // self.additions

    @property
    def share(self) -> int:
        """The one of the block that a warp is at."""
        return next(i for i, end in enumerate(itertools.accumulate(self.machine.shares)) if self.block < end)

    def under_way(self, place: Any) -> bool:
        return self.machine.reads(self.machine.warp, place)

    def await_queries(self, memory, phase) -> None:
        """A barrier knows no more of its last phase than the parity."""
        self.machine.step(lambda: self.machine.asked > 0 and (self.machine.asked - 1) % 2 == phase)

    def await_tile(self, memory, stage, phase) -> None:
        turn = self.block // NUM_STAGES
        assert (stage, phase) == (self.block % NUM_STAGES, turn % 2)
        self.machine.step(lambda: self.machine.full.get(stage, 0) > turn)

    def score(self, scores, memory, stage, phase) -> None:
        self.await_tile(memory, stage, phase)
        assert self.machine.holds[stage] == self.block
        assert self.machine.holds["queries"] == self.share
        self.machine.issue({stage, "scores", "queries"})
        self.machine.commit()

    def publish_rows(self, values, memory, warp, lane) -> None:
        self.machine.step()
        assert self.published[warp] == self.loaded[warp], "factors replace those that nobody has read"
        self.published[warp] += 1

    publish_factors = publish_rows

    def load_rows(self, memory, warp, lane) -> Any:
        self.machine.step()
        self.loaded[warp] += 1
        assert self.loaded[warp] == self.published[warp], "factors of another block"
        return [1.0, 1.0]

    def weight_fragment(self, packed) -> Any:
        return packed

    def release(self, memory, stage, lane) -> None:
        self.machine.step()
        assert self.machine.warp not in self.machine.readers(stage)
        # The other CTA of a pair gives it back at the same time.
        self.machine.empty[stage] = self.machine.empty.get(stage, 0) + self.machine.config.cluster


def run_body(model: Any, methods: tuple[str, ...]) -> None:
    """Lets a model's class have the order's own code for these methods, as plain Python."""
    for method in methods:
        setattr(model, method, inspect.unwrap(getattr(model, method)))


def play(monkeypatch, order: Any, model: Any, left_out: int | None = None, fenced: bool = True) -> None:
    """One CTA from its first to its last share.

    order: the module, or modules, whose class ``model`` is. left_out: a named barrier that nobody waits at; fenced:
    whether fences make stores visible to products.
    """
    machine = model.machine

    def barrier(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.sync(barrier_id, number_of_threads)

    def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.arrive(barrier_id, number_of_threads)

    def fence_proxy(kind: str, space: str) -> None:
        machine.fence() if fenced else machine.step()

    arch = SimpleNamespace(barrier=barrier, barrier_arrive=barrier_arrive, fence_proxy=fence_proxy)
    cute = SimpleNamespace(arch=arch, make_rmem_tensor=lambda *_: [0.0, 0.0])
    ranges = SimpleNamespace(range=lambda a, b, step, unroll: range(a, b, step), range_constexpr=range)
    tiles = SimpleNamespace(begin=lambda: None, commit=machine.commit, wait=machine.wait, tile=lambda *_: "weights")
    tiles.make_sums = lambda columns: [0.0] * (columns // 2)
    common = {"cute": cute}
    own = {
        "cutlass": ranges,
        "wgmma_tiles": tiles,
        "Rows": SimpleNamespace(make=model.no_rows),
        "advance": lambda stage, phase, stages: ((stage + 1) % stages, phase ^ (stage + 1 == stages)),
    }
    shared = {"Int32": int, "lane_sum": lambda value, offsets: value}
    modules = order if isinstance(order, tuple) else (order,)
    for module, values in (*((module, common | own) for module in modules), (products, common | shared)):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    memory = SimpleNamespace(queries=0, weight_pointer=SimpleNamespace(toint=lambda: 0))

    def run_warp(warp: int) -> None:
        machine.local.warp = warp
        run = model.second if warp >= WARPGROUP_WARPS else model.first
        run(WorkTiles(machine.shares, machine), None, memory, 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(run_warp, warp) for warp in range(CONSUMER_WARPS)]
    machine.scheduler.run([*bodies, functools.partial(machine.produce, sum(machine.shares))])
