"""Which configuration serves a product of many rows, and into how many work tiles it is cut. Plain Python, no GPU.

Every CTA takes a tile in each round; the tiles of a last, incomplete round are cut along K or along rows of x. What an
work tile takes is the slowest of four: the tensor cores, decoding, the memory's rate for weights, the filling in of
rows that x does not have. Small tiles waste decoding, large ones the last round; see `efficiency`. The rates are an
H200's, fitted to measured times (tests/facts/linear.json, docs/design/weight_only_linear.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from cute_kernels.linear.schedule import Problem, weight_fields
from cute_kernels.linear.wgmma.config import M_TILE_BAND, WgmmaConfig
from cute_kernels.linear.wgmma.policies import (
    CHUNK_M,
    LIMB_GROUP,
    TMA_TILE_K,
    Dsmem,
    Limbs,
    RegisterWgmma,
    ResidentLimbs,
    RowCuts,
    RowExchange,
    StagedStore,
    TmaStore,
    WholeK,
    WorkspaceSplitK,
    dsmem,
)
from cute_kernels.linear.wgmma.resident_config import RESIDENT_TILE_M
from cute_kernels.linear.wgmma.resident_schedule import (
    resident_configs,
    resident_k_block_clocks,
    resident_start_clocks,
)
from cute_kernels.linear.wgmma.stages import MAX_STAGES, with_stages
from cute_kernels.weight_formats import integers

CLOCKS_PER_US = 1650.0
MEMORY_BYTES_PER_CLOCK = 4.6e6 / CLOCKS_PER_US
SM_BYTES_PER_CLOCK = 26  # that an SM takes in at most
DECODE_CLOCKS = {4: 29.5, 8: 32}  # per k16 step of a tile, however few tokens,
DECODE_ROW_CLOCKS = 0.1  # and for each of them,
K_BLOCK_CLOCKS = 90  # and for each k block
# Of a k block's time: what a warpgroup waits whose products no other one's decoding hides; what is gained, of codes
# that are scaled as they are decoded, where two groups of MMAs run while the next one is decoded.
ALONE_COST, IN_FLIGHT_GAIN = 1.1, 0.05
MMA_CLOCKS = 14  # per k16 step of a tile, beside those of its products
# The same three where codes are scaled as they are decoded.
SCALED_CLOCKS, SCALED_ROW_CLOCKS, SCALED_MMA_CLOCKS = 20, 0.25, 10
K_WARPGROUP_CLOCKS, K_WARPGROUP_ROW_CLOCKS = (
    30.5,
    0.2,
)  # and where they are not, of 4 bits by warpgroups that take turns
ROW_SCALE_CLOCKS = -5  # for these, where a scale is a whole row's and meets the accumulators
# What zero points take besides, where codes are scaled as they are decoded and where not, and groups less than a k
# block.
SCALED_ZERO_CLOCKS, ZERO_CLOCKS, SMALL_GROUP_CLOCKS = 6.5, 1, 3.5
FILL_CLOCKS = 11  # for each row of a TMA tile of activations that x does not have: TMA writes zeros,
DSMEM_FILL_CLOCKS = 8.5  # and of the small TMA tiles of tiles whose parts are reduced in the cluster
START_CLOCKS = 7300  # of the launch, and until the first MMAs
WORK_TILE_CLOCKS = 3100  # that a work tile's results take, while nothing is multiplied
BULK_START_CLOCKS, BULK_WORK_TILE_CLOCKS = (
    1100,
    2200,
)  # where TMA stores: beyond the start, and instead of the work tile's
COMBINE_CLOCKS = 2100  # to exchange parts of K,
COMBINE_PART_CLOCKS = 46  # and for each of them and each sum of a thread
JOIN_CLOCKS = 2800  # of a cluster's parts: to meet,
JOIN_ACC_CLOCKS = 40  # and for each sum that a thread reads from the others
DSMEM_CLOCKS = 1500  # the same of parts that are reduced in the cluster
# Where x comes in limbs decoding is little, and what there is left to do for each row are its limbs' columns and the
# scales of its accumulators: per k16 step of a tile, tensor cores included, and for each k block.
LIMB_CLOCKS, LIMB_ROW_CLOCKS, LIMB_K_BLOCK_CLOCKS = 10.8, 0.566, 110
LIMB_ROW_SHARE = 0.1  # of a row's bytes that take as long as the memory's
LIMB_START_CLOCKS = 5200  # of the launch that makes limbs, and of the way out of the last work tile, while no other is
LIMB_COMBINE_CLOCKS, LIMB_COMBINE_PART_CLOCKS = 1300, 55  # as `COMBINE_CLOCKS`
MAX_SPLITS = 16
SHORT_CHUNK = 32  # rows of x stored at a time where the stage that this makes room for counts

# (tokens, m_tiles, warpgroups, unit_k, cluster) of what was the fastest somewhere; the first and the last ship in more
# formats.
SHAPES = (
    (256, 1, 2, 64, 1),
    (256, 1, 2, 64, 2),
    (128, 1, 2, 128, 1),
    (128, 1, 2, 128, 2),
    (64, 1, 2, 128, 1),
    (64, 1, 2, 128, 2),
    (32, 1, 2, 128, 1),
    (32, 1, 2, 128, 2),
    (32, 2, 2, 128, 1),
    (32, 2, 3, 128, 1),
    (16, 1, 2, 128, 1),
    (16, 2, 3, 128, 1),
    (16, 2, 2, 128, 1),
)
# The same for the numbers of rows in between: those that a tile lacks cost as much as others and more, see FILL_CLOCKS,
# and whole rounds of all CTAs want tiles of many sizes.
BETWEEN_SHAPES = (
    (240, 1, 2, 64, 1),
    (224, 1, 2, 64, 1),
    (208, 1, 2, 64, 1),
    (192, 1, 2, 64, 1),
    (176, 1, 2, 64, 1),
    (160, 1, 2, 64, 1),
    (144, 1, 2, 128, 1),
    (112, 1, 2, 128, 1),
    (96, 1, 2, 128, 1),
    (80, 1, 2, 128, 1),
    (48, 1, 2, 128, 1),
    (144, 1, 1, 128, 1),
    (80, 1, 1, 128, 1),
)
LARGE_TILE_M = 256  # of tiles whose results may leave by TMA, and whose last round may be cut along rows of x
ROW_CUTS = 2
# Those of CTAs that share activations by TMA multicast: less is read from L2, which counts under the power limit.
MULTICAST = 2
MULTICAST_GAIN = 0.02  # of a k block's time, in a launch between others; 0.05 in launches of the same kind
MULTICAST_CLOCKS = 3000  # of the cluster, to meet before its first copy and after its last
# The same with x in limbs: (tokens, row_parts, m_tiles, cluster) of two warpgroups, for up to so many rows. Loops for
# fewer rows than a tile's would lie between what is run, and code comes from memory.
MOST_LIMB_ROWS = 24
LIMB_SHAPES = (
    (8, 1, 1, 1),
    (8, 1, 2, 1),
    (16, 1, 1, 1),
    (16, 1, 1, 2),
    (16, 1, 2, 1),
    (32, 4, 1, 2),
    (32, 4, 2, 1),
)
# Stages at most, by m_tiles; where x is limbs of a launch before, it would wait behind more weights.
TILE_STAGES, LIMB_STAGES = {1: MAX_STAGES, 2: MAX_STAGES}, {1: 8, 2: 6}


class DsmemShape(NamedTuple):
    """A tile with a DSMEM reduction in a cluster of two, and how many warpgroups interleave its k blocks.

    k_warpgroups: of codes without zero points in groups of whole k blocks; zero_k_warpgroups: of those with zero
    points, of which more is to be decoded; group_k_warpgroups: of the others, in groups of less than a k block.
    """

    tile_m: int
    row_parts: int
    n_tiles: int
    k_warpgroups: int
    zero_k_warpgroups: int
    group_k_warpgroups: int


# By the bits of a code: what was the fastest somewhere.
DSMEM_SHAPES = {
    4: (
        DsmemShape(64, 4, 1, 2, 2, 2),
        DsmemShape(32, 1, 1, 2, 2, 2),
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
# Formats, and dtypes of activations, in which all of them ship.
DSMEM_FORMS = (
    (integers(4), "bf16"),
    (integers(4, zero_points=True), "bf16"),
    (integers(4), "fp16"),
    (integers(4, zero_points=True), "fp16"),
    (integers(8), "bf16"),
    (integers(8), "fp16"),
)
DSMEM_BLOCK_K, DSMEM_CLUSTER, DSMEM_STAGES = 128, 2, 12
# Where K may not be cut as the rows would like it, few rows of a small layer keep more SMs busy with less for each.
NARROW_SHAPES = ((64, 1, 1, 128, 1), (16, 1, 1, 128, 1))


@dataclass(frozen=True)
class TileSchedule:
    """How one launch is laid out: tiles of the output, those of a last, incomplete round cut along K or rows of x.

    Attributes:
        config: the compiled variant.
        num_tiles: tiles of 64 output features.
        m_tiles: tiles of rows of x.
        k_blocks: of the padded K.
        splits: parts of a tile that is cut, of K, none of them empty, or of its rows of x.
        num_ctas: that run.
        whole: tiles that are not cut.
    """

    config: WgmmaConfig
    num_tiles: int
    m_tiles: int
    k_blocks: int
    splits: int
    num_ctas: int
    whole: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of output features; those of CTAs that share activations by TMA multicast count as one."""
        return -(-self.num_tiles // (self.config.block_tiles * self.config.multicast))

    @property
    def num_tiles_cut(self) -> int:
        return self.blocks * self.m_tiles - self.whole

    @property
    def num_work_tiles(self) -> int:
        """Tiles and parts of tiles."""
        return self.whole + self.num_tiles_cut * self.splits

    @property
    def split_k_blocks(self) -> int:
        return -(-self.k_blocks // self.splits)

    @property
    def workspace_words(self) -> int:
        """fp32 words of partial accumulators."""
        if self.config.cluster > 1 or self.config.reduction.cuts_rows:
            return 0  # they meet in shared memory, or nowhere
        cut = self.num_tiles_cut * self.config.multicast
        return cut * (self.splits - 1) * self.config.block_rows * self.config.tile_m


def efficiency(scheduler: int, ctas: int) -> float:
    """Share of the CTAs' time that equal work tiles fill: the rest is the last wave's."""
    return scheduler / (-(-scheduler // ctas) * ctas)


@lru_cache(maxsize=4096)
def make_tile_schedule(problem: Problem) -> TileSchedule:
    """The fastest schedule by the model."""
    options = list(tile_schedules(problem))
    return min(options, key=lambda schedule: estimate_us(problem, schedule))


def tile_schedules(problem: Problem) -> Iterator[TileSchedule]:
    """Every shape of tiles, in every number of parts of K. Those of batch-invariant products are in `.invariant`."""
    for config in candidate_configs(problem):
        for splits in range(1, MAX_SPLITS + 1):
            schedule = schedule_of(problem, config, splits)
            if schedule is not None:
                yield schedule


def schedule_of(problem: Problem, config: WgmmaConfig, splits: int = 1) -> TileSchedule | None:
    """The schedule of a given configuration; None if a part of K would be empty or nothing is left to be cut.

    Whole rounds of all CTAs are of whole tiles. CTAs that share activations by TMA multicast have a work tile together.
    """
    k_blocks = problem.k_pad // config.block_k
    if splits != config.row_parts if config.reduction.cuts_rows else -(-k_blocks // -(-k_blocks // splits)) != splits:
        return None
    if config.cluster > 1:
        return cluster_schedule_of(problem, config, k_blocks) if splits == config.cluster else None
    if splits > 1 and not (config.reduction.splits_k or config.reduction.cuts_rows):
        return None
    teams = problem.num_sms // config.multicast
    schedule = TileSchedule(config, problem.num_tiles, -(-problem.m // config.tile_m), k_blocks, splits, 0)
    if splits > 1:
        schedule = replace(schedule, whole=schedule.num_tiles_cut // teams * teams)
        # Of fewer rows than those of a round smaller tiles have k blocks of more inputs.
        if not schedule.num_tiles_cut or (config.reduction.cuts_rows and not schedule.whole):
            return None
    return replace(schedule, num_ctas=min(teams, schedule.num_work_tiles) * config.multicast)


def cluster_schedule_of(problem: Problem, config: WgmmaConfig, k_blocks: int) -> TileSchedule | None:
    """A cluster for each tile; None if they do not all run at once, or rows of x that are reduced in the cluster are
    not one tile."""
    schedule = TileSchedule(config, problem.num_tiles, -(-problem.m // config.tile_m), k_blocks, config.cluster, 0)
    if config.dsmem_reduction and schedule.m_tiles > 1:
        return None
    return replace(schedule, num_ctas=schedule.num_work_tiles) if schedule.num_work_tiles <= problem.num_sms else None


def estimate_us(problem: Problem, schedule: TileSchedule) -> float:
    """Microseconds that the model expects, without the launch itself."""
    config, resident = schedule.config, schedule.num_ctas // schedule.config.multicast
    k_block = k_block_clocks(problem, schedule)
    if config.limbs:
        start = LIMB_START_CLOCKS
        if isinstance(config.mainloop, ResidentLimbs):
            start = resident_start_clocks(problem, config, schedule.split_k_blocks, schedule.k_blocks)
        return (START_CLOCKS + start + limb_clocks(schedule, k_block)) / CLOCKS_PER_US
    work_tile = BULK_WORK_TILE_CLOCKS if config.store.by_tma else WORK_TILE_CLOCKS
    clocks = -(-schedule.whole // resident) * (schedule.k_blocks * k_block + work_tile)
    part = schedule.split_k_blocks * k_block + (work_tile if config.dsmem_reduction else work_tile / config.cluster)
    if config.reduction.cuts_rows:
        part = schedule.k_blocks * k_block_clocks(problem, in_small_tiles(schedule)) + work_tile / config.row_parts
    if config.dsmem_reduction:
        part += DSMEM_CLOCKS
    elif config.cluster > 1:
        others = config.cluster - 1
        part += JOIN_CLOCKS + JOIN_ACC_CLOCKS * others * config.own_m / 2
    elif schedule.splits > 1 and not config.reduction.cuts_rows:
        part += COMBINE_CLOCKS + COMBINE_PART_CLOCKS * config.thread_acc * (schedule.splits - 1)
    clocks += -(-schedule.num_tiles_cut * schedule.splits // resident) * part
    clocks += MULTICAST_CLOCKS if config.multicast > 1 else 0
    clocks += BULK_START_CLOCKS if config.store.by_tma else 0
    return (START_CLOCKS + clocks) / CLOCKS_PER_US


def limb_clocks(schedule: TileSchedule, k_block: float) -> float:
    """Clocks of a launch whose x comes in limbs, beyond the start: a work tile's results take none while the next one's
    weights are on their way."""
    config, resident = schedule.config, schedule.num_ctas
    clocks = -(-schedule.whole // resident) * schedule.k_blocks * k_block
    part = schedule.split_k_blocks * k_block  # parts that are reduced in the cluster take no longer than a way out
    if schedule.splits > 1 and not config.dsmem_reduction:
        part += LIMB_COMBINE_CLOCKS + LIMB_COMBINE_PART_CLOCKS * config.thread_acc * (schedule.splits - 1)
    return clocks + -(-schedule.num_tiles_cut * schedule.splits // resident) * part


def in_small_tiles(schedule: TileSchedule) -> TileSchedule:
    """The schedule with its tiles' parts of rows for tiles."""
    config = schedule.config
    small = replace(config, tile_m=config.part_m, row_parts=1, reduction=WholeK())
    return replace(schedule, config=small, m_tiles=schedule.m_tiles * config.row_parts)


def k_block_clocks(problem: Problem, schedule: TileSchedule) -> float:
    """Clocks of a k block of a CTA's tile, the mean over token tiles."""
    config = schedule.config
    fragments = config.block_tiles * config.k_block_steps
    if config.limbs:
        rate = min(MEMORY_BYTES_PER_CLOCK / schedule.num_ctas, SM_BYTES_PER_CLOCK)
        if isinstance(config.mainloop, ResidentLimbs):
            return resident_k_block_clocks(config, rate)
        tile_m = min(-(-problem.m // config.part_m) * config.part_m, config.tile_m)
        decoding = LIMB_K_BLOCK_CLOCKS + fragments * (LIMB_CLOCKS + LIMB_ROW_CLOCKS * tile_m)
        stage_bytes = config.weight_stage_bytes + LIMB_ROW_SHARE * tile_m * config.x_stage_bytes / config.tile_m
        return max(decoding, stage_bytes / rate)
    mma = SCALED_MMA_CLOCKS if config.scales_codes else MMA_CLOCKS
    decode, decode_token = decode_clocks(config)
    tile_m = config.tile_m
    if config.dsmem_reduction:
        tile_m = config.loop_m(-(-problem.m // config.part_m))
    tensor = fragments * (tile_m / 2 + mma) * (1 - MULTICAST_GAIN * (config.multicast > 1))
    decoding = fragments * (decode + decode_token * tile_m)
    if config.k_warpgroups == 1:
        decoding += K_BLOCK_CLOCKS  # of which the other turn's products hide all
    # Token tiles that run side by side read a weight from memory once.
    multicast = min(schedule.m_tiles, M_TILE_BAND)
    memory = config.weight_stage_bytes * schedule.num_ctas / MEMORY_BYTES_PER_CLOCK / multicast
    k_block = max(tensor, decoding, memory)
    if config.warpgroups == 1:
        k_block *= ALONE_COST
    elif isinstance(config.mainloop, RegisterWgmma) and config.mainloop.in_flight > 1 and config.scales_codes:
        k_block *= 1 - IN_FLIGHT_GAIN
    missing = tile_m * schedule.m_tiles - problem.m  # rows of the last token tile
    filling = missing * (DSMEM_FILL_CLOCKS if config.dsmem_reduction else FILL_CLOCKS) * (config.block_k // TMA_TILE_K)
    return k_block + max(filling - k_block, 0) / schedule.m_tiles


def decode_clocks(config: WgmmaConfig) -> tuple[float, float]:
    """Clocks that decoding takes for each k16 step of a tile: however few tokens there are, and for each of them."""
    decode, token = DECODE_CLOCKS[config.format.bits], DECODE_ROW_CLOCKS
    if config.scales_codes:
        decode, token = SCALED_CLOCKS, SCALED_ROW_CLOCKS
    elif config.k_warpgroups > 1 and config.format.bits == 4:
        decode, token = K_WARPGROUP_CLOCKS + (0 if config.group_size else ROW_SCALE_CLOCKS), K_WARPGROUP_ROW_CLOCKS
    if config.format.has_zeros:
        decode += SCALED_ZERO_CLOCKS if config.scales_codes else ZERO_CLOCKS
    if config.k_block_groups > 1:
        decode += SMALL_GROUP_CLOCKS
    return decode * config.format.decode_cost, token


def candidate_configs(problem: Problem) -> list[WgmmaConfig]:
    """Configurations worth considering."""
    shapes = SHAPES + BETWEEN_SHAPES
    return tile_configs(problem, shapes) + dsmem_configs(problem) + limb_configs(problem) + resident_configs(problem)


def tile_configs(problem: Problem, shapes: Iterable[tuple[int, int, int, int, int]]) -> list[WgmmaConfig]:
    """Those tiles of some shapes, as `SHAPES` has them, that are possible and not too large."""
    configs, short = [], SHORT_CHUNK
    for tile_m, n_tiles, warpgroups, block_k, cluster in shapes:
        config = of_format(
            problem,
            tile_m=tile_m,
            n_tiles=n_tiles,
            warpgroups=warpgroups,
            block_k=block_k if problem.k_pad % block_k == 0 else 64,
            mainloop=RegisterWgmma(in_flight=groups_in_flight(problem, tile_m, block_k) if cluster == 1 else 1),
            reduction=WorkspaceSplitK() if cluster == 1 else RowExchange(cluster),
            store=StagedStore(short if tile_m == 128 and (problem.format.bits == 8 or cluster > 1) else CHUNK_M),
        )
        config = with_stages(config)
        # A tile half as large would do for the rows there are.
        if config.can_implement() is None and (tile_m == SHAPES[-1][0] or problem.m > tile_m // 2):
            configs.append(config)
            if tile_m == LARGE_TILE_M and cluster == 1:
                configs += large_configs(config)
    return configs


def large_configs(config: WgmmaConfig) -> list[WgmmaConfig]:
    """Large tiles that TMA stores: alone, of CTAs that share activations by TMA multicast, and with a last round cut
    along rows of x."""
    stored = replace(config, store=TmaStore())
    in_rows = replace(stored, reduction=RowCuts(), row_parts=ROW_CUTS)
    return [with_stages(one) for one in (stored, replace(stored, multicast=MULTICAST), in_rows)]


def dsmem_configs(problem: Problem) -> list[WgmmaConfig]:
    """Configurations whose CTAs reduce parts of K in the cluster (DSMEM)."""
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
            reduction=dsmem(DSMEM_CLUSTER, k_warpgroups_of(problem, shape)),
        )
        for shape in DSMEM_SHAPES[problem.format.bits]
        if shape.tile_m >= problem.m and (shape.tile_m == SHAPES[-1][0] or problem.m > shape.tile_m // 2)
    )
    return implementable(configs, {1: DSMEM_STAGES, 2: DSMEM_STAGES})


def k_warpgroups_of(problem: Problem, shape: DsmemShape) -> int:
    """How many warpgroups take k blocks of such a tile in turn."""
    if problem.format.has_zeros:
        return shape.zero_k_warpgroups
    return shape.group_k_warpgroups if 0 < problem.format.group_size < DSMEM_BLOCK_K else shape.k_warpgroups


def groups_in_flight(problem: Problem, tile_m: int, block_k: int) -> int:
    """How many groups of MMAs of a tile without a cluster run while the next one is decoded, as measured."""
    if not 64 <= tile_m <= 128 or problem.k_pad % block_k:
        return 1
    return 1 if tile_m > 64 and (problem.format.bits, problem.dtype) == (8, "bf16") else 2


def limb_configs(problem: Problem) -> list[WgmmaConfig]:
    """Configurations of x in limbs, of few rows."""
    if problem.m > MOST_LIMB_ROWS:
        return []
    configs = (
        of_format(
            problem,
            tile_m=tile_m,
            row_parts=row_parts,
            n_tiles=n_tiles,
            block_k=LIMB_GROUP,
            mainloop=Limbs(ahead=True),
            reduction=Dsmem(cluster) if cluster > 1 else WorkspaceSplitK(),
        )
        for tile_m, row_parts, n_tiles, cluster in LIMB_SHAPES
        if tile_m >= problem.m and (tile_m == LIMB_SHAPES[0][0] or problem.m > tile_m // 2)
    )
    return implementable(configs, LIMB_STAGES)


def shipped_configs() -> list[WgmmaConfig]:
    """Configurations that ship: every tile in the most common formats, those of batch-invariant products among them,
    one for few and one for many rows in others.

    8-bit codes come without zero points, limbs with groups of 128.
    """
    configs: dict[WgmmaConfig, None] = {}
    formats = [("bf16", group_size) for group_size in (0, 32, 64, 128)] + [("fp16", 0), ("fp16", 128)]
    codes = ((4, False), (4, True), (8, False))
    for (bits, zero_point), (dtype, group_size) in product(codes, formats):
        problem = Problem(8192, 8192, 8192, 8192, integers(bits, group_size, zero_point), dtype)
        found = tile_configs(problem, SHAPES)
        if (dtype, group_size, zero_point) == ("bf16", 128, False):
            configs |= dict.fromkeys([*found, *tile_configs(problem, BETWEEN_SHAPES + NARROW_SHAPES)])
        else:
            configs |= dict.fromkeys((found[0], found[-1]))
    for form in DSMEM_FORMS:
        for shape in DSMEM_SHAPES[form[0].bits]:
            configs |= dict.fromkeys(dsmem_configs(Problem(shape.tile_m, 8192, 8192, 8192, *form)))
    for dtype, m in product(("bf16", "fp16"), (1, *RESIDENT_TILE_M)):
        configs |= dict.fromkeys(resident_configs(Problem(m, 4096, 4096, 4096, integers(4), dtype)))
    for dtype, (tile_m, *_) in product(("bf16", "fp16"), LIMB_SHAPES):
        problem = Problem(min(tile_m, MOST_LIMB_ROWS), 8192, 8192, 8192, integers(4), dtype)
        configs |= dict.fromkeys(limb_configs(problem))
    return list(configs)


def of_format(problem: Problem, **choices: Any) -> WgmmaConfig:
    """A configuration for a problem's weights."""
    return WgmmaConfig(**weight_fields(problem), **choices)


def implementable(configs: Iterable[WgmmaConfig], most: Mapping[int, int] = TILE_STAGES) -> list[WgmmaConfig]:
    """Those that there is room for, with their pipelines; most: stages by m_tiles."""
    found = (with_stages(config, most[config.n_tiles]) for config in configs)
    return [config for config in found if config.can_implement() is None]
