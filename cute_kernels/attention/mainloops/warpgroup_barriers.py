"""The named barriers of extend attention's consumer warpgroups: which of their warps wait for each other."""

import cutlass.cute as cute

from cute_kernels.attention.extend_policies import MMA_THREADS, WARPGROUP_WARPS
from cute_kernels.device.cuda import WARP_THREADS

FIRST_WARPGROUP = 1  # one of each warpgroup
FIRST_TURN = 3  # one of each warpgroup's turn
CONSUMERS = 5
WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS


def sync_warpgroup(group) -> None:
    """Synchronises the warps of a warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_WARPGROUP + group, number_of_threads=WARPGROUP_THREADS)


def sync_consumers() -> None:
    """Synchronises all consumer warps."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=MMA_THREADS)


def await_turn(group) -> None:
    """Waits until the other warpgroup has issued its MMAs."""
    cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=MMA_THREADS)


def pass_turn(group) -> None:
    """Passes the turn to the other warpgroup; does not wait. A warpgroup calls it after it has issued its MMAs."""
    cute.arch.barrier_arrive(barrier_id=FIRST_TURN + 1 - group, number_of_threads=MMA_THREADS)
