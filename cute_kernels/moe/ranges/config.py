"""Compile-time choices of grouped products by work ranges of whole blocks, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.linear.config import MMA_N, ROW_WARPS, LinearConfig
from cute_kernels.linear.wgmma.policies import LIMB_GROUP, ROW_LIMB_BYTES, ROW_SCALE_BYTES, TMA_TILE_ALIGNMENT

BLOCK_K = LIMB_GROUP  # inputs that share a scale of x, and of the weights
ROWS = (MMA_N, 2 * MMA_N)  # of an expert that are multiplied together, at most
LANE_EXPERTS = 4  # of a lane, one after the other, in a round
ROUND_EXPERTS = LANE_EXPERTS * WARP_THREADS
ROUNDS = (1, 2, 4)
LANE_ASSIGNMENTS = (1, 2)  # of a lane, where they are found as they are,
MOST_ASSIGNMENTS = LANE_ASSIGNMENTS[-1] * WARP_THREADS  # and of a warp
ROW_BITS = 16  # of the factor that is a division of an assignment's number: exact below 2**(ROW_BITS / 2)
MOST_ROUNDS_OF_TILES = (
    2  # tiles times rounds of experts that a thread has registers for beside accumulators of many rows
)


@dataclass(frozen=True)
class RangeConfig(LinearConfig):
    """A variant whose consumer warps make limbs of x, which stay in shared memory; products are those of bytes.

    The four warps that have the same ``k_warps``-th share of k blocks are a warpgroup. It takes whole pipeline stages,
    in turn with the others. One warp copies, weights alone.

    Attributes:
        expert_rounds: of `ROUND_EXPERTS` experts, for which each warp counts entries.
        lane_assignments: assignments of a lane where warps find entries among them as they are; 0 if they are sorted.
    """

    expert_rounds: int = 1
    lane_assignments: int = 0

    @property
    def producer_warps(self) -> int:
        return 1

    @property
    def stage_warps(self) -> int:
        return ROW_WARPS

    @property
    def x_alignment(self) -> int:
        return TMA_TILE_ALIGNMENT

    @property
    def room_k_blocks(self) -> int:
        """K blocks whose limbs there is room for."""
        return self.x_bytes // (self.k_block_limb_bytes + self.k_block_x_scale_bytes)

    @property
    def k_block_limb_bytes(self) -> int:
        """Limbs of a k block of as many rows as there is room for."""
        return ROW_LIMB_BYTES * self.tile_m

    @property
    def k_block_x_scale_bytes(self) -> int:
        """Their scales."""
        return ROW_SCALE_BYTES * self.tile_m

    @property
    def name(self) -> str:
        kind = f"assigned{self.lane_assignments}" if self.lane_assignments else f"ranges{self.expert_rounds}"
        return f"{super().name}_{kind}"

    def can_implement(self) -> str | None:
        choices = {
            "group_size": (BLOCK_K,),
            "block_k": (BLOCK_K,),
            "tile_m": ROWS,
            "k_warps": (2, 3, 4),
            "expert_rounds": ROUNDS,
            "lane_assignments": (0, *LANE_ASSIGNMENTS),
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if not self.format.takes_limbs:
            return f"limbs want 4-bit integers without zero points, not {self.format.key}"
        if self.num_stages % self.k_warps:
            # By its parity a use of a stage would be taken for the next but one.
            return f"num_stages {self.num_stages} is no multiple of the {self.k_warps} warpgroups that take turns"
        if self.tile_m > MMA_N and self.n_tiles * self.expert_rounds > MOST_ROUNDS_OF_TILES:
            return f"{self.tile_m} rows of {self.n_tiles} tiles and {self.expert_rounds} rounds of experts spill"
        if self.lane_assignments and (self.tile_m > MMA_N or self.expert_rounds > 1):
            return f"assignments are found by {MMA_N} rows an entry, not {self.tile_m}, in one round"
        return super().can_implement()
