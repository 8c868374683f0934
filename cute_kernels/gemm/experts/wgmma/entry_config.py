"""The configuration of tiles for few rows an expert, in batch-invariant layers. Results have the same bits as with
tiles for many rows. Plain Python, no GPU.

A batch-invariant layer adds up each result in one chain of k16 steps, for any number of rows. For one token, the tiles
for many rows use only half of the SMs, and need two more launches to sort and gather rows. So a work tile here is 64
output features of one *entry*, which is one or two rows of an expert. Assignments are not sorted. There are two to
eight times as many work tiles as with tiles for many rows, and three launches instead of five.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.experts.arguments import ENTRIES
from cute_kernels.gemm.experts.ranges.config import LANE_ASSIGNMENTS
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.regions import Barriers
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP, Reduction, WholeK

ENTRY_ROWS = (1, 2)  # the most rows of an expert that are multiplied together; from four on sorted tiles are faster
ROW_COLUMNS = WGMMA_N_STEP  # columns of the MMAs that a row takes
RINGS = 2  # pipelines: one for each warpgroup, which has work tiles of its own
LONG_BLOCK_K, BLOCK_K = (512, 256, 128), (256, 128)  # the first that divides K is taken


@dataclass(frozen=True)
class EntryWgmma(RegisterWgmma):
    """The mainloop of `RegisterWgmma` in two independent warpgroups, each with its own work tiles and its own half of
    the stages.

    Attributes:
        lane_assignments: number of assignments that each lane reads when its warp searches for entries.
    """

    in_flight: int = 2
    lane_assignments: int = 1
    spare = 1  # a stage has one tile of weights
    registers: ClassVar[dict[int, int]] = {RINGS: 240}
    reductions: ClassVar[tuple[type[Reduction], ...]] = (WholeK,)
    multicasts: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    tile_m_sizes: ClassVar[tuple[int, ...]] = tuple(ROW_COLUMNS * rows for rows in ENTRY_ROWS)
    n_tiles_sizes: ClassVar[tuple[int, ...]] = (1,)
    block_k_sizes: ClassVar[tuple[int, ...]] = LONG_BLOCK_K

    def kernel(self) -> CompiledAs:
        return CompiledAs("cute_kernels.gemm.experts.wgmma.entry_kernel:EntryKernel", ENTRIES)

    @property
    def name(self) -> str:
        return f"{super().name}entries{self.lane_assignments}"

    def barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """Returns the barriers of both warpgroups' stages. Each stage belongs to one warpgroup."""
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
    """Returns how many rows an entry may have."""
    return config.tile_m // ROW_COLUMNS


def ring_config(config: EntryConfig) -> WgmmaConfig[RegisterWgmma]:
    """Returns the configuration of one of the kernel's two warpgroups, which has a ring of half of the stages."""
    mainloop = RegisterWgmma(config.mainloop.group_steps, config.mainloop.in_flight)
    return replace(config, warpgroups=1, num_stages=config.num_stages // RINGS, mainloop=mainloop)
