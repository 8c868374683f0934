"""Tiles of few rows an expert that give the bits of all other tiles. Plain Python, no GPU.

A batch-invariant layer adds up each result in one chain of k16 steps, whatever its rows. With one token the tiles that
many rows want leave half of the SMs without work, and sorting and gathering are two launches of their own. So a work
tile here is 64 output features of one *entry*, one or two rows of an expert, among assignments as a router leaves
them: twice to eight times as many work tiles, and three launches for five.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cute_kernels.gemm.experts.ranges.config import LANE_ASSIGNMENTS, MOST_ASSIGNMENTS, WARP_THREADS
from cute_kernels.gemm.experts.schedule import GroupedProblem, usual_rows
from cute_kernels.gemm.schedule import weight_fields
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.regions import Barriers
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP, Reduction, StagedStore, WholeK
from layouts.weights.hopper import TILE_N

ENTRY_ROWS = (1, 2)  # of an expert that are multiplied together, at most; with four sorted tiles are the faster ones
ROW_COLUMNS = WGMMA_N_STEP  # of the MMAs, that a row takes
RINGS = 2  # of stages: one for each warpgroup, which has work tiles of its own
LONG_K = 4096  # from which on a k block is longer, as measured: what it costs besides its products is shared by more
LONG_BLOCK_K, BLOCK_K = (512, 256, 128), (256, 128)  # of which the first that divides K is taken
SMEM_RESERVE = 1024  # for alignment
WHOLE_FEATURES = 16  # of which rows are stored 16 bytes at a time, gate and up in turn as well


@dataclass(frozen=True)
class EntryWgmma(RegisterWgmma):
    """As `RegisterWgmma`, of two warpgroups that share nothing: each has work tiles and half of the stages.

    Attributes:
        lane_assignments: of a lane of the warps that find entries.
    """

    in_flight: int = 2
    lane_assignments: int = 1
    spare = 1  # a stage has one tile of weights
    registers: ClassVar[dict[int, int]] = {RINGS: 240}
    reductions: ClassVar[tuple[type[Reduction], ...]] = (WholeK,)
    multicasts: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    stores: ClassVar[tuple[type, ...]] = (StagedStore,)
    tile_m_sizes: ClassVar[tuple[int, ...]] = tuple(ROW_COLUMNS * rows for rows in ENTRY_ROWS)
    n_tiles_sizes: ClassVar[tuple[int, ...]] = (1,)
    block_k_sizes: ClassVar[tuple[int, ...]] = LONG_BLOCK_K

    @property
    def name(self) -> str:
        return f"{super().name}entries{self.lane_assignments}"

    def barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """A stage is one warpgroup's."""
        stages = config.num_stages
        return Barriers("full", stages, self.copies), Barriers("empty", stages, WARPGROUP_WARPS)

    def problem(self, config: WgmmaConfig) -> str | None:
        if config.num_stages % RINGS:
            return f"num_stages {config.num_stages} are not {RINGS} rings"
        if self.lane_assignments not in LANE_ASSIGNMENTS:
            return f"lane_assignments {self.lane_assignments!r} is not one of {LANE_ASSIGNMENTS}"
        return super().problem(config)


EntryConfig = WgmmaConfig[EntryWgmma]


def entry_rows(config: WgmmaConfig) -> int:
    """Rows that an entry may have."""
    return config.tile_m // ROW_COLUMNS


def ring_config(config: EntryConfig) -> WgmmaConfig[RegisterWgmma]:
    """What one warpgroup does, as a configuration of its own."""
    mainloop = RegisterWgmma(config.mainloop.group_steps, config.mainloop.in_flight)
    return replace(config, warpgroups=1, num_stages=config.num_stages // RINGS, mainloop=mainloop)


@dataclass(frozen=True)
class EntryTiles:
    """How a launch is laid out.

    Attributes:
        config: the compiled variant.
        num_tiles: tiles of 64 output features of an expert.
        k_blocks: of K.
        num_ctas: as many as there are SMs; those without a work tile end at once.
    """

    config: EntryConfig
    num_tiles: int
    k_blocks: int
    num_ctas: int


def entry_tiles(problem: GroupedProblem, tokens: int) -> EntryTiles | None:
    """The layout of a batch-invariant product of so many tokens' assignments as they are.

    None if there are too many of them, experts usually have more rows than an entry, or K or N are not whole.
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
    if config is None:
        return None
    return EntryTiles(config, -(-problem.n // TILE_N), problem.k // block_k, problem.num_sms)


def entry_config(problem: GroupedProblem, rows: int, block_k: int, lane_assignments: int) -> EntryConfig | None:
    """A configuration with as many stages as there is room for; None if it cannot be compiled."""
    config: EntryConfig = WgmmaConfig(
        **weight_fields(problem),
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
