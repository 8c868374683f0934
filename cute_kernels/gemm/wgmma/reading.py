"""`StageReader`, by which consumer warps read a stage's codes, scales and zero points, and release stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights.decoder import CodeDecoder
from cute_kernels.gemm.device_operands import load_channel
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.places import Places
from layouts.weights.hopper import TILE_BYTES, TILE_N

FRAGMENT_BYTES = 16  # of a thread, in a tile

Shift = Callable[[Any], Any]


@dataclass(frozen=True)
class Lane:
    """A thread's offsets within a stage; run-time integers."""

    code_offset: Int32  # of its 16 bytes in the first tile of its warpgroup
    row: Int32  # its first row in the first tile of its warpgroup, among the block's
    masks: Any  # of the decoder
    k_rank: Int32  # of its warpgroup, among those that interleave k blocks
    warp: Int32
    lane: Int32
    fits: cutlass.Boolean | None = None  # of resident limbs: whether all of x that the CTA needs is made at once


def make_decoder(config: WgmmaConfig) -> CodeDecoder:
    """Makes the decoder, which turns codes into numbers."""
    make = config.format.scaling_decoder if config.scales_codes else config.format.decoder
    return make(config.dtype, HopperMath(config.dtype))


class StageReader:
    """Reads pipeline stages, for the consumer warps of a configuration. Every mainloop has a reader.

    Attributes:
        decoder: turns codes into numbers.
    """

    def __init__(self, config: WgmmaConfig, decoder: CodeDecoder | None = None):
        self.config = config
        self.decoder = decoder or make_decoder(config)

    # -- places -------------------------------------------------------------------------------------------------------

    def lane(self, shape, warp, lane, masks: Callable[[Any, Any], Any]) -> Lane:
        """Returns a thread's offsets. masks: a function of (shape, lane) that makes the mainloop's bit masks."""
        config = self.config
        # A warp has 16 rows of a tile's 64; of these a lane has rows lane // 4 and lane // 4 + 8 (wgmma's A operand).
        group, row_warp = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        first_tile = self.first_tile(group)
        return Lane(
            code_offset=first_tile * (config.k_block_tiles * TILE_BYTES)
            + row_warp * (WARP_THREADS * FRAGMENT_BYTES)
            + lane * FRAGMENT_BYTES,
            row=first_tile * TILE_N + row_warp * 16 + lane // 4,
            masks=masks(shape, lane),
            k_rank=self.k_rank(group),
            warp=warp,
            lane=lane,
        )

    def first_tile(self, group):
        """Returns the first tile of a warpgroup, among the block's tiles."""
        if self.config.k_warpgroups > 1:
            group = group % (self.config.warpgroups // self.config.k_warpgroups)
        return group * self.config.n_tiles

    def k_rank(self, group):
        """Returns a warpgroup's rank among the warpgroups that interleave the k blocks of its tiles."""
        if self.config.k_warpgroups == 1:
            return Int32(0)
        return Int32(group // (self.config.warpgroups // self.config.k_warpgroups))

    # -- stages -------------------------------------------------------------------------------------------------------

    def next_state(self, memory, state):
        """Returns the pipeline's state at the next k block of a warpgroup."""
        return memory.pipeline.next(state, self.config.k_warpgroups)

    @cute.jit
    def release(self, memory, state, releases):
        """Releases a stage that this warp has read. releases: whether this lane arrives on the stage's empty
        barrier.
        """
        if releases:
            memory.pipeline.consumer_release(state)

    def load_codes(self, address) -> list[list[Any]]:
        """Loads a thread's codes of a k block: [tile][chunk] of 16 bytes. address: that of the first chunk."""
        config = self.config
        return [
            [
                ptx.load_shared_vector(address, (i * config.k_block_tiles + tile) * TILE_BYTES, 4)
                for tile in range(config.k_block_tiles)
            ]
            for i in range(config.n_tiles)
        ]

    def load_groups(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """Loads, for each group of the k block, (scales, offsets) of the thread's two rows of a tile. Scales are as
        `scale_pair` returns them."""
        config, size = self.config, self.config.format.scale_bytes
        scales = memory.scales + stage * config.scale_stage_bytes
        zeros = memory.zeros + stage * config.zero_stage_bytes
        # The rows of a group of a tile lie together, the groups of a tile after each other.
        first_tile, row = place.row // TILE_N, place.row % TILE_N
        groups = []
        for group in range(config.k_block_groups):
            at = (first_tile + tile) * (config.k_block_groups * TILE_N) + group * TILE_N + row
            found = [ptx.load_shared_part(scales + at * size, 8 * size * half, size) for half in range(2)]
            points = [self.decoder.symmetric_zero] * 2
            if config.format.has_zeros:
                points = [ptx.load_shared_part(zeros + at, 8 * half, 1) for half in range(2)]
            pairs = [self.scale_pair(word) for word in found]
            groups.append((pairs, self.decoder.row_numbers(pairs, points)))
        return groups

    def load_numbers(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """Loads (scales, offsets) for each group as :meth:`load_groups` does, with scales as fp32 numbers, for
        mainloops that scale sums instead of weights. Scales are 1 if decoding applies the stored scales.
        """
        if self.decoder.scales_weights:
            return [([Float32(1.0)] * 2, numbers) for _, numbers in self.load_groups(memory, stage, place, tile)]
        return [
            (pairs if self.config.format.scale_bytes == 4 else [self.to_float(pair) for pair in pairs], offsets)
            for pairs, offsets in self.load_groups(memory, stage, place, tile)
        ]

    def scale_pair(self, word):
        """Returns a word with two copies of a stored scale in the configuration's dtype. A scale of four bytes is
        returned as one fp32 number."""
        if self.config.format.scale_bytes == 4:
            return word.bitcast(Float32)
        word = self.decoder.scale_word(word)
        return ptx.prmt(word, word, Uint32(0x1010))  # bytes 1 and 0, twice: the low half in both halves

    def to_float(self, word):
        """Returns the low 16 bits of a word, an element of the configuration's dtype, as fp32."""
        return ptx.bf16x2_low_to_float(word) if self.config.dtype == "bf16" else ptx.half2_low_to_float(word)


def nothing_by_lane(shape, lane):
    """Returns a 0 that the compiler must take for a value that differs between lanes.

    If all lanes have the same mask, the compiler may keep it in a uniform register. LOP3 cannot read a uniform register
    and a constant at once, so each use of the mask would take a copy and a LOP3.
    """
    return Uint32((shape.m + lane) >> 31)


def nothing(shape, lane):
    """Returns a 0 that the compiler must take for an unknown value, the same in all lanes. It is for kernels whose
    masks are never kept in uniform registers.
    """
    return Uint32(shape.m >> 31)


class Channel:
    """Loads scales and zero points that hold for all of K of a row of W, and applies such scales to the accumulators.

    Weights without groups, and weights with a second level of scales, have such scales.
    """

    def __init__(self, config: WgmmaConfig, stages: StageReader, places: Places):
        self.config, self.stages, self.places = config, stages, places

    def load(self, operands, shape, work_tile, first_tile, place: Lane) -> list[Any]:
        """Loads the scales and offsets that hold for all of K, of the thread's two rows. Returns a pair (scales,
        offsets) for each tile, or an empty list if the format has no scales for all of K.
        """
        config, places = self.config, self.places
        tile_bytes = shape.scale_groups * config.format.group_scale_bytes
        tiles = [places.weight_tile(shape, work_tile, first_tile + i) for i in range(config.n_tiles)]
        row, decoder = place.row % TILE_N, self.stages.decoder
        return [each for tile in tiles for each in load_channel(config, decoder, operands, tile, row, tile_bytes)]

    def scale(self, acc, finished, channel):
        """Stores ``finished`` accumulators in ``acc``. Multiplies them by their row's scale if the format has scales
        for all of K.
        """
        tile_acc, decoder = self.config.tile_m // 2, self.stages.decoder
        for i, value in enumerate(finished):
            if channel:
                value = value * channel[i // tile_acc][0][i // 2 % 2]
            acc[i] = value * decoder.unit if decoder.scales_weights else value


@dataclass(frozen=True)
class MainloopParts:
    """Arguments of a mainloop's constructor, besides the configuration.

    Attributes:
        masks_by_lane: whether masks are made by `nothing_by_lane`, so that no uniform register holds them.
        x_scale_shift: a function of a work tile. It returns how many scales of x a copy brings before the tile's first
            scale, since copies begin at a multiple of 16 bytes. None: 0 for every tile.
    """

    stages: StageReader
    places: Places
    masks_by_lane: bool = True
    x_scale_shift: Shift | None = None
