"""The named barriers of a decode attention CTA: which of its warps wait for each other."""

import cutlass.cute as cute

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.device.cuda import WARP_THREADS

# Barrier 0 (`sync_threads`) is not used: all threads would have to arrive, even those of warps that have ended.
READY, CONSUMERS, PRODUCERS, MERGED = 1, 2, 3, 4
ROWS_WRITTEN = 10  # any free number would do, 5 too; another one would compile all steps in one launch anew


def announce_ready(config: DecodeConfig) -> None:
    """Tells consumer warps that the ring's barriers are initialised; does not wait. Each producer warp calls it."""
    cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=_ready_threads(config))


def await_ready(config: DecodeConfig) -> None:
    """Waits in a consumer warp until all producer warps have called `announce_ready`."""
    cute.arch.barrier(barrier_id=READY, number_of_threads=_ready_threads(config))


def _ready_threads(config: DecodeConfig) -> int:
    return config.num_threads + config.filling_warps * WARP_THREADS


def sync_merged(config: DecodeConfig) -> None:
    """Synchronises all warps after a unit's merged results are read, if the merge buffer overlaps the ring. Consumer
    warps call this function; producer warps call `await_merged`."""
    if not config.merge_offset:
        # Copies are about to overwrite what was stored and read.
        cute.arch.fence_proxy("async.shared", space="cta")
        await_merged(config)


def await_merged(config: DecodeConfig) -> None:
    """Waits in a producer warp until a unit's merged results are read: then the ring's memory is free for the CTA's
    next unit."""
    cute.arch.barrier(barrier_id=MERGED, number_of_threads=_ready_threads(config))


def sync_consumers(config: DecodeConfig) -> None:
    """Synchronises all consumer warps."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=config.num_threads)


def sync_cleared(config: DecodeConfig) -> None:
    """Synchronises all consumer warps after they have written zeros over rows of a stage."""
    # Copies may overwrite the stage when it is released.
    cute.arch.fence_proxy("async.shared", space="cta")
    sync_consumers(config)


def announce_rows(config: DecodeConfig) -> None:
    """Tells producer warps that the calling consumer warp has written its part of the newest token's rows; does not
    wait."""
    cute.arch.barrier_arrive(barrier_id=ROWS_WRITTEN, number_of_threads=_ready_threads(config))


def await_rows(config: DecodeConfig) -> None:
    """Waits in a producer warp until all consumer warps have called `announce_rows`."""
    cute.arch.barrier(barrier_id=ROWS_WRITTEN, number_of_threads=_ready_threads(config))


def sync_producers(config: DecodeConfig) -> None:
    """Synchronises all producer warps."""
    if config.filling_warps > 1:
        cute.arch.barrier(barrier_id=PRODUCERS, number_of_threads=config.filling_warps * WARP_THREADS)
