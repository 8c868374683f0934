"""Which configuration serves a product of many rows, and into how many items it is cut. Plain Python, no GPU.

Every CTA takes a tile in each round; the tiles of a last, incomplete round are cut along K. What an item takes is the
slowest of four: the tensor cores, decoding, the memory's rate for weights, that of L2 for all that a CTA reads. Small
tiles waste the tensor cores and L2, large ones the last round; see `efficiency`. The rates are an H200's, fitted to
measured times (tests/linear/measured.py, docs/design/weight_only_linear.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from cute_kernels.linear.schedule import Problem
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.sm90 import MAX_SHARED_BYTES

CLOCKS_PER_US = 1650.0
MEMORY_BYTES_PER_CLOCK = 4.6e6 / CLOCKS_PER_US
L2_BYTES_PER_CLOCK = 7.2e6 / CLOCKS_PER_US
DECODE_CLOCKS = {4: 39, 8: 46}  # per k16 step of a tile, however few tokens,
DECODE_TOKEN_CLOCKS = 0.15  # and for each of them
MMA_CLOCKS = 14  # per k16 step of a tile, beside those of its products
START_CLOCKS = 6000  # of the launch, and until the first MMAs
ITEM_CLOCKS = 2000  # that an item's results take, while nothing is multiplied
COMBINE_CLOCKS = 1500  # to exchange parts of K,
COMBINE_PART_CLOCKS = 30  # and for each of them and each sum of a thread
MAX_SPLITS = 16
MAX_STAGES = 8

# (tokens, m_tiles, warpgroups, unit_k, weight_warps). Not worth their while by measurement: 128 tokens of two tiles,
# two CTAs that share activations, one step at a time.
SHAPES = (
    (256, 1, 2, 64, 1),
    (128, 1, 2, 128, 2),
    (64, 1, 2, 128, 2),
    (64, 2, 2, 128, 2),
    (32, 2, 2, 128, 2),
    (16, 2, 2, 128, 2),
)


@dataclass(frozen=True)
class TileSchedule:
    """How one launch is laid out: tiles of the output, those of a last, incomplete round cut along K.

    Attributes:
        config: the compiled variant.
        num_tiles: tiles of 64 output features.
        token_tiles: tiles of rows of x.
        units: of the padded K.
        splits: parts of K of a tile that is cut, none of them empty.
        num_ctas: that run, a multiple of the cluster's size.
        whole: tiles that are not cut. Here and on the device the tiles of a cluster's CTAs count as one.
    """

    config: WgmmaConfig
    num_tiles: int
    token_tiles: int
    units: int
    splits: int
    num_ctas: int
    whole: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of output features, in whole clusters."""
        per_cluster = self.config.block_tiles * self.config.cluster
        return -(-self.num_tiles // per_cluster) * self.config.cluster

    @property
    def num_tiles_cut(self) -> int:
        return self.blocks // self.config.cluster * self.token_tiles - self.whole

    @property
    def num_items(self) -> int:
        """Tiles and parts of tiles, those of all CTAs of a cluster."""
        return (self.whole + self.num_tiles_cut * self.splits) * self.config.cluster

    @property
    def split_units(self) -> int:
        return -(-self.units // self.splits)

    @property
    def workspace_words(self) -> int:
        """fp32 words of partial sums."""
        parts = self.num_tiles_cut * self.config.cluster * (self.splits - 1)
        return parts * self.config.block_rows * self.config.tokens


def efficiency(items: int, ctas: int) -> float:
    """Share of the CTAs' time that equal items fill: the rest is the last wave's."""
    return items / (-(-items // ctas) * ctas)


@lru_cache(maxsize=4096)
def make_tile_schedule(problem: Problem) -> TileSchedule:
    """The fastest schedule by the model."""
    options = list(tile_schedules(problem))
    return min(options, key=lambda schedule: estimate_us(problem, schedule))


def tile_schedules(problem: Problem) -> Iterator[TileSchedule]:
    """Every shape of tiles, in every number of parts of K."""
    for config in candidate_configs(problem):
        for splits in range(1, (MAX_SPLITS if config.splits_k else 1) + 1):
            schedule = schedule_of(problem, config, splits)
            if schedule is not None:
                yield schedule


def schedule_of(problem: Problem, config: WgmmaConfig, splits: int = 1) -> TileSchedule | None:
    """The schedule of a given configuration; None if a part of K would be empty or nothing is left to be cut.

    Whole rounds of all CTAs are of whole tiles.
    """
    units = problem.k_pad // config.unit_k
    if -(-units // -(-units // splits)) != splits:
        return None
    clusters = problem.num_sms // config.cluster
    schedule = TileSchedule(config, problem.num_tiles, -(-problem.m // config.tokens), units, splits, 0)
    if splits > 1:
        schedule = replace(schedule, whole=schedule.num_tiles_cut // clusters * clusters)
        if not schedule.num_tiles_cut:
            return None
    return replace(schedule, num_ctas=min(clusters * config.cluster, schedule.num_items))


def estimate_us(problem: Problem, schedule: TileSchedule) -> float:
    """Microseconds that the model expects, without the launch itself."""
    config = schedule.config
    fragments = config.block_tiles * config.unit_steps  # of a unit
    tensor = fragments * (config.tokens / 2 + MMA_CLOCKS)
    decoding = fragments * (DECODE_CLOCKS[config.bits] + DECODE_TOKEN_CLOCKS * config.tokens)
    resident = schedule.num_ctas
    # Token tiles that run side by side read a weight from memory once.
    sharing = min(schedule.token_tiles, config.token_band)
    memory = config.weight_stage_bytes * resident / MEMORY_BYTES_PER_CLOCK / sharing
    read = config.weight_stage_bytes + config.x_stage_bytes / config.cluster
    unit = max(tensor, decoding, memory, read * resident / L2_BYTES_PER_CLOCK)
    clusters = schedule.num_ctas // config.cluster
    clocks = -(-schedule.whole // clusters) * (schedule.units * unit + ITEM_CLOCKS)
    part = schedule.split_units * unit + ITEM_CLOCKS
    if schedule.splits > 1:
        part += COMBINE_CLOCKS + COMBINE_PART_CLOCKS * config.thread_sums * (schedule.splits - 1)
    clocks += -(-schedule.num_tiles_cut * schedule.splits // clusters) * part
    return (START_CLOCKS + clocks) / CLOCKS_PER_US


def candidate_configs(problem: Problem) -> list[WgmmaConfig]:
    """Configurations worth considering."""
    configs = []
    for tokens, m_tiles, warpgroups, unit_k, weight_warps in SHAPES:
        config = WgmmaConfig(
            bits=problem.bits,
            dtype=problem.dtype,
            group_size=problem.group_size,
            zero_point=problem.zero_point,
            tokens=tokens,
            m_tiles=m_tiles,
            warpgroups=warpgroups,
            unit_k=unit_k if problem.k_pad % unit_k == 0 else 64,
            splits_k=True,
            weight_warps=weight_warps,
        )
        config = with_ring(config)
        # A tile half as large would do for the rows there are.
        if config.can_implement() is None and (tokens == SHAPES[-1][0] or problem.m > tokens // 2):
            configs.append(config)
    return configs


def shipped_configs() -> list[WgmmaConfig]:
    """Configurations that ship: every tile in the most common format, the smallest and the largest one in others."""
    configs: dict[WgmmaConfig, None] = {}
    formats = [("bf16", group_size) for group_size in (0, 32, 64, 128)] + [("fp16", 0), ("fp16", 128)]
    for bits, (dtype, group_size), zero_point in product((4, 8), formats, (False, True)):
        found = candidate_configs(Problem(8192, 8192, 8192, 8192, bits, dtype, group_size, zero_point))
        every = (dtype, group_size, zero_point) == ("bf16", 128, False)
        configs |= dict.fromkeys(found if every else (found[0], found[-1]))
    return list(configs)


def with_ring(config: WgmmaConfig, most: int = MAX_STAGES) -> WgmmaConfig:
    """``config`` with as many stages as there is room for."""
    config = replace(config, num_stages=2)
    # Rings are laid out in whole 128 bytes.
    room = (MAX_SHARED_BYTES - 1024 - config.smem_bytes) // (config.stage_bytes + 16)
    return replace(config, num_stages=min(most, 2 + max(room, 0)))
