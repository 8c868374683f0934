"""Of a server's products every number of rows has a kernel that was made ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import served
from cute_kernels.gemm.choice import candidates, chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.wgmma.invariant import parts_of_k

GPU = "NVIDIA H200"
READY = (1, 2, 4, 8, 16, 24, 32, 64, 128, 144, 208, 256, 384, 512, 1024, 2048)
BETWEEN = (3, 5, 7, 9, 17, 25, 33, 63, 65, 100, 127, 129, 150, 209, 300, 513, 700, 1025, 1999)


def problem(n: int = 6144, k: int = 4096, bits: int = 4, zeros: bool = False, invariant: bool = False) -> LinearProblem:
    return LinearProblem(1, n, k, k, integers(bits, 128, zeros), "bf16", batch_invariant=invariant)


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    served.forget_ready()
    yield
    served.forget_ready()


@pytest.mark.parametrize(
    "one",
    [problem(), problem(4096, 14336), problem(1280, 512), problem(bits=8)],
    ids=lambda one: f"{one.n}x{one.k} {one.format.key}",
)
@pytest.mark.parametrize("invariant", [False, True])
def test_numbers_of_rows_in_between_have_kernels_that_are_ready(one: LinearProblem, invariant: bool):
    one = replace(one, batch_invariant=invariant)
    served.note_ready(one, READY)
    ready = {GemmSpec(chosen(replace(one, m=m)).config) for m in READY}
    for m in BETWEEN:
        asked = replace(one, m=m)
        schedule = served.schedule_for(asked)
        assert {GemmSpec(schedule.config)} <= ready, m
        if not isinstance(schedule, StreamSchedule):
            assert schedule.m_tiles == -(-m // schedule.config.tile_m)
            assert not invariant or schedule.splits == parts_of_k(one)


def test_a_choice_in_between_is_one_of_the_problems_own():
    """With the same configuration, or one that has no more rows in a tile than the next noted number wants."""
    one = problem()
    served.note_ready(one, READY)
    for m in BETWEEN:
        asked = replace(one, m=m)
        schedule = served.schedule_for(asked)
        own = set(candidates(asked))
        same = [each for each in own if each.config == schedule.config]
        assert schedule in own or not same, m


def test_numbers_that_were_noted_and_products_that_were_not_have_their_own():
    one, other = problem(), problem(4096, 4096)
    before = {m: chosen(replace(one, m=m)) for m in (*READY, 4096)}
    served.note_ready(one, READY)
    for m, schedule in before.items():
        assert served.schedule_for(replace(one, m=m)) == schedule  # and of more rows than were noted
    for m in (3, 100, 700):
        assert served.schedule_for(replace(other, m=m)) == chosen(replace(other, m=m))


def test_what_two_engines_note_is_put_together():
    one = problem()
    served.note_ready(one, (1, 8))
    served.note_ready(one, (4, 64))
    ready = {chosen(replace(one, m=m)).config for m in (1, 4, 8, 64)}
    for m in range(1, 65):
        assert served.schedule_for(replace(one, m=m)).config in ready
