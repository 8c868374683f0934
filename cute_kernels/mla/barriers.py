"""The first steps of a CTA: one warp initialises the barriers in shared memory, and all other warps wait for it."""

from __future__ import annotations

import cutlass.cute as cute

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.config import CONSUMER_THREADS, MlaConfig

# Named barriers: of the consumer warps, and of the producer warps with the warp that makes barriers. One of all
# threads would do, but those that wait would do so at two places of the program, and synccheck wants them at one.
CONSUMERS_READY, PRODUCERS_READY = 1, 8


def announce_barriers(config: MlaConfig) -> None:
    """Announces that the barriers are initialised. The warp that initialised them calls it, then waits as all other
    warps do.
    """
    if not config.crossover:  # pairs arrive at their cluster's barrier
        cute.arch.barrier_arrive(barrier_id=PRODUCERS_READY, number_of_threads=_producer_threads(config))


def await_barriers(config: MlaConfig, produces: bool) -> None:
    """Waits until the barriers are initialised, in both CTAs of a pair. Every thread that uses barriers calls it once;
    producers that gather call it after their first loads. All producer warps call it at the same point of the program,
    as do all consumer warps."""
    cute.arch.sync_warp()
    if config.crossover:
        cute.arch.cluster_wait()
    elif produces:
        cute.arch.barrier(barrier_id=PRODUCERS_READY, number_of_threads=_producer_threads(config))
    else:
        cute.arch.barrier(barrier_id=CONSUMERS_READY, number_of_threads=CONSUMER_THREADS)


def _producer_threads(config: MlaConfig) -> int:
    warps = 1 if config.tma_tiles else config.producer_warps
    return (warps + 1) * WARP_THREADS
