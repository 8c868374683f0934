"""Shared memory of a CTA that multiplies keys with queries."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.extend.config import WARPGROUP_WARPS, WORK_BYTES, WORK_SLOTS, ExtendConfig

BLOCK_BYTES = 32  # of fp32 numbers of 8 queries


@dataclass(frozen=True)
class KeyRowsMemory:
    """Pointers and addresses; a tile is found by its operand (KEYS or VALUES) and stage.

    Attributes:
        tile_pointer, tiles: raw codes of K's stages, then V's.
        headers: [stage][header words of K, then those of V][token], a word each.
        queries: B operand [tile_rows, head_dim], by slabs of 64 columns.
        probabilities: of each warpgroup two B operands [tile_rows, 64 tokens].
        told: fp32 [warpgroup][warp][tile_rows], which warps tell each other, and the same of softmax references, which
            each warp keeps.
        tops: fp32 [warps], of each one's queries.
        slots, full, empty, work_full, work_empty: as `extend.memory.ExtendMemory` has them.
    """

    config: ExtendConfig
    tile_pointer: cute.Pointer
    tiles: Int32
    headers: Int32
    queries: Int32
    probabilities: Int32
    told: Int32
    tops: Int32
    slots: Int32
    full: cute.Pointer
    empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer

    @staticmethod
    def allocate(config: ExtendConfig) -> KeyRowsMemory:
        smem, shape = cutlass.utils.SmemAllocator(), config.key_rows
        assert shape is not None
        pointers = [
            smem.allocate(size, byte_alignment=alignment)
            for size, alignment in (
                (config.num_stages * sum(shape.tile_bytes), 1024),
                (shape.query_bytes, 1024),
                (shape.places_bytes, 1024),
                (max(config.num_stages * sum(shape.header_bytes), 16), 16),
                (shape.told_bytes, 16),
                (shape.top_bytes, 16),
                (WORK_SLOTS * WORK_BYTES, 16),
            )
        ]
        tiles, queries, probabilities, headers, told, tops, slots = (Int32(own.toint()) for own in pointers)
        count = 2 * config.num_stages
        barriers = smem.allocate_array(cutlass.Int64, 2 * count + 2 * WORK_SLOTS)
        return KeyRowsMemory(
            config=config,
            tile_pointer=pointers[0],
            tiles=tiles,
            headers=headers,
            queries=queries,
            probabilities=probabilities,
            told=told,
            tops=tops,
            slots=slots,
            full=barriers,
            empty=barriers + count,
            work_full=barriers + 2 * count,
            work_empty=barriers + (2 * count + WORK_SLOTS),
        )

    def init_barriers(self) -> None:
        """One thread, before anybody uses them."""
        config = self.config
        for i in range(2 * config.num_stages):
            cute.arch.mbarrier_init(self.full + i, config.tile_warps * WARP_THREADS)
            cute.arch.mbarrier_init(self.empty + i, WARPGROUP_WARPS)
        for i in range(WORK_SLOTS):
            cute.arch.mbarrier_init(self.work_full + i, 1)
            cute.arch.mbarrier_init(self.work_empty + i, config.mma_warps + config.filling_warps)
        cute.arch.mbarrier_init_fence()

    def barrier(self, operand: int, stage):
        """Number of a tile among the barriers."""
        return operand * self.config.num_stages + stage

    def tile(self, operand: int, stage):
        """Address of a tile's codes."""
        return self.tiles + self.tile_offset(operand, stage)

    def tile_offset(self, operand: int, stage):
        """Bytes from the first tile."""
        sizes = self.shape.tile_bytes
        return operand * self.config.num_stages * sizes[0] + stage * sizes[operand]

    def header(self, operand: int, stage):
        """Address of the headers of a tile's rows: [header word][token]."""
        sizes = self.shape.header_bytes
        return self.headers + stage * sum(sizes) + operand * sizes[0]

    # -- what warps tell each other -----------------------------------------------------------------------------------

    def told_row(self, group, warp, lane, which: int):
        """Address of a lane's numbers of the first block of queries: what its warp has told, or, ``which`` being 1, its
        references."""
        row = which * WARPGROUP_WARPS + warp
        return self.told + group * self.shape.group_told_bytes + row * (4 * self.config.tile_rows) + 8 * (lane % 4)

    def tell(self, place, block: int, pair) -> None:
        """Numbers of a lane's two queries of a block, for the other warps."""
        ptx.store_shared(self.told_row(place.group, place.warp, place.lane, 0), BLOCK_BYTES * block, pair)

    def hear(self, group, lane, block) -> list[list[Float32]]:
        """[warp of a warpgroup][query of a lane's two]. block: its number, or a run-time integer."""
        own = self.told_row(group, 0, lane, 0)
        return [self._pair(own, block, 4 * self.config.tile_rows * warp) for warp in range(WARPGROUP_WARPS)]

    def set_references(self, place, block: int, pair) -> None:
        """Softmax references of a lane's two queries of a block, for its warp."""
        ptx.store_shared(self.told_row(place.group, place.warp, place.lane, 1), BLOCK_BYTES * block, pair)

    def references(self, place, block) -> list[Float32]:
        return self._pair(self.told_row(place.group, place.warp, place.lane, 1), block, 0)

    def _pair(self, address, block, offset: int) -> list[Float32]:
        if isinstance(block, int):
            offset += BLOCK_BYTES * block
        else:
            address = address + BLOCK_BYTES * block
        return [word.bitcast(Float32) for word in ptx.load_shared_vector(address, offset, 2)]

    @property
    def shape(self):
        shape = self.config.key_rows
        assert shape is not None
        return shape
