"""The numbers of rows that schedules assume experts to have, since only the device knows the routing. Plain Python."""

from __future__ import annotations

import math

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.problem import GroupedProblem

EXPERTS_PER_LANE = 16  # of the warp that counts experts' rows
MAX_EXPERTS = EXPERTS_PER_LANE * WARP_THREADS


def usual_rows(problem: GroupedProblem) -> float:
    """Returns the number of rows that few experts exceed, if rows are distributed at random: mean and two standard
    deviations."""
    mean = problem.places / problem.num_experts
    return min(problem.places, mean + 2 * math.sqrt(mean))


def usual_entries(mean: float, capacity: int) -> float:
    """Returns how many entries of up to ``capacity`` rows an expert takes on average; its rows are
    Poisson-distributed."""
    chance, total = math.exp(-mean), 0.0
    for rows in range(1, math.ceil(mean + 8 * math.sqrt(mean)) + 2):
        chance *= mean / rows
        total += chance * -(-rows // capacity)
    return total
