"""Loads the weights of resident tiles into shared memory: one work tile a CTA, all tiles of a stage at once.

A launch waits for the first weights, so they are loaded before other warps know of the barriers, and where each tile
begins is computed once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.gemm.wgmma.config import ResidentConfig
from cute_kernels.gemm.wgmma.loads import first_group, product
from cute_kernels.gemm.wgmma.places import Places
from layouts.weights.hopper import TILE_BYTES


def tile_bytes_of(config: ResidentConfig) -> int:
    """A tile's codes of a k block."""
    return config.k_block_tiles * TILE_BYTES


def zero_begins(config: ResidentConfig, places: Places, operands, shape, work_tile) -> list[Any]:
    """Returns where the zero points of each of a work tile's tiles begin; none for a format without them."""
    if not config.format.has_zeros:
        return []
    tile_zeros = shape.scale_groups * config.format.group_zero_bytes
    return [
        operands.zeros + product(places.weight_tile(shape, work_tile, i), tile_zeros) for i in range(config.block_tiles)
    ]


def tile_begins(config: ResidentConfig, places: Places, operands, shape, work_tile) -> list[tuple[Any, Any]]:
    """Returns where the codes and the scales of each of a work tile's tiles begin."""
    tile_codes = shape.k_blocks * tile_bytes_of(config)
    tile_scales = shape.scale_groups * config.format.group_scale_bytes
    tiles = [places.weight_tile(shape, work_tile, i) for i in range(config.block_tiles)]
    return [
        (operands.codes + product(tile, tile_codes), operands.scales + product(tile, tile_scales)) for tile in tiles
    ]


class StageLoads:
    """The load policy of a resident kernel's weights: all tiles of a stage on one barrier, by one lane."""

    def __init__(self, config: ResidentConfig, places: Places):
        self.config, self.places = config, places

    def copy_first(self, operands, shape, memory, work_tile) -> None:
        """Asks for the first k block."""
        begins = self.begins(operands, shape, work_tile)
        self.copy_stage(memory, memory.pipeline.producer_state(), work_tile.begin, begins)

    def begins(self, operands, shape, work_tile) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Returns where codes and scales, and zero points, of each tile begin."""
        given = (self.config, self.places, operands, shape, work_tile)
        return tile_begins(*given), zero_begins(*given)

    @cute.jit
    def copy_following(self, operands, shape, memory, scheduler, lane):
        """Loads all k blocks but the first.

        It computes again what the first one's copy computed: if carried here, the compiler would not know that it
        belongs to one lane.
        """
        if lane == 0:
            work_tile = scheduler.work_tile(scheduler.first)
            begins = self.begins(operands, shape, work_tile)
            here = memory.pipeline.producer_state(1)
            for k_block in cutlass.range(work_tile.begin + 1, work_tile.end, 1, unroll=1):
                memory.pipeline.producer_acquire(here)
                self.copy_stage(memory, here, k_block, begins)
                here = memory.pipeline.next(here)

    def copy_stage(self, memory, here, k_block, begins) -> None:
        """Starts loading a k block of tiles that begin as `begins` has it."""
        config, stage = self.config, here.stage
        tiles, zeros = begins
        tile_bytes, group_bytes = tile_bytes_of(config), config.format.group_scale_bytes
        scale_bytes = config.k_block_groups * group_bytes
        address = memory.pipeline.producer_expect(here, config.weight_stage_bytes)
        group = first_group(config, k_block)
        for i, (codes, scales) in enumerate(tiles):
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * tile_bytes,
                codes + k_block * tile_bytes,
                Int32(tile_bytes),
                address,
            )
            ptx.bulk_copy_to_shared(
                memory.scales + stage * config.scale_stage_bytes + i * scale_bytes,
                scales + group * group_bytes,
                Int32(scale_bytes),
                address,
            )
        zero_bytes = config.format.group_zero_bytes
        for i, points in enumerate(zeros):
            ptx.bulk_copy_to_shared(
                memory.zeros + stage * config.zero_stage_bytes + i * zero_bytes,
                points + group * zero_bytes,
                Int32(zero_bytes),
                address,
            )
