"""Pipelines in shared memory: stages that producers fill and consumers empty, each with two mbarriers; single barriers.

    role      waits                               then                   says so
    producer  `producer_acquire`: stage is empty  fills it               `producer_expect` and copies that count bytes,
                                                                         or `producer_commit` after its own stores
    consumer  `consumer_wait`: stage is full      reads it               `consumer_release`, one lane of each warp

A full barrier's phase ends with ``fills`` arrivals and all bytes that were expected, an empty one's with ``releases``
arrivals. A role keeps a `PipelineState` and carries it through its loops. A producer begins with the parity that a new
barrier passes, so its first round does not wait.

With TMA multicast each CTA of a cluster fills its part of a stage in all of them. A consumer warp then releases the
stage to each: ``multicast`` of its lanes arrive, lane i at CTA i's barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device import numbers
from cute_kernels.device.types import Index


@dataclass(frozen=True)
class PipelineState:
    """A role's position; run-time integers. stage: of its next use; phase: parity of the barrier it waits for."""

    stage: Index
    phase: Index


@dataclass(frozen=True)
class Pipeline:
    """Stages and their barriers.

    Attributes:
        full, empty: the first of ``num_stages`` mbarriers each.
        fills: arrivals that fill a stage, beside the bytes that they expect.
        releases: arrivals that empty it, of all CTAs whose consumers read what one of them loads.
        multicast: CTAs of a cluster that fill each other's stages.
    """

    full: cute.Pointer
    empty: cute.Pointer
    num_stages: cutlass.Constexpr[int]
    fills: cutlass.Constexpr[int] = 1
    releases: cutlass.Constexpr[int] = 1
    multicast: cutlass.Constexpr[int] = 1

    def init(self) -> None:
        """Initialises the barriers; one thread, before any other uses them. `fence_init` follows."""
        for i in range(self.num_stages):
            cute.arch.mbarrier_init(self.full + i, self.fills)
            cute.arch.mbarrier_init(self.empty + i, self.releases)

    # -- states -------------------------------------------------------------------------------------------------------

    def producer_state(self, first=0) -> PipelineState:
        """Returns where a producer begins. first: a stage of the first round."""
        return PipelineState(Int32(first), Int32(1))

    def consumer_state(self, first=0) -> PipelineState:
        """Returns where a consumer begins. first: a stage of the first round."""
        return PipelineState(Int32(first), Int32(0))

    def consumer_state_of(self, use) -> PipelineState:
        """Returns the state of the ``use``-th use of all stages, for consumers who count uses."""
        return PipelineState(use % self.num_stages, use // self.num_stages & 1)

    def producer_state_of(self, use) -> PipelineState:
        """Returns the same of producers."""
        return PipelineState(use % self.num_stages, (use // self.num_stages & 1) ^ 1)

    def next(self, state: PipelineState, step: int = 1) -> PipelineState:
        """Returns the state ``step`` uses later; roles that interleave uses take every ``step``-th. It divides the
        stages."""
        stage = state.stage + step
        wrapped = stage == self.num_stages if step == 1 else stage >= self.num_stages
        following = Int32(0) if step == 1 else stage - self.num_stages
        return PipelineState(
            cutlass.select_(wrapped, following, stage), cutlass.select_(wrapped, state.phase ^ 1, state.phase)
        )

    def shifted(self, first, num_stages: int) -> Pipeline:
        """Returns the pipeline of ``num_stages`` of its stages from the ``first`` on."""
        return Pipeline(self.full + first, self.empty + first, num_stages, self.fills, self.releases, self.multicast)

    # -- producers ----------------------------------------------------------------------------------------------------

    def producer_acquire(self, state: PipelineState) -> None:
        """Waits until all consumers have released the stage."""
        cute.arch.mbarrier_wait(self.empty + state.stage, state.phase)

    def producer_expect(self, state: PipelineState, num_bytes) -> Any:
        """Arrives, and makes the stage wait for bytes of copies as well; one lane. Returns `full_address`."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.stage, num_bytes)
        return self.full_address(state)

    def producer_commit(self, state: PipelineState) -> None:
        """Arrives, after the warp's own stores; one lane."""
        cute.arch.mbarrier_arrive(self.full + state.stage)

    def full_barrier(self, state: PipelineState) -> Any:
        """Returns the barrier on which TMA counts its bytes."""
        return self.full + state.stage

    def full_address(self, state: PipelineState) -> Any:
        """Returns the address of its full barrier in shared memory, as bulk copies take it."""
        return Int32((self.full + state.stage).toint())

    # -- consumers ----------------------------------------------------------------------------------------------------

    def consumer_wait(self, state: PipelineState) -> None:
        """Waits until the stage is full."""
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    def has_filled(self, state: PipelineState) -> Boolean:
        """Returns whether the stage is full. No thread is suspended; the answer takes as long as an MMA."""
        return _has_completed(self.full + state.stage, state.phase)

    def consumer_release(self, state: PipelineState) -> None:
        """Arrives at the stage's empty barrier, when the warp has read it; one lane, or lanes up to ``multicast``."""
        barrier = self.empty + state.stage
        if self.multicast > 1:
            numbers.arrive_in_cluster(numbers.address_in(Int32(barrier.toint()), cute.arch.lane_idx()))
        else:
            cute.arch.mbarrier_arrive(barrier)


@dataclass(frozen=True)
class Barrier:
    """An mbarrier of its own: an event of a CTA, once or in phases.

    Attributes:
        pointer: of the mbarrier.
        arrivals: how many end a phase.
    """

    pointer: cute.Pointer
    arrivals: cutlass.Constexpr[int] = 1

    def init(self) -> None:
        """Initialises it; one thread. `fence_init` follows."""
        cute.arch.mbarrier_init(self.pointer, self.arrivals)

    def expect(self, num_bytes) -> Any:
        """Arrives, and makes the phase wait for bytes as well; one lane. Returns the barrier's address."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.pointer, num_bytes)
        return self.address

    def arrive(self) -> None:
        """Arrives; the calling thread."""
        cute.arch.mbarrier_arrive(self.pointer)

    def wait(self, phase: Index = 0) -> None:
        """Waits until the phase of a parity has ended."""
        cute.arch.mbarrier_wait(self.pointer, phase)

    @property
    def address(self) -> Any:
        """The barrier's address in shared memory, as copies take it."""
        return Int32(self.pointer.toint())


def fence_init() -> None:
    """Makes initialised barriers visible to copies and to the cluster; the thread that has initialised them."""
    cute.arch.mbarrier_init_fence()


@dsl_user_op
def _has_completed(barrier: cute.Pointer, phase, *, loc=None, ip=None) -> Boolean:
    """Returns whether a phase of an mbarrier is over, without a wait, unlike `mbarrier_try_wait`."""
    address, parity = barrier.to_llvm_ptr(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)
    return Boolean(nvvm.mbarrier_wait_parity(address, parity, nvvm.MBarrierWaitKind.TEST, loc=loc, ip=ip))
