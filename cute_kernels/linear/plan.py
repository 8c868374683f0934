"""What of a launch stays the same from call to call: the compiled function, its schedule, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.linear.compile import LinearSpec
from cute_kernels.linear.config import BF16, FP16, FP32, GELU, NO_ACTIVATION, SILU, SWIGLU
from cute_kernels.linear.portable.plan import make_portable_plan
from cute_kernels.linear.portable.schedule import make_portable_schedule
from cute_kernels.linear.schedule import FEW_ROWS as FEW_ROWS
from cute_kernels.linear.schedule import Problem, Schedule
from cute_kernels.linear.tuned import modelled, tuned
from cute_kernels.linear.wgmma.plan import TilePlan, make_tile_plan
from cute_kernels.linear.wgmma.schedule import TileSchedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.workspace import POOL

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ACTIVATIONS = {None: NO_ACTIVATION, "silu": SILU, "gelu": GELU, "swiglu": SWIGLU}
OUT_KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that does not change between calls of the same shapes and formats.

    Attributes:
        num_words: of workspace, 0 if there is nothing to combine.
    """

    function: Callable[..., Any]
    schedule: Schedule
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
        self.launch(x, addresses, workspace, n, activation, out_kind)

    def launch(
        self, x: torch.Tensor, addresses: tuple[int, ...], workspace: int, n: int, activation: int, out_kind: int
    ) -> None:
        """:meth:`run` with a workspace of the caller's."""
        schedule = self.schedule
        self.function(
            x,
            *addresses,
            workspace,
            n,
            schedule.num_tiles,
            schedule.units,
            schedule.num_slices,
            schedule.num_groups,
            schedule.max_parts,
            activation,
            out_kind,
        )


@lru_cache(maxsize=4096)
def plan_of(
    m: int,
    n: int,
    k: int,
    k_pad: int,
    bits: int,
    dtype: torch.dtype,
    group_size: int,
    zero_point: bool,
    device: int,
    batch_invariant: bool = False,
    portable: bool = False,
) -> Plan | TilePlan:
    """The plan of a product of any number of rows on a CUDA device.

    portable: whether the portable kernel is wanted where others run too, as tests want it.
    """
    problem = Problem(
        m=m,
        n=n,
        k=k,
        k_pad=k_pad,
        bits=bits,
        dtype=DTYPES[dtype],
        group_size=group_size,
        zero_point=zero_point,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        batch_invariant=batch_invariant,
    )
    if portable or not is_supported(device):
        return make_portable_plan(make_portable_schedule(problem), device)
    schedule = tuned(problem, torch.cuda.get_device_name(device)) or modelled(problem)
    if isinstance(schedule, TileSchedule):
        return make_tile_plan(schedule, device)
    return make_plan(schedule, m, device)


def make_plan(schedule: Schedule, m: int, device_index: int) -> Plan:
    """The plan of a given schedule for products of ``m`` rows."""
    return Plan(
        function=load(LinearSpec(schedule.config), arch_of(device_index)),
        schedule=schedule,
        device_index=device_index,
        num_words=schedule.workspace_words(m),
    )
