"""A tile's results stored by TMA: TMA tiles of 64 features in 16 bits, one on its way while the next is put together.

Threads that store 16 bytes each read the staging buffer back, ask for addresses and stay until the memory has taken
what they have; a TMA tile is one instruction of one warp, which goes on to the next tile. That output tiles leave
Hopper's SMs so is known from CUTLASS's epilogues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.device import ptx
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.results import STORE_BUFFERS, STORE_BYTES, STORE_M, TMA_TILE_ALIGNMENT
from cute_kernels.gemm.work import Operands
from layouts.weights.hopper import TILE_N

ROW_BYTES = 2 * TILE_N  # of a token's results of a tile in 16 bits: what 128-byte swizzling permutes
ALIGNED = 8  # results of 16 bytes, of which rows of the output are made
OUT_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class StoredOperands(Operands):
    """`Operands`, and what stores a TMA tile of the output: a TMA copy and the output [m, n] as it takes TMA tiles from
    it."""

    copy_out: cute.CopyAtom
    out_view: cute.Tensor


class TmaTileStore:
    """The storing part of a consumer warpgroup, of plain results in 16 bits."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.type = OUT_TYPES[config.dtype]

    def layout(self, count: int):
        """[tokens, features, count] of TMA tiles one behind the other, swizzled."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.type)
        return cute.tile_to_shape(atom, (STORE_M, TILE_N, count), order=(0, 1, 2))

    def operands(self, operands: Operands, m, n) -> StoredOperands:
        """On the host: with the tensor map of the output, which nobody looks at if its rows are not whole 16 bytes."""
        pitch = cute.assume((n + (ALIGNED - 1)) // ALIGNED * ALIGNED, divby=ALIGNED)
        pointer = cute.make_ptr(self.type, operands.out & Int64(-16), cute.AddressSpace.gmem, assumed_align=16)
        out = cute.make_tensor(pointer, cute.make_layout((m, n), stride=(pitch, 1)))
        tma_tile = cute.slice_(self.layout(1), (None, None, 0))
        operation = cpasync.CopyBulkTensorTileS2GOp()
        copy, view = cpasync.make_tiled_tma_atom(operation, out, tma_tile, (STORE_M, TILE_N))
        return StoredOperands(**vars(operands), copy_out=copy, out_view=view)

    @cute.jit
    def store(self, operands: StoredOperands, store, corner, acc, first: int):
        """Rounds and stores the tile whose accumulators are accumulators[first : first + tokens / 2], a TMA tile at a
        time."""
        config = self.config
        source, target = self.partition(operands, store)
        for number in cutlass.range_constexpr(config.own_m // STORE_M):
            place = target[None, corner.token // STORE_M + number, corner.row // TILE_N]
            tma_tile = source[None, number % STORE_BUFFERS]
            if const_expr(config.reduction.cuts_rows):
                if corner.token + number * STORE_M < corner.end:
                    self.store_tma_tile(operands, store, acc, first, number, tma_tile, place)
            else:
                self.store_tma_tile(operands, store, acc, first, number, tma_tile, place)

    def partition(self, operands: StoredOperands, store) -> Any:
        """(TMA tiles of the buffers, those of the output) as they are copied."""
        layout = self.layout(STORE_BUFFERS)
        pointer = cute.make_ptr(self.type, store.staging, cute.AddressSpace.smem, assumed_align=TMA_TILE_ALIGNMENT)
        tma_tiles = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.type), layout.outer)
        sources = cute.group_modes(tma_tiles, 0, 2)
        places = cute.group_modes(cute.local_tile(operands.out_view, (STORE_M, TILE_N), (None, None)), 0, 2)
        return cpasync.tma_partition(operands.copy_out, 0, cute.make_layout(1), sources, places)

    @cute.jit
    def store_tma_tile(self, operands: StoredOperands, store, acc, first: int, number: int, tma_tile, place):
        """Stores the ``number``-th TMA tile, when the last one of its buffer has left shared memory.

        The first warp asks for TMA tiles, all of its lanes count them: who is elected to need not be the same each
        time.
        """
        if store.row_warp == 0:
            # A tile cut along rows may have stored an odd number of TMA tiles, the last one from the buffer that is
            # next.
            running = 0 if self.config.reduction.cuts_rows and number == 0 else STORE_BUFFERS - 1
            cute.arch.cp_async_bulk_wait_group(running, read=True)
        self.wait(store)
        self.stage(store, acc, first + number * STORE_M // 2, number % STORE_BUFFERS * STORE_BYTES)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.wait(store)
        if store.row_warp == 0:
            cute.copy(operands.copy_out, tma_tile, place)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def send(self, operands: StoredOperands, store, corner, buffer: int, number: int):
        """Stores the ``number``-th TMA tile, which all threads have put into the ``buffer``-th buffer."""
        source, target = self.partition(operands, store)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.wait(store)
        if (store.row_warp == 0) & (corner.token + number * STORE_M < corner.end):
            place = target[None, corner.token // STORE_M + number, corner.row // TILE_N]
            cute.copy(operands.copy_out, source[None, buffer % STORE_BUFFERS], place)
            cute.arch.cp_async_bulk_commit_group()

    def wait(self, store):
        """For all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=store.warpgroup + 1, number_of_threads=WARPGROUP_THREADS)

    def stage(self, store, acc, first: int, offset: int):
        """Puts accumulators into a TMA tile, [token][feature]: stmatrix turns them around.

        Matrices: the first and the second eight features of eight tokens, then the same of the next eight. Rows of a
        matrix are in different banks, as swizzling has it: piece p of token t lies at p ^ (t % 8).
        """
        pack = ptx.pack_bf16x2 if self.config.dtype == "bf16" else ptx.pack_f16x2
        lane = store.lane
        token, piece = lane // 16 * 8 + lane % 8, store.row_warp * 2 + lane // 8 % 2
        address = store.staging + token * ROW_BYTES + (piece ^ (lane % 8)) * 16
        for pair in range(STORE_M // 16):
            place = first + 8 * pair
            words = [pack(acc[place + 2 * i], acc[place + 2 * i + 1]) for i in range(4)]
            ptx.store_matrix_x4(Int32(address), offset + pair * 16 * ROW_BYTES, words, transpose=True)

    def finish(self):
        """Waits until the TMA tiles have left shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
