"""Which configuration of the portable kernel serves a product, and into how many work tiles it is cut. Plain Python, no
GPU.

The GPU may be any, so time is counted in k blocks of 64 inputs of a tile of 128 features, with what a work tile costs
beside its k blocks, and full rounds of the CTAs that run at a time are all that is aimed at. The constants are fitted
to times of an H200 (tests/facts/linear_portable.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.portable.config import TILE_M_SIZES, PortableConfig, portable_config
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync
from cute_kernels.gemm.wgmma.schedule import MAX_SPLITS, TileSchedule, schedule_of

RESIDENT = 3  # CTAs of an SM, by their registers
MAX_STAGES = 6
MOST_SHARED_BYTES = PortableMmaSync.limits.shared_bytes // 2  # so that also the smallest GPUs run two CTAs at a time
K_BLOCK_COST = {1: 0.75, 2: 1.0}  # of a k block, by the tiles of 64 features that share its activations,
ALONE = 0.4  # and which share of it is left where few CTAs run: the rest is what they take from each other
WORK_TILE_COST = 0.5  # until the first products, and of storing the results
PART_COST = 0.2  # of each part of K that is added to the last,
PART_ROW_COST = 0.5  # and of the tokens of a tile of 64 features by 64 tokens of it


@lru_cache(maxsize=4096)
def make_portable_schedule(problem: LinearProblem) -> TileSchedule:
    """The fastest schedule by the model; one work tile for each CTA."""
    return min(portable_schedules(problem), key=lambda schedule: estimate(problem, schedule))


def portable_schedules(problem: LinearProblem) -> Iterator[TileSchedule]:
    """Every configuration, in every number of parts of K; one if the product is to be batch-invariant.

    Accumulators run over K step by step whatever the tile's shape, as those of `cute_kernels.gemm.wgmma`.
    """
    at_a_time = replace(problem, num_sms=RESIDENT * problem.num_sms)
    for config in candidate_configs(problem):
        for splits in range(1, 2 if problem.batch_invariant else MAX_SPLITS + 1):
            schedule = schedule_of(at_a_time, config, splits)
            if schedule is not None:
                yield replace(schedule, num_ctas=schedule.num_work_tiles)


def estimate(problem: LinearProblem, schedule: TileSchedule) -> float:
    """What the model expects, in k blocks of a tile."""
    config, resident = schedule.config, RESIDENT * problem.num_sms
    k_block = K_BLOCK_COST[config.n_tiles]
    parts = schedule.num_tiles_cut * schedule.splits
    busy = 1.0 if schedule.whole else min(1.0, parts / resident)
    part = schedule.split_k_blocks * k_block * (ALONE + (1 - ALONE) * busy) + WORK_TILE_COST
    each = PART_COST + PART_ROW_COST * config.n_tiles * config.tile_m / TILE_M_SIZES[-1]
    part += each * (schedule.splits - 1)
    whole = -(-schedule.whole // resident) * (schedule.k_blocks * k_block + WORK_TILE_COST)
    return whole + -(-parts // resident) * part


def candidate_configs(problem: LinearProblem) -> list[PortableConfig]:
    """Tiles of as many tokens as there are rows, or the most, by one and by two tiles of features."""
    tile_m = next((tile_m for tile_m in TILE_M_SIZES if problem.m <= tile_m), TILE_M_SIZES[-1])
    return [config_of(problem, tile_m, n_tiles) for n_tiles in (2, 1)]


def config_of(problem: LinearProblem, tile_m: int, n_tiles: int) -> PortableConfig:
    config = portable_config(problem.format, problem.dtype, tile_m, n_tiles)
    return replace(config, num_stages=max(2, min(MAX_STAGES, MOST_SHARED_BYTES // config.stage_bytes)))


def example_configs() -> list[PortableConfig]:
    """What the gates compile for every architecture: each way of decoding, of scaling, each number of tokens."""
    formats = [
        (integers(4), "bf16", 64),
        (integers(4, 32, True), "fp16", 16),
        (integers(8, 64, True), "bf16", 32),
        (integers(8, None), "fp16", 16),
    ]
    return [
        config_of(LinearProblem(tile_m, 8192, 8192, 8192, form, dtype), tile_m, 2) for form, dtype, tile_m in formats
    ]
