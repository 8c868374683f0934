"""What of a launch stays the same from call to call: the compiled function, its schedule, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.linear.wgmma.compile import WgmmaSpec
from cute_kernels.linear.wgmma.schedule import TileSchedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.workspace import POOL


@dataclass(frozen=True)
class TilePlan:
    """Everything about a launch that does not change between calls of the same shapes and formats."""

    function: Callable[..., Any]
    schedule: TileSchedule
    device_index: int
    num_words: int

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], n: int, activation: int, out_kind: int) -> None:
        """Launches on the current stream of the plan's device, which is the current one.

        x: [m, k], 16-byte aligned, k a multiple of 8. addresses: codes, scales, zeros, bias, residual, out.
        """
        workspace = 0
        if self.num_words:
            index = self.device_index
            workspace = POOL.get(index, torch._C._cuda_getCurrentRawStream(index), self.num_words)
        schedule = self.schedule
        self.function(
            x,
            *addresses,
            workspace,
            n,
            schedule.num_tiles,
            schedule.units,
            schedule.whole,
            schedule.splits,
            schedule.num_ctas,
            activation,
            out_kind,
        )


def make_tile_plan(schedule: TileSchedule, device_index: int) -> TilePlan:
    """The plan of a given schedule."""
    return TilePlan(
        function=load(WgmmaSpec(schedule.config), arch_of(device_index)),
        schedule=schedule,
        device_index=device_index,
        num_words=schedule.workspace_words,
    )
