"""The named barriers of a decode attention CTA: which of its warps wait for each other."""

import cutlass.cute as cute

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.device.cuda import WARP_THREADS

# Barrier 0 is that of all threads, which no warp takes part in after the ring is ready.
READY, CONSUMERS, PRODUCERS = 1, 2, 3
ROWS_WRITTEN = 10


def announce_ready(config: DecodeConfig) -> None:
    """A producer warp arrives: the ring's barriers are initialised. It does not wait."""
    cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=_ready_threads(config))


def await_ready(config: DecodeConfig) -> None:
    """A consumer warp waits until all producer warps have arrived."""
    cute.arch.barrier(barrier_id=READY, number_of_threads=_ready_threads(config))


def _ready_threads(config: DecodeConfig) -> int:
    return config.num_threads + config.filling_warps * WARP_THREADS


def sync_consumers(config: DecodeConfig) -> None:
    """All consumer warps wait for each other."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=config.num_threads)


def announce_rows(config: DecodeConfig) -> None:
    """A consumer warp arrives: it has written its part of the newest token's rows. It does not wait."""
    cute.arch.barrier_arrive(barrier_id=ROWS_WRITTEN, number_of_threads=_ready_threads(config))


def await_rows(config: DecodeConfig) -> None:
    """A producer warp waits until all consumer warps have arrived."""
    cute.arch.barrier(barrier_id=ROWS_WRITTEN, number_of_threads=_ready_threads(config))


def sync_producers(config: DecodeConfig) -> None:
    """All producer warps wait for each other."""
    if config.filling_warps > 1:
        cute.arch.barrier(barrier_id=PRODUCERS, number_of_threads=config.filling_warps * WARP_THREADS)
