"""The shared memory of a CTA whose MMAs have keys as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import FLAG_BYTES, MMA_WARPGROUPS, MMA_WARPS, WORK_BYTES, WORK_SLOTS
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.instruction import Asm, effect
from cute_kernels.device.pipeline import Pipeline, fence_init

TOP_BYTES = 4 * MMA_WARPS


# Lanes with a nonzero condition execute these; a branch would keep other instructions from moving across.


@effect
def arrive_if(condition: Int32, barrier: Int32) -> Asm[None]:
    """Arrives on the mbarrier at address ``barrier``, in lanes whose ``condition`` is not 0."""
    return Asm("{ .reg .pred p; setp.ne.u32 p, $0, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; }")


@effect
def store_word_if(condition: Int32, address: Int32, word: Int32) -> Asm[None]:
    """Stores a word in shared memory, in lanes whose ``condition`` is not 0."""
    return Asm("{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.shared.u32 [$1], $2; }")


@effect
def store_matrix_x2(address: Int32, offset: int, words: Sequence[Uint32]) -> Asm[None]:
    """Stores two 8x8 matrices transposed, as `ptx.store_matrix_x4` stores four. Addresses of lanes 16 to 31 are
    ignored.
    """
    return Asm(f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0 + {offset}], {{$1, $2}};")


@dataclass(frozen=True)
class KeyRowsMemory:
    """The shared memory of a CTA with key rows. A tile is addressed by its operand (KEYS or VALUES) and its stage.

    Attributes:
        tile_pointer, tiles: pointer to the raw codes, and their address: codes of all of K's stages, then of V's
            stages.
        headers: [stage][header words of K, then of V][token], a word each.
        queries: for each head a B operand [tile_rows, head_dim], in slabs of 64 columns.
        probabilities: for each warpgroup two B operands [tile_rows, 64 tokens].
        told: fp32 values that a warpgroup's warps exchange. For each warpgroup there are [warp][tile_rows], then
            [tile_rows] for all warps together.
        tops: fp32 [8], the largest magnitude among each warp's queries. After them, a word for each warpgroup, see
            `flag`.
        slots, work: as in `loads.memory.ExtendMemory`.
        tile_pipeline: one pipeline for K's and V's tiles: a consumer waits once and arrives once for each block.
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
    tile_pipeline: Pipeline
    work: Pipeline

    @staticmethod
    def allocate(config: ExtendConfig) -> KeyRowsMemory:
        smem, shape = cutlass.utils.SmemAllocator(), config.key_rows
        assert shape is not None
        pointers = [
            smem.allocate(size, byte_alignment=alignment)
            for size, alignment in (  # 1024: where the 128-byte swizzle repeats
                (config.pipeline.num_stages * sum(shape.tile_bytes), 1024),
                (shape.heads * shape.query_bytes, 1024),
                (2 * MMA_WARPGROUPS * shape.probability_bytes, 1024),
                (max(config.pipeline.num_stages * sum(shape.header_bytes), 16), 16),
                (shape.told_bytes, 16),
                (TOP_BYTES + FLAG_BYTES, 16),
                (WORK_SLOTS * WORK_BYTES, 16),
            )
        ]
        tiles, queries, probabilities, headers, told, tops, slots = (Int32(own.toint()) for own in pointers)
        # Every lane of a producer warp arrives twice, for K's tile and for V's, once its own copies have arrived.
        stages, fillers = config.pipeline.num_stages, 2 * config.pipeline.producer_warps * WARP_THREADS
        readers = MMA_WARPS + config.filling_warps
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages + 2 * WORK_SLOTS)
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
            tile_pipeline=Pipeline(barriers, barriers + stages, stages, fillers, MMA_WARPS),
            work=Pipeline(barriers + 2 * stages, barriers + (2 * stages + WORK_SLOTS), WORK_SLOTS, 1, readers),
        )

    def init_barriers(self) -> None:
        """Initialises all barriers. One thread calls it, before any thread uses a barrier."""
        self.tile_pipeline.init()
        self.work.init()
        fence_init()

    @property
    def pipelines(self) -> tuple[Pipeline, Pipeline]:
        """The pipelines of K and of V, as in `ExtendMemory`; here they are the same."""
        return self.tile_pipeline, self.tile_pipeline

    def flag(self, group):
        """Returns the address of a warpgroup's flag: 1 if one of its threads has probabilities that are too large, else
        0."""
        return self.tops + TOP_BYTES + 4 * group

    def tile(self, operand: int, stage):
        """Returns the address of a tile's codes."""
        return self.tiles + self.tile_offset(operand, stage)

    def tile_offset(self, operand: int, stage):
        """Returns the offset in bytes of a tile from the first tile."""
        sizes = self.shape.tile_bytes
        return operand * self.config.pipeline.num_stages * sizes[0] + stage * sizes[operand]

    def header(self, operand: int, stage):
        """Returns the address of the headers of a tile's rows: [header word][token]."""
        sizes = self.shape.header_bytes
        return self.headers + stage * sum(sizes) + operand * sizes[0]

    @property
    def shape(self):
        shape = self.config.key_rows
        assert shape is not None
        return shape
