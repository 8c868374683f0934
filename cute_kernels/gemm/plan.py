"""What of a launch stays the same from call to call: the compiled function, its schedule, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.arguments import DENSE_ADDRESSES, FACTORED_TILES, STREAM, TILES
from cute_kernels.gemm.compile import spec_of
from cute_kernels.gemm.config import BF16, FP16, FP32, GELU, NO_ACTIVATION, SILU, SWIGLU
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.schedule import LinearProblem, StreamSchedule
from cute_kernels.gemm.served import may_load, schedule_for
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.mainloops import (
    FACTOR_ROWS,
    LIMB_GROUP,
    NORMED,
    NORMED_ROWS,
    ORDERED,
    ORDERED_K_BLOCKS,
    ORDERED_ROWS,
    SCALED,
)
from cute_kernels.gemm.wgmma.resident_schedule import with_factors
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.launch_arguments import LaunchArguments

ACTIVATIONS = {None: NO_ACTIVATION, "silu": SILU, "gelu": GELU, "swiglu": SWIGLU}
OUT_KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
# Of rows of x that meet something on their way to limbs.
MOST_ROWS = {SCALED: 2 * FACTOR_ROWS, NORMED: NORMED_ROWS, ORDERED: ORDERED_ROWS}


@dataclass(frozen=True)
class CompiledProduct:
    """A compiled kernel, and what it is launched with."""

    function: Callable[..., Any]
    declared: LaunchArguments

    def bound(self, numbers: dict[str, int]) -> Callable[..., Any]:
        """The kernel with these numbers: takes what else it is launched with by name."""
        return self.declared.bound(self.function, numbers)


@dataclass(frozen=True)
class LinearPlan:
    """Everything about a launch that does not change between calls of the same shapes and formats.

    Attributes:
        product: the compiled kernel, of few rows or of many.
        schedule: what it was made of.
        sizes: those numbers of a launch, by name, that the schedule decides.
        num_words: of workspace, 0 if there is nothing to combine.
    """

    product: CompiledProduct
    schedule: StreamSchedule | TileSchedule
    device_index: int
    sizes: dict[str, int]
    num_words: int

    def bound(self, n: int, activation: int, out_kind: int, **added: int) -> Callable[..., Any]:
        """What launches products that have these numbers in common: takes x, addresses and the workspace by name."""
        numbers = {"n": n, **self.sizes, "activation": activation, "out_kind": out_kind, **added}
        return self.product.bound(numbers)

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], n: int, activation: int, out_kind: int) -> None:
        """Launches on the current stream of the plan's device, which is the current one.

        x: [m, k], 16-byte aligned, k a multiple of 8. addresses: codes, scales, zeros, bias, residual, out.
        """
        self.launch(x, addresses, self.workspace(), n, activation, out_kind)

    def launch(
        self, x: torch.Tensor, addresses: tuple[int, ...], workspace: int, n: int, activation: int, out_kind: int
    ) -> None:
        """:meth:`run` with a workspace of the caller's."""
        named = dict(zip(DENSE_ADDRESSES, (*addresses, workspace), strict=True))
        self.bound(n, activation, out_kind)(x=x, **named)

    def workspace(self) -> int:
        """The address of a workspace for a launch on the current stream; 0 if it needs none."""
        if not self.num_words:
            return 0
        index = self.device_index
        return GPU.workspace(index, GPU.stream(index), self.num_words)


@per_gpu
@lru_cache(maxsize=4096)
def plan_of(
    m: int,
    n: int,
    k: int,
    form: WeightFormat,
    dtype: torch.dtype,
    device: int,
    batch_invariant: bool = False,
) -> LinearPlan:
    """The plan of a product of any number of rows on a CUDA device.

    Raises UnsupportedGPUError: the device is no Hopper.
    """
    arch_of(device)
    problem = problem_of(m, n, k, form, dtype, device, batch_invariant)
    return make_plan(schedule_for(problem, GPU.name(device)), m, device)


@per_gpu
@lru_cache(maxsize=4096)
def factored_plan_of(
    m: int,
    n: int,
    k: int,
    form: WeightFormat,
    dtype: torch.dtype,
    device: int,
    batch_invariant: bool,
    kind: str,
) -> LinearPlan | None:
    """As `plan_of`, of a kernel whose rows meet factors or another order (`mainloops.SCALED`, `.NORMED`, `.ORDERED`);
    None if the one that serves the product takes none, or is not there and nobody may wait for the compiler: a launch
    before does the same. It has their address behind the workspace, and two numbers more."""
    problem, arch = problem_of(m, n, k, form, dtype, device, batch_invariant), arch_of(device)
    plain = schedule_for(problem, GPU.name(device))
    if m > MOST_ROWS[kind] or (kind == ORDERED and k % LIMB_GROUP):
        return None
    schedule = factored(plain, kind)
    if schedule is None or not may_load(spec_of(schedule.config), arch, problem):
        return None
    return make_tile_plan(schedule, m, device)


def factored(schedule: StreamSchedule | TileSchedule, kind: str) -> TileSchedule | None:
    """A schedule whose rows meet factors, or another order; None if its kernel takes none, or makes limbs in chunks:
    each would wait for factors of its own, which took 4096 x 14336 with one row 3 us more than 14."""
    if not isinstance(schedule, TileSchedule):
        return None
    config = with_factors(schedule.config, kind)
    if config is None or schedule.split_k_blocks > config.mainloop.k_blocks:
        return None
    if kind == ORDERED and schedule.k_blocks > ORDERED_K_BLOCKS * config.mainloop.k_blocks:
        return None  # all of the row has to lie there
    return replace(schedule, config=config)


def problem_of(
    m: int, n: int, k: int, form: WeightFormat, dtype: torch.dtype, device: int, batch_invariant: bool
) -> LinearProblem:
    """A product of ``m`` rows on a CUDA device."""
    return LinearProblem(
        m=m,
        n=n,
        k=k,
        k_pad=padded_shape((n, k), form.group_size)[1],
        format=form,
        dtype=DTYPES[dtype],
        num_sms=GPU.num_sms(device),
        batch_invariant=batch_invariant,
    )


def make_plan(schedule: StreamSchedule | TileSchedule, m: int, device_index: int) -> LinearPlan:
    """The plan of a given schedule for products of ``m`` rows."""
    if isinstance(schedule, TileSchedule):
        return make_tile_plan(schedule, m, device_index)
    return LinearPlan(
        product=CompiledProduct(load(spec_of(schedule.config), arch_of(device_index)), STREAM),
        schedule=schedule,
        device_index=device_index,
        sizes={
            "num_tiles": schedule.num_tiles,
            "k_blocks": schedule.k_blocks,
            "num_slices": schedule.num_slices,
            "num_groups": schedule.num_groups,
            "max_parts": schedule.max_parts,
        },
        num_words=schedule.workspace_words(m),
    )


def make_tile_plan(schedule: TileSchedule, m: int, device_index: int) -> LinearPlan:
    """The plan of a given schedule of the kernel for many rows, for products of ``m`` rows."""
    declared = FACTORED_TILES if getattr(schedule.config.mainloop, "factors", "") else TILES
    product = CompiledProduct(load(spec_of(schedule.config), arch_of(device_index)), declared)
    return plan_of_tiles(product, schedule, device_index)


def plan_of_tiles(product: CompiledProduct, schedule: TileSchedule, device_index: int) -> LinearPlan:
    """The plan of a compiled kernel of tiles, whose sizes its schedule has."""
    return LinearPlan(
        product=product,
        schedule=schedule,
        device_index=device_index,
        sizes={
            "num_tiles": schedule.num_tiles,
            "k_blocks": schedule.k_blocks,
            "whole": schedule.whole,
            "splits": schedule.splits,
            "num_ctas": schedule.num_ctas,
        },
        num_words=schedule.workspace_words,
    )
