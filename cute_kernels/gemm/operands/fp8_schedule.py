"""Chooses the tiles of an FP8 product by a model of time: arithmetic, and one factor that was measured.

docs/design/fp8_gemm.md has its numbers. Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, groups_apart, whole_k, x_group
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, WgmmaConfig
from cute_kernels.gemm.wgmma.costs import CLOCKS_PER_US, MEMORY_BYTES_PER_CLOCK, START_CLOCKS
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.results import RowCuts, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import MAX_SPLITS, of_format, schedule_of
from cute_kernels.gemm.wgmma.stages import with_stages

# (rows of x, tiles of 64 features of a warpgroup, CTAs that multicast x), where a k block has one group, and several.
# With tiles of 256 rows the tensor cores wait least for decoding. Those of a last round are cut into halves: a thread
# has no registers for sums of parts of K.
SHAPES = ((256, 1, 2), (256, 1, 1), (128, 1, 2), (128, 1, 1), (64, 2, 1), (64, 1, 1), (32, 2, 1), (16, 2, 1))
SMALL_GROUP_SHAPES = ((64, 1, 2), (64, 1, 1), (32, 2, 1), (16, 2, 1))
CUT_TILE_M = 256
# Share of other instructions' issue slots that MMAs do not hide, fitted to the times of seven kernels at 8192^3.
SLOTS_SHARE = 0.93
K_BLOCK_SLOTS = 60  # issue slots of a warp for a tile's k block, without decoding and adding
L2_BYTES_PER_CLOCK = 40  # bytes that an SM receives in a clock
WORK_TILE_CLOCKS, PART_CLOCKS, PART_ACC_CLOCKS = 3100.0, 2100.0, 46.0  # as those of 16-bit products


def candidates(problem: LinearProblem) -> Iterator[TileSchedule]:
    """Yields every FP8 schedule that supports a problem. Batch-invariant products do not cut K, since the number of
    parts would depend on the number of rows.
    """
    mainloop = Fp8Wgmma(half_last=problem.k_pad % X_GROUP > 0)
    problem = replace(problem, k_pad=whole_k(problem.k_pad))
    several = groups_apart(problem.format) > 1
    for tile_m, n_tiles, multicast in SMALL_GROUP_SHAPES if several else SHAPES:
        cuts_rows = tile_m == CUT_TILE_M
        config = of_format(
            problem, tile_m=tile_m, n_tiles=n_tiles, block_k=X_GROUP, multicast=multicast, mainloop=mainloop,
            row_parts=2 if cuts_rows else 1, reduction=RowCuts() if cuts_rows else WorkspaceSplitK(),
        )  # fmt: skip
        config = with_stages(config)
        for splits in (2,) if cuts_rows else range(1, 2 if problem.batch_invariant else MAX_SPLITS + 1):
            found = schedule_of(problem, config, splits) if config.can_implement() is None else None
            if found is not None:
                yield found


@lru_cache(maxsize=4096)
def fp8_schedule(problem: LinearProblem) -> TileSchedule:
    """Returns the schedule that is expected to be the fastest.

    Raises ValueError: K, with padding, is less than a k block.
    """
    return min(candidates(problem), key=lambda schedule: expected_us(problem, schedule))


def issue_slots(config: WgmmaConfig, tile_m: int) -> float:
    """Returns the issue slots of an SM's warp scheduler that a k block takes, in a tile with ``tile_m`` rows."""
    adds = (groups_apart(config.format) + (x_group(config.format) > 0)) * tile_m / 2
    decoder = config.format.e4m3_decoder()
    return config.block_tiles * ((decoder.slots if decoder else 0) + adds) + config.warpgroups * K_BLOCK_SLOTS


def k_block_clocks(problem: LinearProblem, schedule: TileSchedule) -> float:
    """Returns the clocks of a k block of a CTA's tile. They are the longest of three times: of instructions, of loads
    from memory, and of loads from L2."""
    config = schedule.config
    tensor, slots = config.block_tiles * 2 * config.tile_m, issue_slots(config, config.tile_m)
    side_by_side = min(schedule.m_tiles, M_TILE_BAND)
    memory = config.weight_stage_bytes * schedule.num_ctas / MEMORY_BYTES_PER_CLOCK / side_by_side
    from_l2 = (config.weight_stage_bytes + config.x_stage_bytes / config.multicast) / L2_BYTES_PER_CLOCK
    return max(tensor + SLOTS_SHARE * slots, memory, from_l2)


def expected_us(problem: LinearProblem, schedule: TileSchedule) -> float:
    """Returns the expected microseconds of a schedule: rounds of whole tiles, then rounds of parts of the tiles that
    are cut.
    """
    config, resident = schedule.config, schedule.num_ctas // schedule.config.multicast
    k_block = k_block_clocks(problem, schedule)
    clocks = -(-schedule.whole // resident) * (schedule.k_blocks * k_block + WORK_TILE_CLOCKS)
    part = schedule.split_k_blocks * k_block + WORK_TILE_CLOCKS
    if schedule.splits > 1:
        part += PART_CLOCKS + PART_ACC_CLOCKS * config.thread_acc * (schedule.splits - 1) / 8
    clocks += -(-schedule.num_tiles_cut * schedule.splits // resident) * part
    return (START_CLOCKS + clocks) / CLOCKS_PER_US
