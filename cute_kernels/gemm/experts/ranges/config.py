"""Compile-time choices of grouped products by work ranges of whole blocks, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.experts.arguments import ASSIGNED, RANGES
from cute_kernels.gemm.stream.config import MMA_N, ROW_WARPS, Activations, StreamConfig
from cute_kernels.gemm.wgmma.mainloops import (
    LIMB_GROUP,
    MMA_GROUP,
    ROW_LIMB_BYTES,
    ROW_SCALE_BYTES,
    row_columns,
    takes_limbs,
)
from cute_kernels.gemm.wgmma.results import TMA_TILE_ALIGNMENT
from cute_kernels.runtime.spec import one_of

BLOCK_K = LIMB_GROUP  # inputs that share a scale of x
GROUP_SIZES = (0, MMA_GROUP // 2, MMA_GROUP, LIMB_GROUP // 2, LIMB_GROUP)
ROWS = MMA_N  # of an expert, up to which work ranges are for it: one entry, of groups of 16 inputs two
LANE_EXPERTS = 4  # experts of a lane in a round, one after the other
ROUND_EXPERTS = LANE_EXPERTS * WARP_THREADS
ROUNDS = (1, 2, 4)
LANE_ASSIGNMENTS = (1, 2)  # assignments of a lane, where no launch has sorted them
MOST_ASSIGNMENTS = LANE_ASSIGNMENTS[-1] * WARP_THREADS  # of a warp
MOST_DIVIDED = 2**31 - 1  # the most that a count times its divisor may be
ROW_BITS = 16  # bits of the factor that replaces dividing an assignment's number: exact below 2**(ROW_BITS / 2)


@dataclass(frozen=True)
class EntryLimbs(Activations):
    """The policy of activations as 8-bit limbs. Consumer warps make limbs of an expert's rows of x and keep them in
    shared memory. MMAs of bytes multiply them. The four warps that multiply the same k blocks are a warpgroup.
    ``k_warps`` warpgroups multiply the pipeline's stages in turn. One producer warp loads weights.

    Attributes:
        expert_rounds: number of rounds in which a warp counts entries. In a round, a warp counts the entries of
            `ROUND_EXPERTS` experts.
        lane_assignments: number of assignments that a lane holds if assignments are unsorted; 0 if they are sorted.
        half_last: whether the last k block of the weights is half a block.
    """

    expert_rounds: int = 1
    lane_assignments: int = 0
    half_last: bool = False
    producer_warps: ClassVar[int] = 1
    alignment: ClassVar[int] = TMA_TILE_ALIGNMENT

    @property
    def name(self) -> str:
        routed = f"_assigned{self.lane_assignments}" if self.lane_assignments else f"_ranges{self.expert_rounds}"
        return f"{routed}{'_half' if self.half_last else ''}"

    def kernel(self) -> CompiledAs:
        arguments = ASSIGNED if self.lane_assignments else RANGES
        return CompiledAs("cute_kernels.gemm.experts.ranges.kernel:RangeKernel", arguments)

    def stage_warps(self, config: StreamConfig[Any]) -> int:
        return ROW_WARPS

    def k_block_limb_bytes(self, config: RangeConfig) -> int:
        """Returns the bytes that limbs take for a k block of ``tile_m`` rows."""
        return ROW_LIMB_BYTES * config.tile_m

    def k_block_scale_bytes(self, config: RangeConfig) -> int:
        """Returns the bytes that the limbs' scales take for a k block of ``tile_m`` rows."""
        return ROW_SCALE_BYTES * config.tile_m

    def k_block_bytes(self, config: RangeConfig) -> int:
        """Returns the bytes that limbs and their scales take for a k block of ``tile_m`` rows."""
        return self.k_block_limb_bytes(config) + self.k_block_scale_bytes(config)

    def room_k_blocks(self, config: RangeConfig) -> int:
        """Returns the number of k blocks whose limbs have room in shared memory."""
        return self.x_bytes // self.k_block_bytes(config)

    def problem(self, config: StreamConfig[Any]) -> str | None:
        choices = {
            "group_size": (config.group_size, GROUP_SIZES),
            "block_k": (config.block_k, (BLOCK_K,)),
            "k_warps": (config.k_warps, (2, 3, 4)),
            "expert_rounds": (self.expert_rounds, ROUNDS),
            "lane_assignments": (self.lane_assignments, (0, *LANE_ASSIGNMENTS)),
        }
        for field, (found, wanted) in choices.items():
            if reason := one_of(found, wanted, field):
                return reason
        if not takes_limbs(config.format, config.dtype) or config.format.sums_inputs:
            return f"limbs want codes that are bytes, without zero points, not {config.format.key} with {config.dtype}"
        if config.num_stages % config.k_warps:
            # Else a stage could have the parity of two rounds before.
            return f"num_stages {config.num_stages} is no multiple of the {config.k_warps} warpgroups that take turns"
        if self.half_last and (config.chunk_k_blocks > 1 or config.group_size == BLOCK_K):
            return f"half a k block of {config.format.key} in chunks of {config.chunk_k_blocks} is no chunk with scales"
        if self.half_last and config.format.nan_codes:
            return f"half a k block leaves codes in a stage, and codes of {config.format.key} may be NaN, times 0 too"
        if self.lane_assignments and self.expert_rounds > 1:
            return f"assignments are found in one round of experts, not {self.expert_rounds}"
        return None


def entry_rows(form: WeightFormat) -> int:
    """Returns how many rows of an expert are multiplied together, at most; a power of two."""
    return MMA_N // row_columns(form)


RangeConfig = StreamConfig[EntryLimbs]
