"""The beginning of a CTA: one warp makes the barriers of shared memory, all others wait until they are there."""

from __future__ import annotations

import cutlass.cute as cute

from cute_kernels.mla.config import MULTIPLYING_THREADS, MlaConfig
from cute_kernels.sm90 import WARP_THREADS

# Named barriers: of the multiplying warps, and of the gathering ones with the warp that makes barriers. One of all
# threads would do, but those that wait would do so at two places of the program, and synccheck wants them at one.
MADE, MADE_FOR_GATHERING = 1, 8


def announce_barriers(config: MlaConfig) -> None:
    """Says that the barriers are there. The warp that made them, before it waits as all do."""
    if not config.crossover:  # pairs arrive at their cluster's barrier
        cute.arch.barrier_arrive(barrier_id=MADE_FOR_GATHERING, number_of_threads=_gathering_threads(config))


def await_barriers(config: MlaConfig, gathers: bool) -> None:
    """Waits until the barriers are there, in both CTAs of a pair. Every thread that uses them does so once; those that
    gather, behind their first loads. Warps of a kind do so at one place of the program."""
    cute.arch.sync_warp()
    if config.crossover:
        cute.arch.cluster_wait()
    elif gathers:
        cute.arch.barrier(barrier_id=MADE_FOR_GATHERING, number_of_threads=_gathering_threads(config))
    else:
        cute.arch.barrier(barrier_id=MADE, number_of_threads=MULTIPLYING_THREADS)


def _gathering_threads(config: MlaConfig) -> int:
    warps = 1 if config.boxes else config.gather_warps
    return (warps + 1) * WARP_THREADS
