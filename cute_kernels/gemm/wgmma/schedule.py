"""The schedule of a product of many rows: its configuration, and the number of its work tiles. Plain Python, no GPU.

Every CTA takes a tile in each round. The tiles of a last, incomplete round are cut along K or along rows of x. With
small tiles, weights are decoded more often. With large tiles, more CTAs idle in the last round. `estimate_us` computes
the time of each choice from the cost models in `.costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import results
from cute_kernels.gemm.wgmma.config import RESIDENT_TILE_M, WgmmaConfig
from cute_kernels.gemm.wgmma.costs import CLOCKS_PER_US, MULTICAST_CLOCKS, SHORT_ROWS, START_CLOCKS, cost_of
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.resident_schedule import resident_configs
from cute_kernels.gemm.wgmma.stages import MAX_STAGES, of_format, scaling_sums, with_stages

MAX_SPLITS = 16
SHORT_CHUNK = 32  # rows of x stored at a time where the smaller staging buffer makes room for one more stage that pays

# Each shape, (tile_m, n_tiles, warpgroups, block_k, CTAs of a multicast), was the fastest for some product. The first
# and the last ship in more formats.
SHAPES = (
    *((256, 1, 2, 64, ctas) for ctas in (1, 2)),
    *((tile_m, 1, 2, 128, ctas) for tile_m in (128, 64, 32) for ctas in (1, 2)),
    *((32, 2, warpgroups, 128, 1) for warpgroups in (2, 3)),
    (16, 1, 2, 128, 1),
    *((16, 2, warpgroups, 128, 1) for warpgroups in (3, 2)),
)
# Shapes for numbers of rows in between. A row that x lacks costs a tile as much as any other row or more, and whole
# rounds of all CTAs need tiles of many sizes.
BETWEEN_SHAPES = (
    *((tile_m, 1, 2, 64, 1) for tile_m in (240, 224, 208, 192, 176, 160)),
    *((tile_m, 1, 2, 128, 1) for tile_m in (144, 112, 96, 80, 48)),
    *((tile_m, 1, 1, 128, 1) for tile_m in (144, 80)),
)
# For many features and 33 to 64 rows: two tiles of a warpgroup share the rows of x, whose descriptors are made once.
# Batch-invariant products do not use them.
PAIRED_SHAPES, PAIRED_BITS = ((64, 2, 2, 128, 1), (48, 2, 2, 128, 1)), 4
LARGE_TILE_M = 256  # rows of tiles whose last round may be cut along rows of x
ROW_CUTS = 2
# CTAs that share activations by TMA multicast: they read less from L2, which saves time under the power cap.
MULTICAST = 2


class DsmemShape(NamedTuple):
    """A tile with a DSMEM reduction in a cluster of two, and the number of warpgroups that interleave its k blocks. The
    number depends on the weight.

    Attributes:
        k_warpgroups: for codes without zero points, in groups of whole k blocks.
        zero_k_warpgroups: for codes with zero points, which take longer to decode.
        group_k_warpgroups: for groups of less than a k block.
    """

    tile_m: int
    row_parts: int
    n_tiles: int
    k_warpgroups: int
    zero_k_warpgroups: int
    group_k_warpgroups: int


# By the bits of a code: each shape was the fastest for some product.
DSMEM_SHAPES = {
    4: (
        DsmemShape(64, 4, 1, 2, 2, 2),
        DsmemShape(32, 1, 1, 2, 3, 3),
        DsmemShape(32, 1, 2, 3, 3, 2),
        DsmemShape(32, 4, 2, 2, 3, 2),
        DsmemShape(16, 1, 1, 3, 3, 3),
        DsmemShape(16, 1, 2, 3, 3, 2),
    ),
    8: (
        DsmemShape(32, 1, 1, 2, 2, 2),
        DsmemShape(32, 1, 2, 2, 2, 2),
        DsmemShape(16, 2, 1, 3, 3, 3),
        DsmemShape(16, 1, 2, 3, 3, 3),
    ),
}
# The formats and dtypes of activations in which all DSMEM shapes ship.
DSMEM_FORMS = (
    (integers(4), "bf16"),
    (integers(4, zero_points=True), "bf16"),
    (integers(4), "fp16"),
    (integers(4, zero_points=True), "fp16"),
    (integers(8), "bf16"),
    (integers(8), "fp16"),
)
DSMEM_BLOCK_K, DSMEM_CLUSTER, DSMEM_STAGES = 128, 2, 12
# Tiles with a DSMEM reduction whose two warpgroups have different features: their rows, the number of rows of x from
# which on they are used, and the bits of their codes.
APART_TILE_M, APART_ROWS, APART_BITS = (48, 64), 33, 4
# With so few features that clusters of two would occupy less than half of the SMs, 17 to 96 rows take clusters of four.
# Such clusters fit on this share of the SMs, however many SMs a GPC has.
WIDE_CLUSTER, WIDE_SHARE, WIDE_TILE_M, WIDE_K_WARPGROUPS = 4, 0.75, 32, 2
MOST_DSMEM_ROWS, MOST_WIDE_ROWS = 64, 96
WIDE_SHAPES = ((128, 1, 2, 128, WIDE_CLUSTER), (64, 1, 2, 128, WIDE_CLUSTER))  # for more rows; fields as in `SHAPES`
# For 225 to 288 rows of so few features: three tiles of 96 rows in clusters of four. The one H200 that was measured
# holds 30 such clusters at once. A GPU whose GPCs hold fewer needs a second round.
CROWDED_SHAPES, CROWDED_ROWS, CROWDED_SHARE = ((96, 1, 2, 128, WIDE_CLUSTER),), range(225, 289), 0.91
# Blocks of 64 or 192 features, so that the number of tiles can be just that of the SMs, or of whole rounds of them.
ROUND_SHAPES = (
    *((tile_m, 1, 3, 128, 1) for tile_m in (112, 96, 80)),
    *((tile_m, 1, 3, 128, 2) for tile_m in (128, 96, 64)),
    (48, 1, 2, 128, 2),
    *((tile_m, 1, 1, 128, 1) for tile_m in (128, 112, 96, 64)),
)
# Tiles as work ranges: (tile_m, warpgroups, block_k, k blocks of a tile's end).
RANGE_GROUP = 128
RANGE_SHAPES = ((128, 2, 128, 3), (112, 2, 128, 5), (96, 2, 128, 5), (80, 2, 128, 5))
# Smaller tiles, which occupy more SMs in small layers where K may not be cut as the rows would want it.
NARROW_SHAPES = ((64, 1, 1, 128, 1), (16, 1, 1, 128, 1))


@lru_cache(maxsize=4096)
def make_tile_schedule(problem: LinearProblem) -> TileSchedule:
    """Returns the schedule that is the fastest by the model."""
    return min(tile_schedules(problem), key=lambda schedule: expected_us(problem, schedule))


def expected_us(problem: LinearProblem, schedule: TileSchedule) -> float:
    """Returns the expected microseconds of a schedule: `estimate_us`, and `MainloopCost.all_cut_us` if all tiles are
    cut and added through the workspace.
    """
    us = estimate_us(problem, schedule)
    if schedule.workspace_words and not schedule.whole:
        us += cost_of(schedule.config).all_cut_us(problem, schedule)
    return us


def tile_schedules(problem: LinearProblem) -> Iterator[TileSchedule]:
    """Yields the schedules of every candidate configuration, one for each number of parts of K that it supports.
    `.invariant` has the schedules of batch-invariant products."""
    for config in candidate_configs(problem):
        for splits in range(1, most_splits(config) + 1):
            schedule = schedule_of(problem, config, splits)
            if schedule is not None:
                yield schedule


def most_splits(config: WgmmaConfig) -> int:
    """Returns the largest number of parts of K worth trying. It is 1 for tiles of `PAIRED_SHAPES` without a DSMEM
    reduction, since these tiles are for layers with many features. Otherwise it is `MAX_SPLITS`.
    """
    is_paired = any((config.tile_m, config.n_tiles) == shape[:2] for shape in PAIRED_SHAPES)
    return 1 if is_paired and not config.reduction.dsmem else MAX_SPLITS


def schedule_of(problem: LinearProblem, config: WgmmaConfig, splits: int = 1) -> TileSchedule | None:
    """Returns a configuration's schedule with ``splits`` parts of each cut tile. Returns None if `cut_schedule` or
    `Reduction.laid_out` returns None."""
    schedule = cut_schedule(problem, config, splits)
    return schedule and config.reduction.laid_out(schedule, problem.num_sms, share_of(config))


def cut_schedule(problem: LinearProblem, config: WgmmaConfig, splits: int) -> TileSchedule | None:
    """Returns a schedule that cuts every tile into ``splits`` parts. Its ``num_ctas`` is 0: callers set it afterwards.
    Returns None if the padded K is not a multiple of the k block, or if the reduction cannot cut tiles so."""
    k_blocks, rest = divmod(problem.k_pad, config.block_k)
    if rest or not config.reduction.can_cut(config, splits, k_blocks):
        return None
    return TileSchedule(config, problem.num_tiles, -(-problem.m // config.rows), k_blocks, splits, 0)


def share_of(config: WgmmaConfig) -> float:
    """Returns the fraction of the SMs on which clusters of a configuration can run at once."""
    if config.cluster < WIDE_CLUSTER:
        return 1.0
    shape = (config.tile_m, config.n_tiles, config.warpgroups, config.block_k, config.cluster)
    return CROWDED_SHARE if shape in CROWDED_SHAPES and not config.reduction.dsmem else WIDE_SHARE


def estimate_us(problem: LinearProblem, schedule: TileSchedule) -> float:
    """Returns the microseconds that the model expects, without the launch itself."""
    cost = cost_of(schedule.config)
    clocks = schedule.config.reduction.launch_clocks(problem, schedule, cost)
    clocks += MULTICAST_CLOCKS if schedule.config.multicast > 1 else 0
    return (START_CLOCKS + cost.start_clocks(problem, schedule) + clocks) / CLOCKS_PER_US


Candidates = Callable[[LinearProblem], Iterable[WgmmaConfig]]


def candidate_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns the configurations worth considering."""
    return [scaling_sums(config) for configs in CANDIDATES for config in configs(problem)]


def shaped_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations that add parts of K through the workspace, or in clusters that exchange rows."""
    paired = PAIRED_SHAPES if problem.format.bits == PAIRED_BITS else ()
    rounds = ROUND_SHAPES if is_short(problem) else lone_shapes(problem)
    more = wide_shapes(problem) + crowded_shapes(problem) + rounds
    return tile_configs(problem, SHAPES + BETWEEN_SHAPES + paired + more)


def tile_configs(problem: LinearProblem, shapes: Iterable[tuple[int, int, int, int, int]]) -> list[WgmmaConfig]:
    """Returns the configurations of ``shapes``, tuples as in `SHAPES`, that can be compiled. Tiles are left out if half
    their rows are enough for the product's rows.
    """
    configs, short = [], SHORT_CHUNK
    for tile_m, n_tiles, warpgroups, block_k, cluster in shapes:
        config = of_format(
            problem,
            tile_m=tile_m,
            n_tiles=n_tiles,
            warpgroups=warpgroups,
            block_k=block_k if problem.k_pad % block_k == 0 else 64,
            mainloop=RegisterWgmma(in_flight=groups_in_flight(problem, tile_m, block_k, cluster, n_tiles)),
            reduction=results.WorkspaceSplitK() if cluster == 1 else results.RowExchange(cluster),
            store=results.StagedStore(
                short if tile_m == 128 and (problem.format.bits == 8 or cluster > 1) else results.CHUNK_M,
                problem.activation,
            ),
        )
        config = with_stages(config)
        # A tile half as large would do for the rows there are.
        if config.can_implement() is None and (tile_m == SHAPES[-1][0] or problem.m > tile_m // 2):
            configs.append(config)
            if tile_m == LARGE_TILE_M and cluster == 1:
                configs += large_configs(config)
    return configs


def large_configs(config: WgmmaConfig) -> list[WgmmaConfig]:
    """Returns two variants of a large tile: one with TMA multicast of activations, and one whose last round is cut
    along rows of x."""
    in_rows = replace(config, reduction=results.RowCuts(), row_parts=ROW_CUTS)
    return [with_stages(one) for one in (replace(config, multicast=MULTICAST), in_rows)]


def range_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations with work ranges, for products that `is_short` accepts. There are none unless the group
    size is `RANGE_GROUP`, which was measured."""
    if problem.format.group_size != RANGE_GROUP or not is_short(problem):
        return []
    configs = (
        of_format(
            problem,
            tile_m=tile_m,
            warpgroups=warpgroups,
            block_k=block_k,
            mainloop=RegisterWgmma(in_flight=groups_in_flight(problem, tile_m, block_k, 1)),
            reduction=results.RangeSplitK(end),
        )
        for tile_m, warpgroups, block_k, end in RANGE_SHAPES
        if problem.m > tile_m // 2 and problem.k_pad % block_k == 0
    )
    return implementable(configs)


def dsmem_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations whose CTAs reduce parts of K in the cluster (DSMEM)."""
    if problem.k_pad % DSMEM_BLOCK_K:
        return []
    configs = (
        of_format(
            problem,
            tile_m=shape.tile_m,
            row_parts=shape.row_parts,
            n_tiles=shape.n_tiles,
            block_k=DSMEM_BLOCK_K,
            warpgroups=k_warpgroups_of(problem, shape),
            reduction=results.Dsmem(DSMEM_CLUSTER, k_warpgroups_of(problem, shape)),
        )
        for shape in DSMEM_SHAPES[problem.format.bits]
        if shape.tile_m >= problem.m and (shape.tile_m == SHAPES[-1][0] or problem.m > shape.tile_m // 2)
    )
    return implementable(configs, DSMEM_STAGES)


def wide_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations with a DSMEM reduction in clusters of four, for layers with few features. Each CTA has one
    tile of 64 features.

    Up to 64 rows they have intra-CTA split-K and the tiles of `dsmem_configs`. With more rows, the received partials
    leave shared memory for only four stages, too few for intra-CTA split-K.
    """
    if not has_few_features(problem) or problem.k_pad % DSMEM_BLOCK_K:
        return []
    # Fewer rows than half of a tile's take no longer.
    rows = problem if problem.batch_invariant else replace(problem, m=max(problem.m, WIDE_TILE_M))
    found = (one for one in dsmem_configs(rows) if one.block_tiles == 1 and one.tile_m >= WIDE_TILE_M)
    interleaved = results.Dsmem(WIDE_CLUSTER, WIDE_K_WARPGROUPS)
    wide = [replace(one, warpgroups=WIDE_K_WARPGROUPS, reduction=interleaved) for one in found]
    if MOST_DSMEM_ROWS < problem.m <= MOST_WIDE_ROWS:
        alone = results.Dsmem(WIDE_CLUSTER)
        options = {"n_tiles": 1, "warpgroups": 1, "block_k": DSMEM_BLOCK_K}
        wide.append(of_format(problem, tile_m=MOST_WIDE_ROWS, reduction=alone, **options))
    return implementable(wide, DSMEM_STAGES)


def wide_shapes(problem: LinearProblem) -> tuple[tuple[int, int, int, int, int], ...]:
    """Returns the shapes whose clusters of four exchange rows. They are for layers with few features, and for more rows
    than DSMEM reductions support.
    """
    return WIDE_SHAPES if has_few_features(problem) and problem.m > MOST_DSMEM_ROWS else ()


def crowded_shapes(problem: LinearProblem) -> tuple[tuple[int, int, int, int, int], ...]:
    """Returns shapes for 225 to 288 rows of layers with few features. In a decode step of 256 rows, a layer [1280,
    8192] takes 2 us less with these shapes than with tiles cut along K."""
    return CROWDED_SHAPES if has_few_features(problem) and is_plain(problem) and problem.m in CROWDED_ROWS else ()


def is_plain(problem: LinearProblem) -> bool:
    """Returns whether a problem has 4-bit codes without zero points and bf16 activations. `ROUND_SHAPES`,
    `RANGE_SHAPES` and `CROWDED_SHAPES` were measured with these alone.
    """
    return (problem.format.bits, problem.dtype, problem.format.has_zeros) == (4, "bf16", False)


def is_short(problem: LinearProblem) -> bool:
    """Returns whether `ROUND_SHAPES` and `RANGE_SHAPES` were measured for problems like this one."""
    return is_plain(problem) and problem.m in SHORT_ROWS and not problem.batch_invariant


def lone_shapes(problem: LinearProblem) -> tuple[tuple[int, int, int, int, int], ...]:
    """Returns shapes of one warpgroup with 64 features, for more than 48 rows. They are for layers whose tiles of 64
    features take more than half of the SMs, but not more than all SMs."""
    one_round = problem.num_sms // 2 < problem.num_tiles <= problem.num_sms
    return NARROW_SHAPES[:1] if one_round and problem.m > APART_TILE_M[0] else ()


def has_few_features(problem: LinearProblem) -> bool:
    """Returns whether a cluster of four CTAs for each tile of 64 features can run at once on the GPU."""
    return problem.num_tiles * WIDE_CLUSTER <= problem.num_sms * WIDE_SHARE


def k_warpgroups_of(problem: LinearProblem, shape: DsmemShape) -> int:
    """Returns the number of warpgroups that interleave the k blocks of a tile: the field of ``shape`` for the problem's
    format.
    """
    if problem.format.has_zeros:
        return shape.zero_k_warpgroups
    return shape.group_k_warpgroups if 0 < problem.format.group_size < DSMEM_BLOCK_K else shape.k_warpgroups


def apart_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """Returns configurations with a DSMEM reduction for 33 to 64 rows. A CTA computes half of K for two tiles of 64
    features; each warpgroup has one tile. Without zero points these configurations take 0.2 to 0.6 us less than those
    that exchange rows, with zero points 0.8 to 2 us less. They also support tiles of 48 rows, which an exchange of rows
    does not.
    """
    tile_m = next((size for size in APART_TILE_M if problem.m <= size), None)
    if tile_m is None or problem.m < APART_ROWS or problem.format.bits != APART_BITS or problem.k_pad % DSMEM_BLOCK_K:
        return []
    options = {"tile_m": tile_m, "warpgroups": 2, "block_k": DSMEM_BLOCK_K, "reduction": results.Dsmem(DSMEM_CLUSTER)}
    return implementable([of_format(problem, **options, mainloop=RegisterWgmma(in_flight=2))], DSMEM_STAGES)


def groups_in_flight(problem: LinearProblem, tile_m: int, block_k: int, cluster: int, n_tiles: int = 1) -> int:
    """Returns how many commit groups of MMAs run while the next one is decoded: the fastest number that was
    measured.
    """
    form = problem.format.bits, problem.dtype
    if n_tiles == 2 and tile_m >= PAIRED_SHAPES[-1][0]:
        several_groups = 0 < problem.format.group_size < block_k
        return 1 if problem.format.has_zeros or several_groups or problem.k_pad % block_k else 2
    if not 64 <= tile_m <= 128 or problem.k_pad % block_k:
        return 1
    if cluster > 1:
        return 2 if tile_m == 64 and form == (4, "bf16") else 1
    return 1 if tile_m > 64 and form == (8, "bf16") else 2


CANDIDATES: list[Candidates] = [
    shaped_configs, dsmem_configs, apart_configs, wide_configs, range_configs, resident_configs,
]  # fmt: skip
"""The functions whose configurations the chooser considers. A reduction outside this package appends its own."""


def shipped_configs() -> list[WgmmaConfig]:
    """Returns the configurations that ship.

    In the most common formats, every shape of tiles ships, including shapes that only batch-invariant products use. In
    each other format, two configurations ship: one for few rows and one for many rows. 8-bit codes ship without zero
    points. Limbs ship with groups of 128. With zero points, only resident limbs ship, which CTAs make themselves.
    """
    configs: dict[WgmmaConfig, None] = {}
    formats = [("bf16", group_size) for group_size in (0, 32, 64, 128)] + [("fp16", 0), ("fp16", 128)]
    codes = ((4, False), (4, True), (8, False))
    for (bits, zero_point), (dtype, group_size) in product(codes, formats):
        problem = LinearProblem(8192, 8192, 8192, 8192, integers(bits, group_size, zero_point), dtype)
        found = tile_configs(problem, SHAPES)
        if (dtype, group_size, zero_point) == ("bf16", 128, False):
            configs |= dict.fromkeys([*found, *tile_configs(problem, BETWEEN_SHAPES + NARROW_SHAPES)])
        else:
            configs |= dict.fromkeys((found[0], found[-1]))
    for form in DSMEM_FORMS:
        for shape in DSMEM_SHAPES[form[0].bits]:
            configs |= dict.fromkeys(dsmem_configs(LinearProblem(shape.tile_m, 8192, 8192, 8192, *form)))
        for rows in APART_TILE_M:
            configs |= dict.fromkeys(apart_configs(LinearProblem(rows, 8192, 8192, 8192, *form)))
    for form in DSMEM_FORMS[:2]:
        configs |= dict.fromkeys(tile_configs(LinearProblem(8192, 8192, 8192, 8192, *form), PAIRED_SHAPES))
    for rows in (*(shape.tile_m for shape in DSMEM_SHAPES[4]), MOST_WIDE_ROWS):
        configs |= dict.fromkeys(wide_configs(LinearProblem(rows, 1024, 8192, 8192, *DSMEM_FORMS[0])))
    configs |= dict.fromkeys(tile_configs(LinearProblem(128, 1024, 8192, 8192, *DSMEM_FORMS[0]), WIDE_SHAPES))
    configs |= dict.fromkeys(tile_configs(LinearProblem(256, 1024, 8192, 8192, *DSMEM_FORMS[0]), CROWDED_SHAPES))
    configs |= dict.fromkeys(tile_configs(LinearProblem(128, 8192, 8192, 8192, *DSMEM_FORMS[0]), ROUND_SHAPES))
    configs |= dict.fromkeys(range_configs(LinearProblem(112, 8192, 8192, 8192, *DSMEM_FORMS[0])))
    for dtype, m, zeros in product(("bf16", "fp16"), (1, *RESIDENT_TILE_M), (False, True)):
        problem = LinearProblem(m, 4096, 4096, 4096, integers(4, zero_points=zeros), dtype)
        configs |= dict.fromkeys(resident_configs(problem))
    long_rows = resident_configs(LinearProblem(1, 4096, 14336, 14336, integers(4), "bf16"))
    configs |= dict.fromkeys(config for config in long_rows if config.mainloop.loads)
    return list(configs)


def implementable(configs: Iterable[WgmmaConfig], most: int = MAX_STAGES) -> list[WgmmaConfig]:
    """Gives each configuration as many pipeline stages as fit, at most ``most``, and returns those that can be
    compiled."""
    found = (with_stages(config, most) for config in configs)
    return [config for config in found if config.can_implement() is None]
