"""Chooses the tile of a grouped product with many rows an expert. Plain Python, no GPU.

Only the device knows how many rows each expert has. So the host assumes that rows are distributed at random, and
compares tile sizes by the average number of tiles of an expert. Small tiles use the tensor cores badly. Large tiles
leave rows of each expert's last tile empty. `.costs` has the time of a tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.experts.ranges.config import LANE_ASSIGNMENTS, MOST_ASSIGNMENTS
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS, usual_rows
from cute_kernels.gemm.experts.wgmma.costs import TENSOR_WORK_TILE_CLOCKS, WORK_TILE_CLOCKS, cost_of, scaled_as_decoded
from cute_kernels.gemm.experts.wgmma.entry_config import (
    BLOCK_K,
    ENTRY_ROWS,
    LONG_BLOCK_K,
    RINGS,
    ROW_COLUMNS,
    EntryConfig,
    EntryWgmma,
)
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, groups_apart, whole_k
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, WgmmaConfig
from cute_kernels.gemm.wgmma.costs import MEMORY_BYTES_PER_CLOCK
from cute_kernels.gemm.wgmma.mainloops import MOST_LOOPS, Limbs, Mainloop, MmaSync, RegisterWgmma
from cute_kernels.gemm.wgmma.stages import of_format, scaling_sums, with_stages
from layouts.weights.hopper import TILE_N

ENTRY_BYTES = 8  # bytes of an expert in the table: work tiles before it, its first place
TABLE_WARPS = MAX_EXPERTS // (2 * WARP_THREADS)  # consumer warps that write the table, two experts a lane
# Offset of the warps' own numbers of work tiles, after the experts' entries.
SUMS = -(-(MAX_EXPERTS + 1) * ENTRY_BYTES // 16) * 16
TABLE_BYTES = SUMS + 4 * TABLE_WARPS  # the last entry has the number of all work tiles, and the end of the places
LIKELY = 0.05  # tiles of an expert: kinds of tiles that are rarer than this do not end a launch
LONG_K = 4096  # K from which on k blocks are longer, as measured: more products share what a k block costs besides
WHOLE_FEATURES = 16  # results in a row are a multiple of this where they are stored 16 bytes at a time, gated ones, too
SMEM_RESERVE = 1024  # bytes that aligning regions may take


class TileShape(NamedTuple):
    """A tile to choose from; its fields are the same as in `WgmmaConfig`."""

    tile_m: int
    n_tiles: int
    block_k: int
    row_parts: int
    mainloop: Mainloop = RegisterWgmma()


# An expert's last tile is half empty on average, so all have parts.
SHAPES = (
    TileShape(16, 2, 128, 2, mainloop=Limbs()),
    TileShape(32, 2, 128, 4, mainloop=Limbs()),
    TileShape(64, 2, 128, 4, mainloop=Limbs()),
    TileShape(256, 1, 64, 2),
    TileShape(224, 1, 64, 7),
    TileShape(192, 1, 64, 6),
    TileShape(160, 1, 128, 5),
    TileShape(128, 1, 128, 4),
    TileShape(64, 2, 128, 4),
    TileShape(48, 2, 128, 6),
    TileShape(32, 2, 128, 4),
    TileShape(16, 2, 128, 2),
    TileShape(16, 2, 128, 2, mainloop=MmaSync()),
)
# Of products in FP8, where a k block has one group, and several.
FP8_SHAPES = tuple(
    TileShape(tile_m, n_tiles, X_GROUP, parts, mainloop=Fp8Wgmma())
    for tile_m, n_tiles, parts in ((256, 1, 4), (128, 1, 4), (64, 2, 4), (32, 2, 4), (16, 2, 2))
)
SMALL_GROUP_FP8_SHAPES = tuple(
    TileShape(tile_m, n_tiles, X_GROUP, parts, mainloop=Fp8Wgmma())
    for tile_m, n_tiles, parts in ((64, 1, 4), (32, 2, 4), (16, 2, 2))
)


@dataclass(frozen=True)
class GroupedTiles:
    """The layout of a launch of grouped tiles.

    Attributes:
        config: the compiled variant.
        num_tiles: number of tiles of 64 output features for each expert.
        k_blocks: k blocks of the padded K.
        num_ctas: number of CTAs, one for each SM. CTAs without a work tile end at once.
    """

    config: WgmmaConfig
    num_tiles: int
    k_blocks: int
    num_ctas: int

    @property
    def sizes(self) -> dict[str, int]:
        """The launch arguments that the layout decides, by name."""
        return {name: getattr(self, name) for name in ("num_tiles", "k_blocks", "num_ctas")}

    @property
    def blocks(self) -> int:
        """Number of blocks of output features that an expert's weight has."""
        return -(-self.num_tiles // self.config.block_tiles)


@lru_cache(maxsize=4096)
def make_tiles(problem: GroupedProblem) -> GroupedTiles:
    """Returns the layout that is the fastest by the model."""
    return min(layouts(problem), key=lambda layout: estimate_clocks(problem, layout))


def layouts(problem: GroupedProblem) -> list[GroupedTiles]:
    """Returns the layouts of all possible tiles."""
    return layouts_of(problem, candidate_configs(problem))


def layouts_of(problem: GroupedProblem, configs: Iterable[WgmmaConfig]) -> list[GroupedTiles]:
    """Returns the layouts of given configurations."""
    num_tiles = -(-problem.n // TILE_N)
    return [GroupedTiles(config, num_tiles, problem.k_pad // config.block_k, problem.num_sms) for config in configs]


@lru_cache(maxsize=4096)
def make_fp8_tiles(problem: GroupedProblem) -> GroupedTiles:
    """Returns the layout for a product in FP8 that is the fastest by the model.

    Raises ValueError if no tile fits, as when K with padding is less than a k block.
    """
    shapes = SMALL_GROUP_FP8_SHAPES if groups_apart(problem.format) > 1 else FP8_SHAPES
    if problem.k_pad % X_GROUP:
        shapes = tuple(shape._replace(mainloop=Fp8Wgmma(half_last=True)) for shape in shapes)
    problem = replace(problem, k_pad=whole_k(problem.k_pad))
    configs = (config for shape in shapes if (config := tile_config(problem, shape)) is not None)
    return min(layouts_of(problem, configs), key=lambda layout: estimate_clocks(problem, layout))


def candidate_configs(problem: GroupedProblem) -> list[WgmmaConfig]:
    """Returns the possible configurations. Batch-invariant products have to add up each result in the same k16 steps of
    decoded weights. So their configurations have no limbs, and do not scale accumulators group by group.
    """
    shapes = (one for one in SHAPES if not problem.batch_invariant or isinstance(one.mainloop, RegisterWgmma))
    configs = (tile_config(problem, shape) for shape in shapes)
    return [config for config in configs if config is not None]


def tile_config(problem: GroupedProblem, shape: TileShape) -> WgmmaConfig | None:
    """Returns a tile's configuration, with as many stages as fit beside the table of tiles. Returns None if fewer than
    two stages fit."""
    if problem.k_pad % shape.block_k:
        shape = shape._replace(block_k=64)
    spare = SMEM_RESERVE + TABLE_BYTES
    config = with_stages(of_format(problem, **shape._asdict()), spare=spare)
    config = config if problem.batch_invariant else scaling_sums(config)
    if shape.row_parts > MOST_LOOPS and shape.n_tiles > 1 and not scaled_as_decoded(config):
        return None  # not measured
    fits = config.smem_bytes + spare <= config.limits.shared_bytes
    return config if fits and config.can_implement() is None else None


def usual_tiles(problem: GroupedProblem, tile_m: int, parts: int) -> list[float]:
    """Returns the average number of tiles of ``tile_m`` rows that an expert has, by how full they are. A tile has
    ``parts`` parts of rows; element i counts the tiles in which exactly i + 1 parts have rows.

    An expert's number of rows is taken as normally distributed, which is close to random routing.
    """
    mean = problem.places / problem.num_experts
    deviation = math.sqrt(max(mean * (1 - 1 / problem.num_experts), 1e-6))

    def with_more_than(rows: int) -> float:
        """Returns the share of the experts that have more than ``rows`` rows."""
        return 0.5 * math.erfc((rows + 0.5 - mean) / deviation / math.sqrt(2))

    starts = range(0, math.ceil((mean + 6 * deviation) / tile_m) * tile_m, tile_m)
    reached = [sum(with_more_than(start + part * tile_m // parts) for start in starts) for part in range(parts)]
    return [more - most for more, most in zip(reached, [*reached[1:], 0.0], strict=True)]


def work_tile_clocks(layout: GroupedTiles, tile_m: int, tiles: float) -> float:
    """Returns the clocks of a work tile. tile_m: number of rows that are multiplied. tiles: an expert's mean number of
    tiles of rows."""
    config = layout.config
    cost = cost_of(config.mainloop)
    # Tiles of an expert that run side by side read a weight from memory once.
    side_by_side = min(max(tiles, 1.0), M_TILE_BAND)
    memory = config.weight_stage_bytes * layout.num_ctas / MEMORY_BYTES_PER_CLOCK / side_by_side
    tensor = cost.tensor_clocks(config, tile_m)
    k_block = max(tensor, cost.decode_clocks(config, tile_m), memory * cost.memory_factor(config))
    # Of the tensor cores the other warpgroup makes use while one stores results.
    results = WORK_TILE_CLOCKS * config.warpgroups / 2 if k_block > tensor else TENSOR_WORK_TILE_CLOCKS
    return layout.k_blocks * k_block + results


def estimate_clocks(problem: GroupedProblem, layout: GroupedTiles) -> float:
    """Returns the clocks that the model expects for a launch, without the launch overhead."""
    config = layout.config
    counts = usual_tiles(problem, config.tile_m, config.row_parts)
    scheduler = [work_tile_clocks(layout, config.loop_m(part + 1), sum(counts)) for part in range(config.row_parts)]
    tiles = sum(counts)
    mean = sum(map(operator.mul, counts, scheduler)) / tiles
    # Every CTA has as many work tiles as another or one more, none fewer than one.
    rounds = math.ceil(round(problem.num_experts * layout.blocks * tiles) / layout.num_ctas)
    longest = max(
        work_tile for work_tile, count in zip(scheduler, counts, strict=True) if count >= min(LIKELY, max(counts))
    )
    return max(mean * rounds, longest)


# -- few rows among assignments as they are, batch-invariant -----------------------------------------------------------


def entry_tiles(problem: GroupedProblem, tokens: int) -> GroupedTiles | None:
    """Returns the layout of a batch-invariant product over the unsorted assignments of ``tokens`` tokens.

    Returns None if there are too many assignments, or if experts usually have more rows than an entry. Also returns
    None unless K is whole k blocks and N whole vectors.
    """
    usual = min(usual_rows(problem), tokens)  # a router gives no token an expert twice
    rows = next((count for count in ENTRY_ROWS if usual <= count), None)
    if rows is None or problem.places > MOST_ASSIGNMENTS:
        return None
    block_k = next((size for size in (BLOCK_K if problem.k < LONG_K else LONG_BLOCK_K) if problem.k % size == 0), None)
    if block_k is None or problem.k != problem.k_pad or problem.n % WHOLE_FEATURES:
        return None
    lanes = next(number for number in LANE_ASSIGNMENTS if problem.places <= number * WARP_THREADS)
    config = entry_config(problem, rows, block_k, lanes)
    return None if config is None else layouts_of(problem, [config])[0]


def entry_config(problem: GroupedProblem, rows: int, block_k: int, lane_assignments: int) -> EntryConfig | None:
    """Returns a configuration with as many stages as fit. Returns None if it cannot be compiled."""
    config: EntryConfig = of_format(
        problem,
        tile_m=ROW_COLUMNS * rows,
        n_tiles=1,
        warpgroups=RINGS,
        block_k=block_k,
        num_stages=RINGS,
        mainloop=EntryWgmma(lane_assignments=lane_assignments),
    )
    barriers = sum(group.count for group in config.mainloop.barriers(config)) // RINGS * 8
    room = config.limits.shared_bytes - SMEM_RESERVE - (config.smem_bytes - RINGS * config.stage_bytes)
    of_ring = room // RINGS // (config.stage_bytes + barriers)
    config = replace(config, num_stages=RINGS * of_ring)
    return config if of_ring > 1 and config.can_implement() is None else None
