"""Chooses the kernels of products before and after a deferred norm, and which of them ship. Plain Python, no GPU."""

from __future__ import annotations

from itertools import product

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.wgmma import schedule as many
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind, norm_of, with_norm
from cute_kernels.gemm.wgmma.launch import TileSchedule

NORM_US = 1.5  # of a norm's launch, at least
SHIPPED_ROWS = (1, 2, 4, 8, 16, 32, 64)
# (N, K) of Llama-3-8B's layers and of Llama-2-70B's shard on one of 8 GPUs, by their side of a norm.
SHIPPED_LAYERS: dict[DeferredKind, tuple[tuple[int, int], ...]] = {
    GIVES: ((4096, 4096), (4096, 14_336), (8192, 1024), (8192, 3584)),
    TAKES: ((6144, 4096), (28_672, 4096), (1280, 8192), (7168, 8192)),
}


def deferred(schedule: StreamSchedule | TileSchedule, kind: DeferredKind) -> WgmmaConfig | None:
    """Returns a schedule's configuration for a product before or after a deferred norm, or None if there is no such
    kernel.

    A CTA's shared memory holds, before the norm, the results of one work tile and, after the norm, the factors of one
    tile of rows. So a CTA may have only one work tile. After the norm it may have several, if one tile has all rows of
    x.
    """
    if not isinstance(schedule, TileSchedule):
        return None
    if schedule.num_work_tiles > schedule.num_ctas and (kind == GIVES or schedule.m_tiles > 1):
        return None
    config = with_norm(schedule.config, kind)
    if config.can_implement():
        return None
    most = norm_of(config).most_inputs(config)
    return config if most is None or schedule.k_blocks * schedule.config.block_k <= most else None


def beside_a_norm(
    problem: LinearProblem, schedule: StreamSchedule | TileSchedule, kind: DeferredKind
) -> StreamSchedule | TileSchedule:
    """Returns the schedule for a product before or after a deferred norm. schedule: the best schedule without a norm.

    If ``schedule`` has a kernel for the norm, it is returned. Otherwise the fastest schedule with such a kernel is
    returned, if it takes less time than ``schedule`` and a launch of the norm together. If it takes more, ``schedule``
    is returned. For problems without measured times (`is_short`), ``schedule`` is always returned.
    """
    if deferred(schedule, kind) is not None or not isinstance(schedule, TileSchedule):
        return schedule
    if not many.is_short(problem):
        return schedule
    most = many.expected_us(problem, schedule) + NORM_US
    found = ((many.expected_us(problem, one), one) for one in many.tile_schedules(problem) if deferred(one, kind))
    us, other = min(found, key=lambda one: one[0], default=(most, schedule))
    return other if us < most else schedule


def config_beside_a_norm(
    problem: LinearProblem, schedule: StreamSchedule | TileSchedule, kind: DeferredKind
) -> WgmmaConfig | None:
    """Returns the configuration, with the norm, of the schedule that `beside_a_norm` chooses. Returns None if that
    schedule has no kernel for the norm.
    """
    return deferred(beside_a_norm(problem, schedule, kind), kind)


def shipped_configs() -> list[WgmmaConfig]:
    """Returns the configurations that bundles hold: for 4-bit weights in groups of 128, the layers `SHIPPED_LAYERS` and
    the numbers of rows `SHIPPED_ROWS`. Others compile on demand."""
    found: dict[WgmmaConfig, None] = {}
    for kind, layers in SHIPPED_LAYERS.items():
        for (n, k), rows in product(layers, SHIPPED_ROWS):
            problem = LinearProblem(rows, n, k, k, integers(4), "bf16")
            config = config_beside_a_norm(problem, chosen(problem), kind)
            if config is not None:
                found[config] = None
    return list(found)
