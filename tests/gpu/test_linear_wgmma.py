"""Weight-only linear layers with many rows on a GPU: formats and shapes of tiles against fp64, splits, epilogues."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import make_product
from cute_kernels.gemm.reference import linear_reference
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.gemm.wgmma.results import Dsmem, RowExchange, SequentialSplitK, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import (
    BETWEEN_SHAPES,
    LARGE_TILE_M,
    MOST_WIDE_ROWS,
    WIDE_CLUSTER,
    make_tile_schedule,
    tile_schedules,
)
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.workspace import POOL
from tests.gpu.test_linear import (
    CUDA,
    TOLERANCE,
    activations,
    assert_near,
    check_epilogues,
    every_format,
    exact_product,
    run,
)
from tests.gpu.test_linear import FORMATS as FORMAT_PARAMS
from tests.linear.cases import known, launch_product, problem_of

pytestmark = pytest.mark.gpu

# W is rounded to the activations' dtype first, so fp32 results are those of fp64 on the rounded one.
SUMS = 3e-5
LIMBS = 2e-4  # of the largest result; x in limbs is off by at most 2**-15 of the largest of 128 inputs
FORMAT_ROWS = (33, 100)
LIMB_FORMATS = ((torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 256))
# Rows, features and inputs of what a CTA keeps all limbs of: up to 16 rows, of long K up to 8.
LIMB_CASES = (
    *((m, n, k) for m in (3, 8, 9, 16) for n, k in ((1000, 2048), (200, 520))),
    *((m, n, k) for m in (3, 8) for n, k in ((130, 9216), (130, 8520))),
)
TURN_ROWS = (1, 8, 9, 16, 17, 24, 25, 32, 33, 49, 64)
TURN_FORMATS = {  # bits, dtype, group, zero points
    "w4": (4, torch.bfloat16, 128, False),
    "w8": (8, torch.bfloat16, 128, False),
    "w4 fp16 zero": (4, torch.float16, 128, True),
    "w4 g32 zero": (4, torch.bfloat16, 32, True),
    "w4 fp16 g256": (4, torch.float16, 256, False),
    "w4 channel": (4, torch.bfloat16, None, False),
    "w4 fp16 channel zero": (4, torch.float16, None, True),
    "w8 fp16 g64 zero": (8, torch.float16, 64, True),
}
ROWS = (33, 64, 65, 90, 129, 168, 200, 232, 257, 272, 1000, 2048)
INVARIANT_ROWS = (1, 7, 16, 33, 100, 257, 700)
INVARIANT_SHAPES = ((1000, 2048), (200, 520), (1001, 640), (4096, 1664))
SHAPES = ((1000, 2048), (200, 520), (1001, 640))
LARGE_BLOCKS = ((28_672, 4096), (24_576, 4096), (14_336, 4096))  # of four to seven tiles of 64 features
MOST_PARTS = 3  # numbers of parts of K that are tested
# Of few features, whose parts of K meet in clusters of four; the last part of the second is a k block of four.
WIDE_SHAPES, WIDE_ROWS = ((1000, 2048), (200, 1664)), (1, 16, 17, 33, 64, 65, 96, 97, 300)
LONG = (20_000, 512)  # many tiles, with several for each CTA
MARGIN = 512  # elements before and behind an output that nobody may touch
BETWEEN = (300, 976, 640)  # (m, n, k): of every tile in between a last one that is not full
LARGE = ((700, 20_000, 512), (257, 1000, 2048), (1000, 33_800, 256))  # (m, n, k)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    formats: list[Any] = [param.values for param in FORMAT_PARAMS]
    found = [problem_of(m, 200, 520, *form) for form in formats for m in FORMAT_ROWS]
    found += [problem_of(m, n, k) for m in ROWS for n, k in SHAPES]
    found += [problem_of(m, *LONG) for m in (40, 700)]
    configs = [make_tile_schedule(one).config for one in found]
    for m in (40, 300):
        configs += [schedule.config for schedule in tile_schedules(problem_of(m, 1000, 2048))]
    configs += [schedule.config for m, n, k in LARGE for schedule in in_large_tiles(problem_of(m, n, k))]
    configs += [schedule.config for schedule in between(problem_of(*BETWEEN))]
    for m in INVARIANT_ROWS:
        configs += [schedule.config for _, _, schedule in of_all_parts(m)]
    configs += [schedule.config for shape in WIDE_SHAPES for m in WIDE_ROWS for schedule in in_four_parts(m, shape)]
    for (dtype, group), case in product(LIMB_FORMATS, LIMB_CASES):
        schedules = in_limbs(problem_of(*case, dtype=dtype, group_size=group))
        configs += [schedule.config for schedule in schedules]
    for form in TURN_FORMATS.values():
        for m in TURN_ROWS:
            configs += [schedule.config for schedule in in_turn(problem_of(m, 1000, 2048, *form))]
    configs += [schedule.config for n, k in LARGE_BLOCKS for m in (8, 9) for schedule in resident(problem_of(m, n, k))]
    return [GemmSpec(config) for config in dict.fromkeys(configs)]


def in_limbs(case: LinearProblem) -> list[TileSchedule]:
    """Schedules that take x in limbs."""
    return [schedule for schedule in tile_schedules(case) if schedule.config.limbs]


def resident(case: LinearProblem) -> list[TileSchedule]:
    """Schedules whose CTAs make limbs of x, of a wave that most SMs have a part of."""
    found = [schedule for schedule in in_limbs(case) if isinstance(schedule.config.mainloop, ResidentLimbs)]
    return [schedule for schedule in found if schedule.num_ctas > 66]


def in_turn(case: LinearProblem) -> list[TileSchedule]:
    """Schedules of decoded weights whose warpgroups take k blocks in turn, and reduce in the cluster (DSMEM) of K."""
    found = [schedule for schedule in tile_schedules(case) if schedule.config.k_warpgroups > 1]
    return [schedule for schedule in found if not schedule.config.limbs]


@every_format
def test_products_are_those_of_fp64(bits, dtype, group, zero):
    reference = known(200, 520, bits, group, zero, dtype)
    weight = reference.pack().to(CUDA)
    for m in FORMAT_ROWS:
        x = activations(m, 520, dtype, m)
        exact = exact_product(x, reference)
        assert_near(run(weight, x, out_dtype=torch.float32), exact, SUMS)
        assert_near(run(weight, x), exact, TOLERANCE[dtype])


def of_all_parts(m: int, shapes: Sequence[tuple[int, int]] = INVARIANT_SHAPES) -> Iterator[Any]:
    """(shape, parts of K, schedule): whatever gives a row the same bits as others with so many parts."""
    for shape in shapes:
        case = problem_of(m, *shape)
        for parts in invariant.possible_parts(case)[:MOST_PARTS]:
            yield from ((shape, parts, schedule) for schedule in invariant.schedules_of(case, parts))


@pytest.mark.parametrize("shape", INVARIANT_SHAPES)
def test_schedules_with_as_many_parts_of_k_give_the_same_bits(shape):
    """Beside each other, in a cluster, or one after the other in a CTA, of any tile."""
    n, k = shape
    reference = known(n, k, group_size=128)
    weight, x = reference.pack().to(CUDA), activations(INVARIANT_ROWS[-1], k, torch.bfloat16)
    exact = exact_product(x, reference)
    first: dict[int, torch.Tensor] = {}
    kinds = set()
    for m in reversed(INVARIANT_ROWS):
        for _, parts, schedule in of_all_parts(m, [shape]):
            found = launch(schedule, weight, x[:m].contiguous())
            assert_near(found, exact[:m], SUMS)
            assert torch.equal(found, first.setdefault(parts, found)[:m]), (m, schedule)
            kinds.add(type(schedule.config.reduction))
    assert kinds == {WorkspaceSplitK, RowExchange, Dsmem, SequentialSplitK}


def in_four_parts(m: int, shape: tuple[int, int]) -> list[TileSchedule]:
    """Schedules of four parts of K: in a cluster, tile by tile up to 96 rows or exchanging rows from 65 on, in memory,
    one after the other."""
    found = list(invariant.schedules_of(problem_of(m, *shape), WIDE_CLUSTER))
    reductions = {type(schedule.config.reduction) for schedule in found}
    assert (Dsmem in reductions, RowExchange in reductions) == (m <= MOST_WIDE_ROWS, m > 64)
    return found


@pytest.mark.parametrize("n, k", WIDE_SHAPES)
def test_four_parts_in_a_cluster_give_the_bits_of_others(n, k):
    """Three additions have an order: the last part, then the first, the second and the third."""
    reference = known(n, k, group_size=128)
    weight, x = reference.pack().to(CUDA), activations(WIDE_ROWS[-1], k, torch.bfloat16)
    every = launch(in_four_parts(WIDE_ROWS[-1], (n, k))[0], weight, x)
    assert_near(every, exact_product(x, reference), SUMS)
    for m in WIDE_ROWS:
        for schedule in in_four_parts(m, (n, k)):
            assert torch.equal(launch(schedule, weight, x[:m].contiguous()), every[:m]), (m, schedule)


@pytest.mark.parametrize("n, k", SHAPES)
def test_rows_do_not_depend_on_each_other(n, k):
    """With ``batch_invariant``, to the last bit."""
    reference = known(n, k, group_size=128)
    weight = reference.pack().to(CUDA)
    x = activations(INVARIANT_ROWS[-1], k, torch.bfloat16)
    everything = run(weight, x, out_dtype=torch.float32, batch_invariant=True)
    assert_near(everything, exact_product(x, reference), SUMS)
    for m in INVARIANT_ROWS:
        some = run(weight, x[:m].contiguous(), out_dtype=torch.float32, batch_invariant=True)
        assert torch.equal(some, everything[:m])


@pytest.mark.parametrize("n, k", [*SHAPES, LONG])
def test_any_number_of_rows(n, k):
    reference = known(n, k, group_size=128)
    weight = reference.pack().to(CUDA)
    for m in ROWS if (n, k) != LONG else (40, 700):
        x = activations(m, k, torch.bfloat16, m)
        out = torch.full((m, n), math.nan, device=CUDA, dtype=torch.float32)
        assert_near(run(weight, x, out=out), exact_product(x, reference), SUMS)


def in_large_tiles(case: LinearProblem) -> list[TileSchedule]:
    """Schedules of the largest tiles."""
    return [schedule for schedule in tile_schedules(case) if schedule.config.tile_m == LARGE_TILE_M]


def between(case: LinearProblem) -> list[TileSchedule]:
    """Schedules of tiles for the numbers of rows in between the powers of two."""
    sizes = {shape[0] for shape in BETWEEN_SHAPES}
    return [schedule for schedule in tile_schedules(case) if schedule.config.tile_m in sizes]


def launch(
    schedule: TileSchedule, weight, x: torch.Tensor, out: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    if out is None:
        out = torch.full((x.shape[0], weight.shape[0]), math.nan, device=CUDA, dtype=torch.float32)
    product = make_product(schedule, x.shape[0], torch.cuda.current_device())
    launch_product(product, x, weight, out, activation=activation)
    return out


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_tiles_in_between_store_their_rows_and_nothing_beside_them(activation):
    """In 16 bits, gate and up as one, and by way of fp32: chunks of a tile's rows, of which the last may be shorter."""
    m, n, k = BETWEEN
    reference = known(n, k, group_size=128)
    weight, x = reference.pack().to(CUDA), activations(m, k, torch.bfloat16)
    exact = linear_reference(x, weight, activation=activation, compute_dtype=torch.float64, out_dtype=torch.float64)
    schedules = between(problem_of(m, n, k))
    assert {schedule.config.tile_m for schedule in schedules} == {shape[0] for shape in BETWEEN_SHAPES}
    for schedule in schedules:
        memory = torch.full((exact.numel() + 2 * MARGIN,), math.nan, device=CUDA, dtype=torch.bfloat16)
        out = memory[MARGIN:-MARGIN].view(exact.shape)
        launch(schedule, weight, x.to(CUDA), out, activation)
        assert_near(out, exact, TOLERANCE[torch.bfloat16])
        assert memory[:MARGIN].isnan().all() and memory[-MARGIN:].isnan().all()


def test_tiles_in_between_return_the_weights_of_rows_with_a_single_one():
    m, n, k = BETWEEN
    packed = known(n, k, group_size=128).pack()
    inputs = (torch.arange(m) * 61 + 7) % k
    one_hot = torch.zeros(m, k, dtype=torch.bfloat16)
    one_hot[torch.arange(m), inputs] = 1
    columns = packed.dequantize(torch.bfloat16)[:, inputs].T.to(CUDA, torch.float32)
    for schedule in between(problem_of(m, n, k)):
        assert torch.equal(launch(schedule, packed.to(CUDA), one_hot.to(CUDA)), columns)


@pytest.mark.parametrize("m, n, k", LARGE)
def test_large_tiles_are_stored_whole_and_nothing_beside_them(m, n, k):
    """Whatever CTAs share, and whichever way a last round is cut; one-hot rows return the weights."""
    reference = known(n, k, group_size=128)
    packed = reference.pack()
    weight, x = packed.to(CUDA), activations(m, k, torch.bfloat16)
    exact = exact_product(x, reference)
    inputs = (torch.arange(m) * 61 + 7) % k
    one_hot = torch.zeros(m, k, dtype=torch.bfloat16)
    one_hot[torch.arange(m), inputs] = 1
    columns = packed.dequantize(torch.bfloat16)[:, inputs].T
    schedules = in_large_tiles(problem_of(m, n, k))
    assert any(one.config.multicast > 1 for one in schedules)
    assert any(one.config.reduction.cuts_rows for one in schedules) == (n > 1000)
    memory = torch.empty(m * n + 2 * MARGIN, device=CUDA, dtype=torch.bfloat16)
    out = memory[MARGIN : MARGIN + m * n].view(m, n)
    for schedule, rows in product(schedules, (x, one_hot.to(CUDA))):
        memory.fill_(7.0)
        out.fill_(math.nan)
        launch(schedule, weight, rows, out)
        if rows is x:
            assert_near(out, exact, TOLERANCE[torch.bfloat16])
        else:
            assert torch.equal(out.cpu(), columns)
        assert torch.all(memory[:MARGIN] == 7.0) and torch.all(memory[MARGIN + m * n :] == 7.0)


@pytest.mark.parametrize("dtype, group", LIMB_FORMATS, ids=str)
@pytest.mark.parametrize("m, n, k", LIMB_CASES)
def test_limbs_are_right_whatever_tiles_and_parts_of_k(m, n, k, dtype, group):
    """Against weights that are not rounded; the same bits in every run."""
    reference = known(n, k, group_size=group, dtype=dtype)
    packed = reference.pack()
    weight, x = packed.to(CUDA), activations(m, k, dtype)
    exact = x.double().cpu() @ packed.dequantize(torch.float32).double().T
    schedules = in_limbs(problem_of(m, n, k, dtype=dtype, group_size=group))
    assert schedules
    for schedule in schedules:
        results = [launch(schedule, weight, x) for _ in range(3)]
        assert_near(results[0].cpu(), exact, LIMBS)
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("m", [3, 8, 16])
def test_one_hot_rows_of_limbs_return_the_weights(m):
    packed = known(1000, 2048, group_size=128).pack()
    inputs = torch.arange(m) * 61 + 7
    x = torch.zeros(m, 2048, dtype=torch.bfloat16)
    x[torch.arange(m), inputs] = 1
    schedules = in_limbs(problem_of(m, 1000, 2048))
    assert schedules
    for schedule in schedules:
        found = launch(schedule, packed.to(CUDA), x.to(CUDA))
        assert torch.equal(found.cpu(), packed.dequantize(torch.float32)[:, inputs].T)


@pytest.mark.parametrize("m", [8, 9, 16])
@pytest.mark.parametrize("n, k", LARGE_BLOCKS)
def test_limbs_of_large_blocks_are_right_in_every_layer(n, k, m):
    """Where each SM has several tiles of 64 features and every CTA all limbs of its part of K; cold, three times."""
    generator = torch.Generator(CUDA).manual_seed(n)
    codes = torch.randint(0, 256, (n // 64, k // 64, 2048), dtype=torch.uint8, device=CUDA, generator=generator)
    scales = 0.005 + 0.01 * torch.rand(n // 64, k // 128, 64, device=CUDA, generator=generator)
    weight = PackedWeight(codes, scales.bfloat16(), None, integers(4), (n, k))
    x = activations(m, k, torch.bfloat16)
    exact = (x.double() @ weight.dequantize(torch.float32).double().T).cpu()
    schedules = resident(problem_of(m, n, k))
    assert schedules
    for schedule in schedules:
        first = launch(schedule, weight, x)
        assert_near(first.cpu(), exact, LIMBS)
        for _ in range(3):
            torch.empty(1 << 26, device=CUDA).fill_(0.0)  # which takes the place of weights in L2
            assert torch.equal(launch(schedule, weight, x), first)


def as_multiplied(weight: PackedWeight) -> torch.Tensor:
    """W as tiles of decoded weights have it: rounded once, unless a scale is a whole row's and meets the
    accumulators."""
    return weight.dequantize(weight.dtype if weight.group_size else torch.float32)


def check_sums(schedule: TileSchedule, weight: PackedWeight, x: torch.Tensor, exact: torch.Tensor) -> None:
    """A launch's sums are near those of fp64 [m, n], the same bits each time, and nothing is written beside them."""
    size = exact.numel()
    memory = torch.full((size + 2 * MARGIN,), 7.0, device=CUDA)
    out = memory[MARGIN : MARGIN + size].view(exact.shape)
    out.fill_(math.nan)
    first = launch(schedule, weight, x, out).clone()
    assert_near(first, exact, SUMS)
    assert all(torch.equal(launch(schedule, weight, x), first) for _ in range(3))
    assert torch.all(memory[:MARGIN] == 7.0) and torch.all(memory[MARGIN + size :] == 7.0)


@pytest.mark.parametrize("m", TURN_ROWS)
@pytest.mark.parametrize("bits, dtype, group, zero", TURN_FORMATS.values(), ids=list(TURN_FORMATS))
@pytest.mark.parametrize("n, k", [(1000, 2048), (200, 520), (66, 256), (130, 8520)])
def test_k_blocks_in_turn_add_up(n, k, bits, dtype, group, zero, m):
    """Right with a last k block that is not whole, with one k block for each turn of a part and with none for the
    second.

    The same bits in every run, and nothing is written beside the output.
    """
    weight, x = known(n, k, bits, group, zero, dtype).pack().to(CUDA), activations(m, k, dtype)
    exact = x.double() @ as_multiplied(weight).double().T
    case = problem_of(m, n, k, bits, dtype, group, zero)
    schedules = in_turn(case)
    assert schedules or (bits == 8 and m > 32) or case.k_pad % 128
    for schedule in schedules:
        check_sums(schedule, weight, x, exact)


@pytest.mark.parametrize("bits, dtype, group, zero", TURN_FORMATS.values(), ids=list(TURN_FORMATS))
@pytest.mark.parametrize("m", [16, 24, 32])
def test_one_hot_rows_return_the_weights_where_k_blocks_are_taken_in_turn(bits, dtype, group, zero, m):
    packed = known(1000, 2048, bits, group, zero, dtype).pack()
    inputs = torch.arange(m) * 61 + 7
    x = torch.zeros(m, 2048, dtype=dtype)
    x[torch.arange(m), inputs] = 1
    for schedule in in_turn(problem_of(m, 1000, 2048, bits, dtype, group, zero)):
        found = launch(schedule, packed.to(CUDA), x.to(CUDA))
        assert torch.equal(found.cpu(), as_multiplied(packed).float()[:, inputs].T)


@pytest.mark.parametrize("m", [40, 300])
def test_every_schedule_gives_the_same_numbers_each_time(m):
    """Whatever tiles and parts of K: right, the same bits in every run, and a workspace left as it was."""
    reference = known(1000, 2048, group_size=128)
    weight = reference.pack().to(CUDA)
    x = activations(m, 2048, torch.bfloat16)
    exact = exact_product(x, reference)
    for schedule in tile_schedules(problem_of(m, 1000, 2048)):
        results = [launch(schedule, weight, x) for _ in range(3)]
        assert_near(results[0], exact, SUMS)
        assert all(torch.equal(results[0], other) for other in results[1:])
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    words = POOL._by_stream[stream.device_index, stream.cuda_stream]
    assert torch.all(words == -1)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n, k, m", [(200, 520, 65), (1000, 2048, 257)])
def test_epilogues(activation, out_dtype, n, k, m):
    check_epilogues(known(n, k, group_size=128), m, activation, out_dtype)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m, reduction", [(5, Dsmem), (40, Dsmem), (100, RowExchange), (700, SequentialSplitK)])
def test_epilogues_of_batch_invariant_products(activation, out_dtype, m, reduction):
    n, k = SHAPES[0]
    case = replace(problem_of(m, n, k), batch_invariant=True)
    config: Any = chosen(case).config
    assert isinstance(config.reduction, reduction)
    check_epilogues(known(n, k, group_size=128), m, activation, out_dtype, batch_invariant=True)


@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_outside(offset):
    """Also where rows of the output do not start on 16 bytes."""
    reference = known(200, 520, group_size=128)
    x = activations(100, 520, torch.bfloat16)
    memory = torch.full((offset + 100 * 200 + 64,), 7.0, device=CUDA, dtype=torch.bfloat16)
    out = memory[offset : offset + 100 * 200].view(100, 200)
    run(reference.pack().to(CUDA), x, out=out)
    assert_near(out, exact_product(x, reference), TOLERANCE[torch.bfloat16])
    assert torch.all(memory[offset + 100 * 200 :] == 7.0) and torch.all(memory[:offset] == 7.0)
