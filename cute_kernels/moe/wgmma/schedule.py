"""Which tile serves a grouped product of many rows an expert. Plain Python, no GPU.

How many rows each expert gets is known on the device only, so the host weighs tiles by how many of them an expert takes
on average if rows fall to experts at random: small tiles waste the tensor cores, large ones their last rows. The time
of a tile is that of `cute_kernels.linear.wgmma.schedule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from cute_kernels.linear.wgmma.config import TOKEN_BAND, WgmmaConfig
from cute_kernels.linear.wgmma.schedule import (
    DECODE_CLOCKS,
    DECODE_TOKEN_CLOCKS,
    ITEM_CLOCKS,
    MAX_STAGES,
    MEMORY_BYTES_PER_CLOCK,
    MMA_CLOCKS,
    UNIT_CLOCKS,
)
from cute_kernels.moe.schedule import CAPACITIES, MAX_EXPERTS, GroupedProblem, usual_rows
from cute_kernels.sm90 import MAX_SHARED_BYTES
from layouts.weights.hopper import TILE_N

ENTRY_BYTES = 8  # of an expert in the table: items before it, its first place
TABLE_BYTES = (MAX_EXPERTS + 1) * ENTRY_BYTES  # the last one's: all items, the end of the places
MANY_ROWS = CAPACITIES[1]  # of an expert: more than that are not bound by the memory
SMEM_RESERVE = 1024  # rings are laid out in whole 128 bytes

WIDE_TOKENS, WIDE_COST = 256, 1.08  # tiles of so many rows take that much longer than a dense product's, as measured

# (tokens, m_tiles, unit_k)
SHAPES = ((256, 1, 64), (128, 1, 128), (64, 1, 128), (64, 2, 128), (32, 2, 128), (16, 2, 128))


@dataclass(frozen=True)
class GroupedTiles:
    """How a launch is laid out.

    Attributes:
        config: the compiled variant.
        num_tiles: tiles of 64 output features of an expert.
        units: of the padded K.
        num_ctas: as many as there are SMs; those without an item end at once.
    """

    config: WgmmaConfig
    num_tiles: int
    units: int
    num_ctas: int

    @property
    def blocks(self) -> int:
        """Blocks of output features of an expert."""
        return -(-self.num_tiles // self.config.block_tiles)


def has_many_rows(problem: GroupedProblem) -> bool:
    """Whether experts usually have too many rows for the memory-bound kernel, `cute_kernels.moe.schedule`."""
    return usual_rows(problem) > MANY_ROWS


@lru_cache(maxsize=4096)
def make_tiles(problem: GroupedProblem) -> GroupedTiles:
    """The fastest layout by the model."""
    return min(layouts(problem), key=lambda layout: estimate_clocks(problem, layout))


def layouts(problem: GroupedProblem) -> list[GroupedTiles]:
    """All tiles there are."""
    num_tiles = -(-problem.n // TILE_N)
    configs = candidate_configs(problem)
    return [GroupedTiles(config, num_tiles, problem.k_pad // config.unit_k, problem.num_sms) for config in configs]


def candidate_configs(problem: GroupedProblem) -> list[WgmmaConfig]:
    """Configurations that are possible, with as many stages as there is room for beside the table of tiles."""
    configs = []
    for tokens, m_tiles, unit_k in SHAPES:
        config = WgmmaConfig(
            bits=problem.bits,
            dtype=problem.dtype,
            group_size=problem.group_size,
            zero_point=problem.zero_point,
            tokens=tokens,
            m_tiles=m_tiles,
            unit_k=unit_k if problem.k_pad % unit_k == 0 else 64,
            num_stages=2,
        )
        room = MAX_SHARED_BYTES - SMEM_RESERVE - TABLE_BYTES - config.smem_bytes
        config = replace(config, num_stages=min(MAX_STAGES, 2 + max(0, room // (config.stage_bytes + 16))))
        if config.can_implement() is None and room >= 0:
            configs.append(config)
    return configs


def usual_tiles(problem: GroupedProblem, tokens: int) -> tuple[float, float]:
    """Tiles of ``tokens`` rows that an expert takes, and how many of them have rows for one half only.

    Means over experts whose rows are normally distributed, as they nearly are if rows fall to experts at random.
    """
    mean = problem.places / problem.num_experts
    deviation = math.sqrt(max(mean * (1 - 1 / problem.num_experts), 1e-6))

    def with_more_than(rows: int) -> float:
        """Share of the experts."""
        return 0.5 * math.erfc((rows + 0.5 - mean) / deviation / math.sqrt(2))

    starts = range(0, math.ceil((mean + 6 * deviation) / tokens) * tokens, tokens)
    tiles = sum(with_more_than(start) for start in starts)
    return tiles, tiles - sum(with_more_than(start + tokens // 2) for start in starts)


def unit_clocks(layout: GroupedTiles, tokens: int, tiles: float) -> float:
    """Clocks of a unit of a tile of which ``tokens`` are computed, in an expert of so many tiles."""
    config = layout.config
    fragments = config.block_tiles * config.unit_steps
    tensor = fragments * (tokens / 2 + MMA_CLOCKS)
    decoding = UNIT_CLOCKS + fragments * (DECODE_CLOCKS[config.bits] + DECODE_TOKEN_CLOCKS * tokens)
    # Tiles of an expert that run side by side read a weight from memory once.
    shared = min(max(tiles, 1.0), TOKEN_BAND)
    memory = config.weight_stage_bytes * layout.num_ctas / MEMORY_BYTES_PER_CLOCK / shared
    return max(tensor, decoding, memory) * (WIDE_COST if config.tokens == WIDE_TOKENS else 1.0)


def estimate_clocks(problem: GroupedProblem, layout: GroupedTiles) -> float:
    """Clocks that the model expects, without the launch itself."""
    tokens = layout.config.tokens
    tiles, halves = usual_tiles(problem, tokens)
    whole, half = (layout.units * unit_clocks(layout, count, tiles) + ITEM_CLOCKS for count in (tokens, tokens // 2))
    all_clocks = problem.num_experts * layout.blocks * (halves * half + (tiles - halves) * whole)
    # What is left over at the end is half a round on average, and there is at least one item.
    longest = whole if tiles > halves else half
    return max(all_clocks / layout.num_ctas + longest / 2, longest)
