"""Makes configurations for a problem, and gives them as many pipeline stages as fit. Plain Python, no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from cute_kernels.device.cuda import BARRIER_BYTES
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma, ScaledSums
from cute_kernels.gemm.wgmma.results import StagedStore

MAX_STAGES = 8  # where nothing else is said
ALIGNMENT_BYTES = 1024  # that aligning regions may take: x begins on 1024 bytes, other regions on 128
Config = TypeVar("Config", bound=WgmmaConfig)


def of_format(problem: LinearProblem | GroupedProblem, **choices: Any) -> WgmmaConfig[Any]:
    """Returns a configuration for a problem's weights and activation."""
    choices.setdefault("store", StagedStore(activation=problem.activation))
    return WgmmaConfig(problem.format, problem.dtype, **choices)


def scaling_sums(config: WgmmaConfig) -> WgmmaConfig:
    """Returns the configuration with the mainloop `ScaledSums`, which takes up to 21 % less time, or unchanged if it
    does not support that mainloop. `ScaledSums` and `RegisterWgmma` do not give the same bits, and the largest tiles
    cannot have `ScaledSums`. So batch-invariant products do not use it."""
    mainloop = config.mainloop
    if type(mainloop) is not RegisterWgmma:
        return config
    scaling = replace(config, mainloop=ScaledSums(mainloop.group_steps, mainloop.in_flight))
    return config if scaling.can_implement() else scaling


def with_stages(config: Config, most: int = MAX_STAGES, spare: int = ALIGNMENT_BYTES) -> Config:
    """Returns the configuration with as many pipeline stages as fit into shared memory. The number of stages is a
    multiple of `k_warpgroups`.

    most: the largest number of stages. spare: bytes of shared memory that are left for alignment.
    """
    least = replace(config, num_stages=2 * config.k_warpgroups)
    room = (config.limits.shared_bytes - spare - least.smem_bytes) // (least.stage_bytes + 2 * BARRIER_BYTES)
    stages = min(most, least.num_stages + max(room, 0))
    return replace(config, num_stages=stages // config.k_warpgroups * config.k_warpgroups)
