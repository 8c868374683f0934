"""Pipelines in shared memory, and single barriers. Producers fill a pipeline's stages and consumers empty them; each
stage has a full and an empty mbarrier.

    role      waits                               then                   says so
    producer  `producer_acquire`: stage is empty  fills it               `producer_expect` and copies that count bytes,
                                                                         or `producer_commit` after its own stores
    consumer  `consumer_wait`: stage is full      reads it               `consumer_release`, one lane of each warp

The phase of a full barrier ends after ``fills`` arrivals and all expected bytes; the phase of an empty barrier ends
after ``releases`` arrivals. Each role carries a `PipelineState` through its loops. A producer begins with parity 1,
which a new barrier passes, so its first round does not wait.

With TMA multicast each CTA of a cluster fills its part of a stage in all CTAs. So a consumer warp releases the stage to
all CTAs: ``multicast`` of its lanes arrive, lane i at CTA i's barrier.
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
    """The position of a producer or consumer in the pipeline; run-time integers.

    Attributes:
        stage: the stage that it uses next.
        phase: the parity for which it waits.
    """

    stage: Index
    phase: Index


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline and their barriers.

    Attributes:
        full, empty: each points to the first of ``num_stages`` mbarriers.
        fills: number of arrivals that end a full barrier's phase, in addition to the expected bytes.
        releases: number of arrivals that end an empty barrier's phase; with multicast, from all CTAs of the cluster.
        multicast: number of CTAs in a cluster that fill each other's stages.
    """

    full: cute.Pointer
    empty: cute.Pointer
    num_stages: cutlass.Constexpr[int]
    fills: cutlass.Constexpr[int] = 1
    releases: cutlass.Constexpr[int] = 1
    multicast: cutlass.Constexpr[int] = 1

    def init(self) -> None:
        """Initialises the barriers. One thread calls it, then `fence_init`, before other threads use them."""
        for i in range(self.num_stages):
            cute.arch.mbarrier_init(self.full + i, self.fills)
            cute.arch.mbarrier_init(self.empty + i, self.releases)

    # -- states -------------------------------------------------------------------------------------------------------

    def producer_state(self, first=0) -> PipelineState:
        """Returns the state with which a producer begins. first: the stage that it fills first."""
        return PipelineState(Int32(first), Int32(1))

    def consumer_state(self, first=0) -> PipelineState:
        """Returns the state with which a consumer begins. first: the stage that it reads first."""
        return PipelineState(Int32(first), Int32(0))

    def consumer_state_of(self, use) -> PipelineState:
        """Returns a consumer's state for its ``use``-th use of a stage, counted from 0. Use i is of stage i %
        ``num_stages``.
        """
        return PipelineState(use % self.num_stages, use // self.num_stages & 1)

    def producer_state_of(self, use) -> PipelineState:
        """Returns a producer's state for its ``use``-th use of a stage, counted from 0. Use i is of stage i %
        ``num_stages``.
        """
        return PipelineState(use % self.num_stages, (use // self.num_stages & 1) ^ 1)

    def next(self, state: PipelineState, step: int = 1) -> PipelineState:
        """Returns the state ``step`` uses later. It is for roles that process only every ``step``-th use. ``step`` is
        at most ``num_stages``.
        """
        stage = state.stage + step
        wrapped = stage == self.num_stages if step == 1 else stage >= self.num_stages
        following = Int32(0) if step == 1 else stage - self.num_stages
        return PipelineState(
            cutlass.select_(wrapped, following, stage), cutlass.select_(wrapped, state.phase ^ 1, state.phase)
        )

    def shifted(self, first, num_stages: int) -> Pipeline:
        """Returns a pipeline of ``num_stages`` of this pipeline's stages, from stage ``first`` on."""
        return Pipeline(self.full + first, self.empty + first, num_stages, self.fills, self.releases, self.multicast)

    # -- producers ----------------------------------------------------------------------------------------------------

    def producer_acquire(self, state: PipelineState) -> None:
        """Waits until all consumers have released the stage."""
        cute.arch.mbarrier_wait(self.empty + state.stage, state.phase)

    def producer_expect(self, state: PipelineState, num_bytes) -> Any:
        """Arrives at the full barrier and adds ``num_bytes`` to the bytes that its phase waits for. One lane calls it.
        Returns `full_address`."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.stage, num_bytes)
        return self.full_address(state)

    def producer_commit(self, state: PipelineState) -> None:
        """Arrives at the full barrier, after the warp's own stores. One lane calls it."""
        cute.arch.mbarrier_arrive(self.full + state.stage)

    def full_barrier(self, state: PipelineState) -> Any:
        """Returns the stage's full barrier, on which TMA counts its bytes."""
        return self.full + state.stage

    def full_address(self, state: PipelineState) -> Any:
        """Returns the shared address of the stage's full barrier, for bulk copies."""
        return Int32((self.full + state.stage).toint())

    # -- consumers ----------------------------------------------------------------------------------------------------

    def consumer_wait(self, state: PipelineState) -> None:
        """Waits until the stage is full."""
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    def has_filled(self, state: PipelineState) -> Boolean:
        """Returns whether the stage is full, without suspending the thread. The test takes about as long as an MMA."""
        return _has_completed(self.full + state.stage, state.phase)

    def consumer_release(self, state: PipelineState) -> None:
        """Arrives at the stage's empty barrier, after the warp has read the stage. One lane calls it, or with multicast
        lanes 0 to ``multicast`` - 1."""
        barrier = self.empty + state.stage
        if self.multicast > 1:
            numbers.arrive_in_cluster(numbers.address_in(Int32(barrier.toint()), cute.arch.lane_idx()))
        else:
            cute.arch.mbarrier_arrive(barrier)


@dataclass(frozen=True)
class Barrier:
    """A single mbarrier, for an event of a CTA. The event occurs once, or once in each phase.

    Attributes:
        pointer: the mbarrier.
        arrivals: number of arrivals that end a phase.
    """

    pointer: cute.Pointer
    arrivals: cutlass.Constexpr[int] = 1

    def init(self) -> None:
        """Initialises the barrier. One thread calls it, then `fence_init`."""
        cute.arch.mbarrier_init(self.pointer, self.arrivals)

    def expect(self, num_bytes) -> Any:
        """Arrives and adds ``num_bytes`` to the bytes that the phase waits for. One lane calls it. Returns the
        barrier's address."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.pointer, num_bytes)
        return self.address

    def arrive(self) -> None:
        """Arrives once, for the calling thread."""
        cute.arch.mbarrier_arrive(self.pointer)

    def wait(self, phase: Index = 0) -> None:
        """Waits until the phase with this parity has ended."""
        cute.arch.mbarrier_wait(self.pointer, phase)

    @property
    def address(self) -> Any:
        """The barrier's shared address, for bulk copies."""
        return Int32(self.pointer.toint())


def fence_init() -> None:
    """Makes initialised barriers visible to copies and to the cluster. The thread that has initialised them calls
    it."""
    cute.arch.mbarrier_init_fence()


@dsl_user_op
def _has_completed(barrier: cute.Pointer, phase, *, loc=None, ip=None) -> Boolean:
    """Returns whether a phase of an mbarrier is over. Unlike `mbarrier_try_wait` it never suspends the thread."""
    address, parity = barrier.to_llvm_ptr(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)
    return Boolean(nvvm.mbarrier_wait_parity(address, parity, nvvm.MBarrierWaitKind.TEST, loc=loc, ip=ip))
