"""Schedules of batch-invariant products. The number of parts of K depends on the weight, not on the number of rows.

Within a part of K, every tile shape adds products in one order. Parts are also added in one order: the last part, then
the first, the second and so on. So a row has the same bits in every schedule with the same number of parts. With few
rows, different CTAs compute the parts, which are added up in global memory or in a cluster. A cluster of two CTAs adds
two parts; their sum has the same bits in either order. A cluster of four adds four parts; each of its CTAs has one
tile, so that the parts are added in that order. With many rows, one CTA computes all parts, one after the other. Plain
Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import schedule as plain
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.results import Dsmem, SequentialSplitK

ROWS = (1, 16, 64, 256, 1024)  # numbers of rows that a cut of K is judged by
MOST_PARTS = 16
BLOCK_K = (64, 128)  # parts of K are whole k blocks of these sizes
MOST_WORKSPACE_WORDS = 16 << 20  # of partial results; with more rows one CTA computes the parts one after the other
DSMEM_PARTS, DSMEM_TILE_M = 2, (16, 32, 64)  # tiles of few rows whose parts of K are added in a cluster
# Of layers with few features, in clusters of four: for the last size there are too few stages in clusters of two.
WIDE_TILE_M = (*DSMEM_TILE_M, plain.MOST_WIDE_ROWS)
# Of those of one warpgroup, as measured with 4 bits: rows up to which, and inputs of a part from which on, k blocks are
# long. Nobody decodes while it waits, some 90 clocks in each k block: of twice as many inputs it is half of that.
LONG_BITS, LONG_TILE_M, LONG_PART, LONG_STAGES, LONG_BLOCK_K = 4, 32, 7168, 8, 256
SEQUENTIAL_TILE_M = (64, 96, 128, 160)
# What parts that meet in memory take besides, beyond what tiles that are cut in a last round do: an H200, 1 to 32 rows.
WORKSPACE_US = 2.2
FEW_PARTS_ROWS = 64  # rows from which on a CTA may have all parts of a tile


def expected_us(problem: LinearProblem, schedule: TileSchedule) -> float:
    """Returns the microseconds that the model expects, without the launch itself."""
    return plain.estimate_us(problem, schedule) + (WORKSPACE_US if schedule.workspace_words else 0.0)


def schedules(problem: LinearProblem) -> Iterator[TileSchedule]:
    """Yields every schedule with the number of parts that `parts_of_k` returns. A row has the same bits in all of
    them."""
    yield from schedules_of(problem, parts_of_k(replace(problem, m=1)))


@lru_cache(maxsize=4096)
def parts_of_k(problem: LinearProblem) -> int:
    """Returns the number of parts into which K is cut. It is the same for any number of rows.

    For each candidate number of parts, and each number of rows in `ROWS`, the model computes a ratio: the expected time
    with so many parts over the expected time of the fastest schedule. The function returns the candidate with the
    smallest worst ratio. The result depends on all fields of ``problem`` except the number of rows; the number of SMs
    is one of these fields.
    """
    # The fastest schedules are those of all products, resident limbs included. So their models of time decide, too, how
    # many parts there are, and with these the bits of results.
    problems = [replace(problem, m=m, batch_invariant=True) for m in ROWS]
    fastest = [plain.estimate_us(one, plain.make_tile_schedule(one)) for one in problems]

    def worst(parts: int) -> float:
        times = [
            min((expected_us(one, schedule) for schedule in schedules_of(one, parts)), default=inf) for one in problems
        ]
        return max(time / least for time, least in zip(times, fastest, strict=True))

    return min((worst(parts), parts) for parts in possible_parts(problem))[1]


def possible_parts(problem: LinearProblem) -> list[int]:
    """Returns the candidate numbers of parts of K for `parts_of_k`. A candidate leaves no part empty. With one CTA for
    each part of each block of two tiles, all CTAs fit on the GPU at once.
    """
    blocks = -(-problem.num_tiles // 2)
    most = min(MOST_PARTS, max(1, problem.num_sms // blocks))
    return [parts for parts in range(1, most + 1) if -(-problem.k_pad // part_inputs(problem.k_pad, parts)) == parts]


def part_inputs(k_pad: int, parts: int) -> int:
    """Returns how many inputs a part of K has: a multiple of the largest k block that divides K. The last part may have
    fewer."""
    block_k = max(size for size in BLOCK_K if k_pad % size == 0)
    return -(-k_pad // block_k // parts) * block_k


def schedules_of(problem: LinearProblem, parts: int) -> Iterator[TileSchedule]:
    """Yields every schedule that cuts all tiles into ``parts`` parts of K. The parts begin at the same inputs in all
    schedules."""
    for config in configs_of(problem):
        schedule = schedule_of(problem, config, parts)
        if schedule is not None:
            yield schedule


@lru_cache(maxsize=64)
def configs_of(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns the configurations worth considering. The list is the same for every number of parts of K; `schedule_of`
    returns None for a configuration that does not support a number."""
    tiles = plain.tile_configs(
        problem, (*plain.SHAPES, *plain.BETWEEN_SHAPES, *plain.NARROW_SHAPES, *plain.wide_shapes(problem))
    )
    sequential = sequential_configs(problem) if problem.m >= FEW_PARTS_ROWS else []
    return [*tiles, *dsmem_configs(problem), *wide_configs(problem), *sequential]


def schedule_of(problem: LinearProblem, config: WgmmaConfig, parts: int) -> TileSchedule | None:
    """Returns a configuration's schedule with all tiles in ``parts`` parts of K. Returns None if the configuration does
    not support it, or if its parts would not begin where `part_inputs` says.

    Parts that are added in global memory run in one round, in neighbouring CTAs. The last of these CTAs adds up a
    tile's parts, so it waits for no CTA that starts later.
    """
    reduction = config.reduction
    schedule = plain.cut_schedule(problem, config, parts)
    if schedule is None or reduction.cuts_rows or (parts > 1 and config.multicast > 1):
        return None
    if parts > 1 and reduction.splits_k and config.cluster == 1:
        schedule = replace(schedule, num_ctas=min(problem.num_sms // parts * parts, schedule.num_work_tiles))
    else:
        schedule = reduction.laid_out(schedule, problem.num_sms, plain.share_of(config))
    if schedule is None or schedule.workspace_words > MOST_WORKSPACE_WORDS:
        return None
    begins_alike = schedule.split_k_blocks * config.block_k == part_inputs(problem.k_pad, parts)
    return schedule if begins_alike else None


def dsmem_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations for few rows in which a cluster adds two parts. Each warpgroup has its own output
    features. Warpgroups do not interleave k blocks, which would change the bits of sums."""
    narrow, wide = (cluster_configs(problem, DSMEM_PARTS, DSMEM_TILE_M, warpgroups) for warpgroups in (1, 2))
    long_blocks = problem.format.bits == LONG_BITS and problem.k_pad >= DSMEM_PARTS * LONG_PART
    long = [
        replace(config, block_k=LONG_BLOCK_K, mainloop=RegisterWgmma(group_steps=4))
        for config in narrow
        if long_blocks and config.tile_m <= LONG_TILE_M
    ]
    return narrow + wide + plain.implementable(long, LONG_STAGES)


def wide_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations for few rows in which a cluster adds four parts, for layers with few features. A CTA has
    one tile of 64 features, so that parts are added in the order of the other schedules."""
    if not plain.has_few_features(problem):
        return []
    return cluster_configs(problem, plain.WIDE_CLUSTER, WIDE_TILE_M, warpgroups=1)


def cluster_configs(problem: LinearProblem, cluster: int, sizes: Sequence[int], warpgroups: int) -> list[WgmmaConfig]:
    """Returns a list with one configuration, which has 64 features for each warpgroup and the smallest tile of
    ``sizes`` that holds all rows. The list is empty if this configuration cannot be compiled.
    """
    tile_m = next((size for size in sizes if problem.m <= size), None)
    if tile_m is None or problem.k_pad % plain.DSMEM_BLOCK_K:
        return []
    config = plain.of_format(
        problem,
        tile_m=tile_m,
        row_parts=2 if tile_m in DSMEM_TILE_M else 1,  # parts are powers of two
        warpgroups=warpgroups,
        block_k=plain.DSMEM_BLOCK_K,
        reduction=Dsmem(cluster),
    )
    return plain.implementable([config], plain.DSMEM_STAGES)


def sequential_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations in which a CTA computes all parts of K, one after the other, with two sets of
    accumulators."""
    shapes = [shape for shape in (*plain.SHAPES, *plain.BETWEEN_SHAPES) if _is_sequential(*shape)]
    configs = plain.tile_configs(problem, shapes)
    return plain.implementable(replace(config, reduction=SequentialSplitK()) for config in configs)


def _is_sequential(tile_m: int, n_tiles: int, warpgroups: int, block_k: int, cluster: int) -> bool:
    return tile_m in SEQUENTIAL_TILE_M and (n_tiles, warpgroups, cluster) == (1, 2, 1)


def shipped_configs() -> list[WgmmaConfig]:
    """Returns the configurations in the most common formats that only batch-invariant products use."""
    k = DSMEM_PARTS * 2 * LONG_PART  # where all k blocks are whole
    problems = [LinearProblem(m, 8192, k, k, integers(bits), "bf16") for bits in (4, 8) for m in DSMEM_TILE_M]
    many = [replace(problem, m=8192) for problem in problems[:: len(DSMEM_TILE_M)]]
    small = [config for problem in problems for config in dsmem_configs(problem)]
    few_features = [LinearProblem(m, 1024, k, k, integers(4), "bf16") for m in WIDE_TILE_M]
    small += [config for problem in few_features for config in wide_configs(problem)]
    return [*small, *(config for problem in many for config in sequential_configs(problem))]
