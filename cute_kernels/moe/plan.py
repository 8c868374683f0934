"""What of a grouped product's launches stays the same from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.linear.plan import DTYPES
from cute_kernels.moe.compile import CombineSpec, GroupedSpec, RoutingSpec
from cute_kernels.moe.config import CombineConfig, RoutingConfig
from cute_kernels.moe.schedule import GroupedProblem, GroupedSchedule, make_schedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.workspace import POOL


@dataclass(frozen=True)
class GroupedPlan:
    """Everything about a grouped product that does not change between calls of the same shapes and formats."""

    function: Callable[..., Any]
    schedule: GroupedSchedule
    num_experts: int
    device_index: int

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], routing: tuple[int, int], numbers: tuple[int, ...]):
        """Launches on the current stream of the plan's device, which is the current one.

        x: [.., k], 16-byte aligned, k a multiple of 8. addresses: codes, scales, zeros, bias, out. routing: addresses
        of offsets and rows. numbers: n, activation, kind of the output.
        """
        index = self.device_index
        workspace = POOL.get(index, torch._C._cuda_getCurrentRawStream(index), self.schedule.workspace_words)
        self.launch(x, addresses, workspace, routing, numbers)

    def launch(
        self,
        x: torch.Tensor,
        addresses: tuple[int, ...],
        workspace: int,
        routing: tuple[int, int],
        numbers: tuple[int, ...],
    ) -> None:
        """:meth:`run` with a workspace of the caller's."""
        schedule = self.schedule
        n, activation, out_kind = numbers
        for number in range(schedule.num_launches):
            self.function(
                x,
                *addresses,
                workspace,
                *routing,
                n,
                schedule.num_tiles,
                schedule.units,
                schedule.num_slices,
                schedule.num_groups,
                self.num_experts,
                schedule.x_slots,
                number * schedule.max_entries,
                schedule.max_entries,
                schedule.max_parts,
                activation,
                out_kind,
            )


@lru_cache(maxsize=4096)
def plan_of(
    places: int,
    num_experts: int,
    n: int,
    k: int,
    k_pad: int,
    bits: int,
    dtype: torch.dtype,
    group_size: int,
    zero_point: bool,
    device: int,
) -> GroupedPlan:
    """The plan of a grouped product on a CUDA device."""
    problem = GroupedProblem(
        places=places,
        num_experts=num_experts,
        n=n,
        k=k,
        k_pad=k_pad,
        bits=bits,
        dtype=DTYPES[dtype],
        group_size=group_size,
        zero_point=zero_point,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
    )
    return make_plan(make_schedule(problem), num_experts, device)


def make_plan(schedule: GroupedSchedule, num_experts: int, device_index: int) -> GroupedPlan:
    """The plan of a given schedule."""
    function = load(GroupedSpec(schedule.config), arch_of(device_index))
    return GroupedPlan(function, schedule, num_experts, device_index)


@lru_cache(maxsize=64)
def routing_function(id_bits: int, device_index: int) -> Callable[..., Any]:
    """The kernel that sorts assignments."""
    return load(RoutingSpec(RoutingConfig(id_bits)), arch_of(device_index))


@lru_cache(maxsize=64)
def combine_function(dtype: str, device_index: int) -> Callable[..., Any]:
    """The kernel that adds up results."""
    return load(CombineSpec(CombineConfig(dtype)), arch_of(device_index))
