"""Whatever chooses a schedule, its k blocks are all of the padded K, and each is computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.formats.weights.integers import IntegerFormat
from cute_kernels.gemm import served
from cute_kernels.gemm.choice import candidates, chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma.launch import TileSchedule
from tests.linear.segments import segments_of

GPU = "NVIDIA H200"
GROUPS = (None, 32, 64, 128, 256)
READY = (1, 8, 16, 32, 64)
KS = (8, 136, 504, 520, 576)  # padded to multiples of 64, of 128 and of 256
ROWS = (1, 5, 8, 9, 17, 33, 64)
FORMS = [integers(bits, group, zeros) for bits, group, zeros in product((4, 8), GROUPS, (False, True))]


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    served.forget_ready()
    yield
    served.forget_ready()


def schedules_of(problem: LinearProblem) -> Iterator[StreamSchedule | TileSchedule]:
    """All that may serve a product: of models, of servers and batch-invariant ones."""
    yield from candidates(problem)
    yield from invariant.schedules(replace(problem, batch_invariant=True))
    for one in (problem, replace(problem, batch_invariant=True)):
        yield chosen(one)
        served.note_ready(replace(one, m=1), READY)
        yield served.schedule_for(one)


def inputs_of(schedule: StreamSchedule | TileSchedule) -> int:
    """Inputs of all parts of K, whichever CTA has them; 0 if a part is empty."""
    if not isinstance(schedule, StreamSchedule):
        parts = 1 if schedule.config.reduction.cuts_rows else schedule.splits
        size = -(-schedule.k_blocks // parts)
        begins = [part * size for part in range(parts)]
        if begins[-1] >= schedule.k_blocks:
            return 0
        return sum(min(size, schedule.k_blocks - begin) for begin in begins) * schedule.config.block_k
    done: Counter[tuple[int, int]] = Counter()
    for group, part in product(range(schedule.num_groups), range(schedule.num_slices)):
        for block, begin, end, _ in segments_of(schedule, group, part):
            done.update((block, part * schedule.slice_k_blocks + k_block) for k_block in range(begin, end))
    each_once = set(done.values()) == {1} and len(done) == schedule.num_blocks * schedule.k_blocks
    return schedule.k_blocks * schedule.config.block_k if each_once else 0


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
def test_every_schedule_has_all_of_k(form: IntegerFormat):
    for number, k in enumerate(KS):
        k_pad = padded_shape((200, k), form.group_size)[1]
        m = ROWS[(number + FORMS.index(form)) % len(ROWS)]
        for rows in (1, m):
            problem = LinearProblem(rows, 200, k, k_pad, form, "bf16")
            for schedule in schedules_of(problem):
                assert inputs_of(schedule) == k_pad, (problem, schedule)
                tiles = schedule.m_tiles if isinstance(schedule, TileSchedule) else 1
                assert rows <= tiles * schedule.config.tile_m


def test_limbs_are_made_of_whole_groups_of_their_own():
    """Where one row is served by limbs, by format and padded K."""
    taken = {
        (form.key, k_pad): any(
            isinstance(one, TileSchedule) and one.config.limbs
            for one in candidates(LinearProblem(1, 200, k_pad, k_pad, form, "bf16"))
        )
        for form in FORMS
        for k_pad in (512, 576)
        if k_pad % max(64, form.group_size) == 0
    }
    limbs = {key for key, is_so in taken.items() if is_so}
    assert limbs == {
        (form.key, 512)
        for form in FORMS
        if form.bits == 4 and form.group_size and not (form.sums_inputs and form.group_size < 128)
    }
