"""How weights are cut among CTAs: everything once, evenly, and so that nobody waits in a circle."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.architecture import HOPPER
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream import schedule as schedules
from cute_kernels.gemm.stream.config import FEW_SEGMENTS, NUM_BUFFERS, StreamConfig
from cute_kernels.gemm.stream.schedule import FEW_ROWS, StreamSchedule, candidate_configs, make_schedule
from simulator import PlainThread, running
from tests.linear.segments import segments_of

FORMATS = st.tuples(
    st.sampled_from([4, 8]), st.sampled_from(["bf16", "fp16"]), st.sampled_from([0, 32, 64, 128, 256]), st.booleans()
)


@st.composite
def problems(draw) -> LinearProblem:
    bits, dtype, group_size, zero_point = draw(FORMATS)
    k = draw(st.integers(1, 40_000))
    multiple = max(64, group_size)
    return LinearProblem(
        m=draw(st.integers(1, FEW_ROWS)),
        n=draw(st.integers(1, 60_000)),
        k=k,
        k_pad=-(-k // multiple) * multiple,
        num_sms=draw(st.sampled_from([16, 78, 114, 132])),
        format=integers(bits, group_size, zero_point),
        dtype=dtype,
    )


@st.composite
def cuts(draw) -> StreamSchedule:
    k_blocks = draw(st.integers(1, 60))
    num_slices = draw(st.integers(1, k_blocks))
    slice_k_blocks = -(-k_blocks // num_slices)
    num_slices = -(-k_blocks // slice_k_blocks)
    config = StreamConfig(integers(4), "bf16", n_tiles=draw(st.sampled_from([1, 2])))
    schedule = StreamSchedule(config, draw(st.integers(1, 30)), k_blocks, num_slices, 1)
    return replace(schedule, num_groups=draw(st.integers(1, schedule.total)))


LONG_K_ON_FEW_SMS = LinearProblem(m=8, n=65, k=20481, k_pad=20736, num_sms=16, format=integers(4, 256), dtype="bf16")


TOO_LONG_K_ON_FEW_SMS = LinearProblem(m=8, n=1, k=32769, k_pad=32832, num_sms=16, format=integers(4, 0), dtype="bf16")


def fits_cut_for_all_sms(problem: LinearProblem, config: StreamConfig) -> bool:
    """Whether an SM has room for its part of the activations if each has one."""
    k_blocks = problem.k_pad // config.block_k
    own = -(-k_blocks // min(k_blocks, problem.num_sms))
    return schedules.x_bytes_of(problem, own * config.block_k) <= config.x_bytes


@given(problems())
@example(LONG_K_ON_FEW_SMS)
@example(TOO_LONG_K_ON_FEW_SMS)
@settings(max_examples=100, deadline=None)
def test_every_problem_has_a_schedule_that_fits(problem: LinearProblem):
    """Unless its activations fit nowhere, which is said."""
    if not any(fits_cut_for_all_sms(problem, config) for config in candidate_configs(problem)):
        with pytest.raises(ValueError, match=f"k: got {problem.k}, want {problem.m} rows of activations to fit"):
            make_schedule(problem)
        return
    schedule = make_schedule(problem)
    config = schedule.config
    assert config.can_implement() is None
    assert config.smem_bytes <= HOPPER.shared_bytes
    assert schedule.num_slices * schedule.num_groups <= problem.num_sms
    assert schedule.k_blocks * config.block_k == problem.k_pad
    assert schedules.x_bytes_of(problem, schedule.slice_k_blocks * config.block_k) <= config.x_bytes
    assert problem.m <= config.tile_m


@given(cuts())
@settings(max_examples=200, deadline=None)
def test_every_k_block_of_every_block_is_taken_once(schedule: StreamSchedule):
    taken = Counter()
    for group in range(schedule.num_groups):
        for slice_index in range(schedule.num_slices):
            for block, begin, end, _ in segments_of(schedule, group, slice_index):
                first = slice_index * schedule.slice_k_blocks
                taken.update((block, first + k_block) for k_block in range(begin, end))
    wanted = {(block, k_block) for block in range(schedule.num_blocks) for k_block in range(schedule.k_blocks)}
    assert set(taken) == wanted and set(taken.values()) == {1}


@given(cuts())
@settings(max_examples=200, deadline=None)
def test_groups_take_equally_many_k_blocks(schedule: StreamSchedule):
    sizes = [end - first for first, end in map(schedule.group_range, range(schedule.num_groups))]
    assert sum(sizes) == schedule.total and max(sizes) - min(sizes) <= 1


@given(cuts())
@settings(max_examples=200, deadline=None)
def test_a_block_has_one_last_group_and_its_parts_have_places(schedule: StreamSchedule):
    groups, last = defaultdict(set), defaultdict(set)
    for group in range(schedule.num_groups):
        for block, _, _, is_last in segments_of(schedule, group, 0):
            groups[block].add(group)
            if is_last:
                last[block].add(group)
    for block in range(schedule.num_blocks):
        assert last[block] == {max(groups[block])}
        assert len(groups[block]) * schedule.num_slices <= schedule.max_parts


def epilogue_steps(
    segments: list[tuple[int, int, int, bool]], num_slices: int, has_outputs: bool
) -> list[tuple[str, int]]:
    """What a warp of `cute_kernels.gemm.stream.epilogue.StreamEpilogue.run` waits for and tells others, in its order.

    A warp has no outputs to finish if there are fewer than threads.
    """
    count = len(segments)
    lag = int(num_slices > 1 and count > FEW_SEGMENTS)

    def is_held(index: int) -> bool:
        return lag == 0 or index == count - 1

    steps: list[tuple[str, int]] = []
    for index in range(count + lag):
        if index < count:
            held = segments[index][3] and is_held(index)
            if num_slices > 1 or not held:
                steps += [("staged", index), ("store", segments[index][0])]
            if not held:
                steps.append(("release", index))
        done = index - lag
        if done >= 0 and segments[done][3]:
            steps += [("parts", segments[done][0])] if has_outputs else []
            steps += [("staged", done), ("release", done)] if is_held(done) else []
    return steps


@given(cuts())
@settings(max_examples=150, deadline=None)
def test_no_two_ctas_wait_for_each_other(schedule: StreamSchedule):
    """Consumer warps want a buffer, epilogue warps want accumulators and others' parts: all of them come to their
    ends."""
    ctas = [(group, index) for group in range(schedule.num_groups) for index in range(schedule.num_slices)]
    segments = {cta: list(segments_of(schedule, *cta)) for cta in ctas}
    warps = [(cta, number) for cta in ctas for number in range(2)]
    steps = {
        (cta, number): epilogue_steps(segments[cta], schedule.num_slices, has_outputs=number == 0)
        for cta, number in warps
    }
    parts = {
        block: {cta for cta in ctas if any(s[0] == block for s in segments[cta])}
        for block in range(schedule.num_blocks)
    }
    staged, released, place = dict.fromkeys(ctas, 0), Counter(), dict.fromkeys(warps, 0)
    stored: set[tuple] = set()

    def multiply(cta: tuple[int, int]) -> bool:
        index = staged[cta]
        if index == len(segments[cta]) or (index >= NUM_BUFFERS and released[cta, index - NUM_BUFFERS] < 2):
            return False
        staged[cta] += 1
        return True

    def store(warp) -> bool:
        cta = warp[0]
        if place[warp] == len(steps[warp]):
            return False
        kind, what = steps[warp][place[warp]]
        if kind == "staged" and staged[cta] <= what:
            return False
        # A CTA's own part may be missing: it has kept it.
        if kind == "parts" and any((what, other) not in stored for other in parts[what] - {cta}):
            return False
        if kind == "release":
            assert staged[cta] > what, "given back before it was filled"
            released[cta, what] += 1
        if kind == "store":
            stored.add((what, cta))
        place[warp] += 1
        return True

    moved = True
    while moved:  # each as far as it gets; what one does never stands in another's way, so their order is no matter
        moved = False
        for goes_on, each in [*((multiply, cta) for cta in ctas), *((store, warp) for warp in warps)]:
            while goes_on(each):
                moved = True
    assert all(place[warp] == len(steps[warp]) for warp in warps)
    assert set(released.values()) == {2}


@given(cuts())
@settings(max_examples=100, deadline=None)
def test_the_device_computes_the_same_segments(schedule: StreamSchedule):
    work = pytest.importorskip("cute_kernels.gemm.stream.work")
    base, rest = divmod(schedule.total, schedule.num_groups)
    shape = work.StreamSizes(
        m=1, n=0, k=0, num_tiles=schedule.num_tiles, k_blocks=schedule.k_blocks, slice_k_blocks=schedule.slice_k_blocks,
        slice_reciprocal=-(-(1 << work.RECIPROCAL_BITS) // schedule.slice_k_blocks),
        num_slices=schedule.num_slices, base=base, rest=rest, max_parts=schedule.max_parts, activation=0, out_kind=0,
    )  # fmt: skip
    with running(PlainThread()):
        first_groups: dict[int, int] = {}
        for group in range(schedule.num_groups):
            for index in range(schedule.num_slices):
                own = work.Work.of(shape, group, index)
                segments = [own.segment(i) for i in range(own.num_segments)]
                found = [(s.block, s.begin, s.end, s.last) for s in segments]
                assert found == list(segments_of(schedule, group, index))
                for segment in segments:
                    first_groups.setdefault(segment.block, group)
                    assert own.first_group(segment.block) == first_groups[segment.block]


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("n, k", [(8192, 8192), (8192, 28672), (57344, 8192), (28672, 4096)])
def test_all_sms_of_an_h200_get_nearly_equal_bytes(m: int, n: int, k: int):
    schedule = make_schedule(LinearProblem(m, n, k, k, integers(4), "bf16"))
    each = max(end - first for first, end in map(schedule.group_range, range(schedule.num_groups)))
    mean = schedule.num_blocks * schedule.k_blocks / 132
    assert each <= 1.06 * mean


def test_ring_keeps_enough_bytes_in_flight():
    """32 KB to an SM, by Little's law at 4.6 TB/s and 900 ns."""
    for config in schedules.shipped_configs():
        assert schedules.in_flight(config) >= 32 * 1024, config.name


def test_shipped_configurations_have_names_of_their_own():
    configs = schedules.shipped_configs()
    assert len({config.name for config in configs}) == len(configs)
    assert all(config.can_implement() is None for config in configs)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"dtype": "fp32"}, "dtype 'fp32' is not one of bf16, fp16"),
        ({"format": integers(4, 256)}, "block_k 128 is not a multiple of group_size 256"),
        ({"num_stages": 1}, "num_stages 1"),
        ({"num_stages": 60}, "bytes of shared memory exceed"),
        ({"k_warps": 8}, "1216 threads"),
    ],
)
def test_what_cannot_be_compiled_is_said(fields: dict, reason: str):
    config = replace(StreamConfig(integers(4), "bf16"), **fields)
    assert reason in (config.can_implement() or "")
