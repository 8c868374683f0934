"""A CTA whose warps are threads of which one goes on at a time, for the orders of a block: products, tiles and barriers
are models that know who still reads what; the mainloops' own code runs on them."""

from __future__ import annotations

import functools
import itertools
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from cute_kernels.device import wgmma, wgmma_tiles
from cute_kernels.mla.combine.consumers import PersistentConsumers
from cute_kernels.mla.config import CONSUMER_WARPS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import delayed_pv, products, serial, softmax, softmax_steps, stepped
from cute_kernels.mla.mainloops.weights import STEPS
from simulator import Meanings, PlainThread, Scheduler, running

WARP_THREADS = 32
PRODUCER = CONSUMER_WARPS
SHARES = [[0], [1], [9], [3, 2], [1, 1, 1, 1], [0, 0, 0], [0, 2, 0, 0, 3, 0], [2, 1, 3], [1, 0, 1]]
"""Blocks of the work tiles of a CTA."""
SEATS = {
    "pipeline": ("await_queries", "await_tile", "release"),
    "products": ("score", "add_values", "weight_fragment", "weight_tile"),
    "weights": ("weigh", "publish", "mask", "common_flags", "pack_step", "place", "publish_step"),
}
"""Whose methods a model has: parts of a mainloop."""


def _nothing(*_: Any) -> None:
    """Numbers that orders do not depend on."""


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
    """A CTA, as a backend of the simulator: tiles with what they hold, barriers, and the products that have been issued
    and not waited for."""

    def __init__(
        self, seed: int, config: MlaConfig, shares: list[int], left_out: int | None = None, fenced: bool = True
    ):
        """left_out: a named barrier that nobody waits at; fenced: whether fences make stores visible to products."""
        self.scheduler, self.config, self.shares = Scheduler(seed), config, shares
        self.left_out, self.fenced = left_out, fenced
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

    def meanings(self) -> Meanings:
        """What runs in place of barriers and products; `step` lets other warps go on."""
        arch = {
            "barrier": lambda barrier_id, number_of_threads: self._meet(self.sync, barrier_id, number_of_threads),
            "barrier_arrive": lambda barrier_id, number_of_threads: self._meet(
                self.arrive, barrier_id, number_of_threads
            ),
            "fence_proxy": lambda kind, space: self.fence() if self.fenced else self.step(),
            "shuffle_sync_bfly": lambda value, offset: value,
        }
        tiles = {
            "begin": lambda: None,
            "commit": self.commit,
            "wait": self.wait,
            "make_sums": lambda columns: [0.0] * (columns // 2),
        }
        modules = {
            wgmma_tiles: tiles,
            wgmma: {"wait_all": self.wait_all},
            products.Rows: {"make": staticmethod(self.rows)},
            **{module: {"rescale": self.rescale} for module in (delayed_pv, serial, stepped)},
            softmax_steps: {"begin": self.rescale, "weigh_step": _nothing, "add_totals": _nothing},
        }
        plain = PlainThread(modules).meanings()
        return replace(plain, arch={**plain.arch, **arch}, cute={"make_rmem_tensor": lambda *_: [0.0, 0.0]})

    def _meet(self, barrier: Any, barrier_id: int, number_of_threads: int) -> None:
        self.step() if barrier_id == self.left_out else barrier(barrier_id, number_of_threads)

    def rows(self) -> SimpleNamespace:
        """Registers of a warp."""
        numbers = {name: [0.0, 0.0] for name in ("maxima", "totals")}
        return SimpleNamespace(acc=None, scores=[0.0] * softmax.NUM_SCORES, packed=[None] * STEPS, **numbers)

    def rescale(self, *_: Any) -> None:
        assert not self.reads(self.warp, "accumulators"), "accumulators are multiplied while they are added to"

    def wait_all(self, values: list) -> list:
        self.wait()
        return values

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


class RowValues:
    """Factors that one warpgroup publishes for the other."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.published = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.loaded = dict.fromkeys(range(WARPGROUP_WARPS), 0)

    def publish(self, values, memory, warp, lane) -> None:
        self.machine.step()
        assert self.published[warp] == self.loaded[warp], "factors replace those that nobody has read"
        self.published[warp] += 1

    store = publish

    def load(self, memory, warp, lane) -> Any:
        self.machine.step()
        self.loaded[warp] += 1
        assert self.loaded[warp] == self.published[warp], "factors of another block"
        return [1.0, 1.0]


class Played:
    """What all mainloops do with a :class:`Machine` instead of products and memory."""

    additions = 1  # to a warp's accumulators, of a block

    def __init__(self, machine: Machine):
        self.machine, self.acc = machine, {warp: [] for warp in range(CONSUMER_WARPS)}

    def seat(self, mainloop: Any) -> Any:
        """Puts the model's methods in place of the mainloop's parts; returns the mainloop, whose own code stays."""
        for part, names in SEATS.items():
            for name in names:
                if hasattr(self, name):
                    setattr(getattr(mainloop, part), name, getattr(self, name))
        machine = self.machine
        mainloop.weights.row_values = RowValues(machine)
        mainloop.epilogue.writer = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())
        mainloop.next_queries.loader = SimpleNamespace(ask=lambda queries, memory, row, head_block: machine.ask(row))
        return mainloop

    @property
    def block(self) -> int:
        """The one that a warp is at, of all work tiles: it has added all of those before."""
        return len(self.acc[self.machine.warp]) // self.additions

    @property
    def share(self) -> int:
        """The work tile of the block that a warp is at."""
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

    def weight_fragment(self, packed) -> Any:
        return packed

    def weight_tile(self, memory) -> Any:
        return "weights"

    def release(self, memory, stage, lane) -> None:
        self.machine.step()
        assert self.machine.warp not in self.machine.readers(stage)
        # The other CTA of a pair gives it back at the same time.
        self.machine.empty[stage] = self.machine.empty.get(stage, 0) + self.machine.config.cluster


def play(machine: Machine, consumers: Any) -> None:
    """One CTA from its first to its last work tile. consumers: `PersistentConsumers`, or who has their methods."""
    memory = SimpleNamespace(queries=0, weight_pointer=SimpleNamespace(toint=lambda: 0))

    def run_warp(warp: int) -> None:
        machine.local.warp = warp
        run = consumers.values if warp >= WARPGROUP_WARPS else consumers.scores
        run(WorkTiles(machine.shares, machine), None, memory, 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(run_warp, warp) for warp in range(CONSUMER_WARPS)]
    machine.ask(0)
    with running(machine):
        machine.scheduler.run([*bodies, functools.partial(machine.produce, sum(machine.shares))])


def play_persistent(machine: Machine, mainloop: Any) -> None:
    """As :func:`play`, by a mainloop whose model is seated."""
    play(machine, PersistentConsumers(mainloop))
