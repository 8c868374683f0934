"""Estimates how many rows experts have, since only the device knows the routing. Plain Python."""

from __future__ import annotations

import math

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.problem import GroupedProblem

EXPERTS_PER_LANE = 16  # of the warp that counts experts' rows
MAX_EXPERTS = EXPERTS_PER_LANE * WARP_THREADS


def usual_rows(problem: GroupedProblem) -> float:
    """Returns a number of rows that few experts exceed, if rows are distributed at random: the mean plus two standard
    deviations."""
    mean = problem.places / problem.num_experts
    return min(problem.places, mean + 2 * math.sqrt(mean))


def usual_entries(mean: float, capacity: int) -> float:
    """Returns the average number of an expert's entries, each of up to ``capacity`` rows. The number of rows is
    Poisson-distributed with ``mean``."""
    chance, total = math.exp(-mean), 0.0
    for rows in range(1, math.ceil(mean + 8 * math.sqrt(mean)) + 2):
        chance *= mean / rows
        total += chance * -(-rows // capacity)
    return total
