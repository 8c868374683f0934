"""A pipeline's own code, played through: whoever is quick or slow, a stage is read when all that fill it have."""

from __future__ import annotations

import threading
from functools import partial

import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.pipeline import Barrier, Pipeline, PipelineState
from simulator import PlainThread, Scheduler, stand_in
from simulator.mbarriers import Mbarriers


class Pointer(int):
    """The address of a barrier."""

    def __add__(self, other: int) -> Pointer:
        return Pointer(int(self) + int(other))

    def toint(self) -> int:
        return int(self)


class Cta:
    """Roles that run a pipeline's code under a scheduler."""

    def __init__(self, seed: int, run_on):
        self.scheduler, self.own = Scheduler(seed), threading.local()
        self.barriers = Mbarriers(lambda condition: self.scheduler.until(condition, self.own.who))
        run_on(PlainThread(arch=self.barriers.arch()))

    def run(self, roles) -> None:
        def body(who: int, role) -> None:
            self.own.who = who
            role()

        self.scheduler.run([partial(body, who, role) for who, role in enumerate(roles)])


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_warps_breaks_the_pipeline(stages: int, seed: int, run_on):
    """Two producers, one of them by bytes of copies, and warps of which each releases what it has read."""
    uses, warps = 5 * stages + 3, 4
    cta = Cta(seed, run_on)
    pipeline = Pipeline(stand_in(Pointer(0)), stand_in(Pointer(stages)), stages, fills=2, releases=warps)
    pipeline.init()
    filled: list[tuple[str, int]] = []

    def produce(name: str, num_bytes: int) -> None:
        state = pipeline.producer_state()
        for use in range(uses):
            pipeline.producer_acquire(state)
            filled.append((name, use))
            if num_bytes:
                cta.barriers.all[pipeline.producer_expect(state, num_bytes)].change(0, -num_bytes)
            else:
                pipeline.producer_commit(state)
            state = pipeline.next(state)

    def consume() -> None:
        state = pipeline.consumer_state()
        for use in range(uses):
            assert state == pipeline.consumer_state_of(use)
            pipeline.consumer_wait(state)
            assert {("weights", use), ("activations", use)} <= set(filled), "read before it was there"
            assert ("weights", use + stages) not in filled, "overwritten before it was read"
            pipeline.consumer_release(state)
            state = pipeline.next(state)

    cta.run([partial(produce, "weights", 256), partial(produce, "activations", 0), *[consume] * warps])
    assert len(filled) == 2 * uses


@pytest.mark.parametrize("step, stages", [(2, 4), (3, 6), (3, 12), (4, 8)])
def test_roles_that_interleave_uses_have_every_one_once(step: int, stages: int, run_on):
    run_on(PlainThread())
    pipeline = Pipeline(stand_in(0), stand_in(stages), stages)
    for first in range(step):
        state = pipeline.consumer_state(first)
        for use in range(first, 5 * stages, step):
            assert state == PipelineState(use % stages, use // stages % 2)
            state = pipeline.next(state, step)


def test_a_barrier_of_its_own_waits_for_arrivals_and_bytes(run_on):
    cta = Cta(0, run_on)
    barrier = Barrier(stand_in(Pointer(7)), arrivals=2)
    barrier.init()
    events: list[str] = []

    def arrive() -> None:
        barrier.arrive()
        address = barrier.expect(64)
        events.append("arrived")
        cta.barriers.all[address].change(0, -64)

    def wait() -> None:
        barrier.wait()
        events.append("waited")

    cta.run([wait, arrive])
    assert events == ["arrived", "waited"]
