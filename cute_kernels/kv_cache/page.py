"""`PageFetch`, which loads page numbers from the block table past the queue of an SM's loads.

Loads of an SM return in the order in which they were issued, even those that hit a cache. A team knows the page's place
in the table only when its request's length has arrived. By then the rows of all teams of its SM have been requested. So
an ordinary load of the page number would return after all these rows. A bulk copy (TMA) bypasses that queue. It copies
at least 16 aligned bytes to shared memory. A barrier for each warp counts the copies of the warp's teams. The 16 bytes
may reach beyond the table; they are still allocated, since allocations have larger units.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS

BLOCK_BYTES = 16  # of the smallest bulk copy


@dataclass(frozen=True)
class PageSlot:
    """The place where a team's page number arrives: the warp's barrier, and the shared address of the team's 16
    bytes."""

    barrier: cute.Pointer
    address: Int32


class PageFetch:
    """The one page fetch of each team of a CTA.

    Args:
        lanes: lanes of a team.
        num_warps: warps of the CTA.
    """

    def __init__(self, lanes: int, num_warps: int):
        self.lanes = lanes
        self.num_warps = num_warps
        self.teams = WARP_THREADS // lanes

    def allocate(self, warp, lane) -> PageSlot:
        """Allocates the slots of all teams in shared memory; returns the slot of the calling thread's team."""
        smem = cutlass.utils.SmemAllocator()
        slots = smem.allocate(BLOCK_BYTES * self.teams * self.num_warps, byte_alignment=BLOCK_BYTES).toint()
        barriers = smem.allocate_array(cutlass.Int64, self.num_warps)
        return PageSlot(barriers + warp, slots + BLOCK_BYTES * (warp * self.teams + lane // self.lanes))

    @cute.jit
    def open(self, slot, wanted, lane):
        """Initialises the warp's barrier for one arrival if ``wanted``, which is the same in all lanes."""
        if wanted & (lane == 0):
            cute.arch.mbarrier_init(slot.barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def ask(self, slot, address):
        """Starts loading the page whose number is at a global address; returns the argument of `wait`."""
        lane = cute.arch.lane_idx()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(slot.barrier, BLOCK_BYTES * self.teams)
        if lane % self.lanes == 0:
            block = address & -BLOCK_BYTES
            ptx.bulk_copy_to_shared(slot.address, block, Int32(BLOCK_BYTES), slot.barrier.toint())
        return slot.address + (address & (BLOCK_BYTES - 4)).to(Int32)

    @cute.jit
    def give(self, slot, page):
        """Stores a page that is already known, in place of `ask`; returns the argument of `wait`."""
        lane = cute.arch.lane_idx()
        if lane % self.lanes == 0:
            ptx.store_shared(slot.address, 0, [page])
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(slot.barrier)
        return slot.address

    def wait(self, slot, word) -> Int32:
        """Waits for the page and returns it. ``word``: what `ask` or `give` returned."""
        cute.arch.mbarrier_wait(slot.barrier, 0)
        return ptx.load_shared(word, 0).to(Int32)
