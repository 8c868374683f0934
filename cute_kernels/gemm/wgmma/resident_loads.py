"""How the weights of resident tiles reach shared memory: one work tile a CTA, all tiles of a stage at once.

A launch waits for the first weights, so they are asked for before anybody else is told of barriers, and where each
tile begins is computed once. `.resident_early` has the loads of tiles that come in an order of their own.
"""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.gemm.wgmma.loads import first_group, product
from cute_kernels.gemm.wgmma.memory import TileMemory, init_barriers
from cute_kernels.gemm.wgmma.places import Places
from cute_kernels.gemm.wgmma.resident_config import ResidentConfig
from layouts.weights.hopper import TILE_BYTES


class ResidentWeights(Protocol):
    """The load policy of a resident kernel's weights."""

    def init_barriers(self, memory: TileMemory) -> None:
        """Of one thread, before any other uses them."""
        ...

    def copy_first(self, operands, shape, memory, work_tile) -> None:
        """Asks for the first k block; one lane."""
        ...

    def copy_following(self, operands, shape, memory, scheduler, lane) -> None:
        """Loads all k blocks but the first; one lane of the producer warp."""
        ...


def tile_bytes_of(config: ResidentConfig) -> int:
    """A tile's codes of a k block."""
    return config.k_block_tiles * TILE_BYTES


def zero_begins(config: ResidentConfig, places: Places, operands, shape, work_tile) -> list[Any]:
    """Where the zero points of each of a work tile's tiles begin; none of a format without them."""
    if not config.format.has_zeros:
        return []
    tile_zeros = shape.scale_groups * config.format.group_zero_bytes
    return [
        operands.zeros + product(places.weight_tile(shape, work_tile, i), tile_zeros) for i in range(config.block_tiles)
    ]


def tile_begins(config: ResidentConfig, places: Places, operands, shape, work_tile) -> list[tuple[Any, Any]]:
    """Where the codes and the scales of each of a work tile's tiles begin."""
    tile_codes = shape.k_blocks * tile_bytes_of(config)
    tile_scales = shape.scale_groups * config.format.group_scale_bytes
    tiles = [places.weight_tile(shape, work_tile, i) for i in range(config.block_tiles)]
    return [
        (operands.codes + product(tile, tile_codes), operands.scales + product(tile, tile_scales)) for tile in tiles
    ]


class StageLoads:
    """All tiles of a stage on one barrier."""

    def __init__(self, config: ResidentConfig, places: Places):
        self.config, self.places = config, places

    def init_barriers(self, memory: TileMemory) -> None:
        init_barriers(self.config, memory)

    def copy_first(self, operands, shape, memory, work_tile) -> None:
        begins = self.begins(operands, shape, work_tile)
        self.copy_stage(memory, Int32(0), work_tile.begin, begins)

    def begins(self, operands, shape, work_tile) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Where codes and scales, and zero points, of each tile begin."""
        given = (self.config, self.places, operands, shape, work_tile)
        return tile_begins(*given), zero_begins(*given)

    @cute.jit
    def copy_following(self, operands, shape, memory, scheduler, lane):
        """See `ResidentWeights`.

        What it computes is computed for the first one as well: carried here, it would not be known to be one lane's.
        """
        if lane == 0:
            work_tile = scheduler.work_tile(scheduler.first)
            begins = self.begins(operands, shape, work_tile)
            stage, phase = Int32(1), Int32(1)
            for k_block in cutlass.range(work_tile.begin + 1, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                self.copy_stage(memory, stage, k_block, begins)
                stage, phase = advance(stage, phase, self.config.num_stages)

    def copy_stage(self, memory, stage, k_block, begins) -> None:
        """Asks for a k block of tiles that begin as `begins` has it."""
        config, barrier = self.config, memory.full + stage
        tiles, zeros = begins
        tile_bytes, group_bytes = tile_bytes_of(config), config.format.group_scale_bytes
        scale_bytes = config.k_block_groups * group_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.weight_stage_bytes)
        address = Int32(barrier.toint())
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
