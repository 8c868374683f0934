"""What consumer warps read of a stage, codes, scales and zero points of their rows, and how they give it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.linear.decode import Decoder, SubnormalDecoder
from cute_kernels.linear.wgmma.config import WgmmaConfig
from layouts.weights.hopper import TILE_BYTES, TILE_N


@dataclass(frozen=True)
class Lane:
    """A thread's places in a stage; run-time integers."""

    code_offset: Any  # of its 16 bytes in the first tile of its warpgroup
    row: Any  # its first row in the first tile of its warpgroup, among the block's
    masks: Any  # of the decoder
    k_rank: Any  # of k blocks that is its warpgroup's


def make_decoder(config: WgmmaConfig) -> Decoder:
    """What makes numbers of codes."""
    if config.scales_codes:
        return SubnormalDecoder(config.bits, config.dtype, config.zero_point)
    return Decoder(config.bits, config.dtype)


class ConsumerWarps:
    """The part of a kernel that k blocks of every kind read by: see :mod:`.synchronous`, :mod:`.limbs`."""

    config: WgmmaConfig
    decoder: Decoder
    mma_dtype: str

    if TYPE_CHECKING:

        def x_scale_shift(self, work_tile) -> Any:
            """See `ProducerWarps.x_scale_shift`."""

    @cute.jit
    def release(self, memory, stage, teller):
        """Says that this warp has done with a stage."""
        if teller:
            barrier = memory.empty + stage
            if const_expr(self.config.multicast > 1):
                there = numbers.address_in(Int32(barrier.toint()), cute.arch.lane_idx())
                numbers.arrive_in_cluster(there)
            else:
                cute.arch.mbarrier_arrive(barrier)

    def load_codes(self, address) -> list[list[Any]]:
        """[tile][chunk of its codes] a thread's 16 bytes of a k block; address: of its first ones."""
        config = self.config
        return [
            [
                ptx.load_shared_vector(address, (i * config.k_block_tiles + tile) * TILE_BYTES, 4)
                for tile in range(config.k_block_tiles)
            ]
            for i in range(config.n_tiles)
        ]

    def load_groups(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """[group of the k block] (scales, offsets) of the thread's two rows of a tile; scales are packed pairs."""
        config = self.config
        scales = memory.scales + stage * config.scale_stage_bytes
        zeros = memory.zeros + stage * config.zero_stage_bytes
        # The rows of a group of a tile lie together, the groups of a tile behind each other.
        first_tile, row = place.row // TILE_N, place.row % TILE_N
        groups = []
        for group in range(config.k_block_groups):
            at = (first_tile + tile) * (config.k_block_groups * TILE_N) + group * TILE_N + row
            found = [ptx.load_shared_part(scales + at * 2, 16 * half, 2) for half in range(2)]
            pairs = [ptx.prmt(word, word, Uint32(0x1010)) for word in found]
            points = [self.decoder.symmetric_zero] * 2
            if config.zero_point:
                points = [ptx.load_shared_part(zeros + at, 8 * half, 1) for half in range(2)]
            groups.append((pairs, self.decoder.row_numbers(pairs, points)))
        return groups

    def load_numbers(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """As :meth:`load_groups`; scales are fp32 numbers."""
        return [
            ([self.to_float(pair) for pair in pairs], offsets)
            for pairs, offsets in self.load_groups(memory, stage, place, tile)
        ]

    def to_float(self, word):
        """The low 16 bits of a word, of the configuration's dtype."""
        return ptx.bf16x2_low_to_float(word) if self.config.dtype == "bf16" else ptx.half2_low_to_float(word)
