"""The tiles of shared memory and the fragments of registers: what the kernel writes is what wgmma reads."""

from __future__ import annotations

import pytest

from simulator import stand_in

pytest.importorskip("cutlass")

from cute_kernels.device import wgmma_tiles
from cute_kernels.mla.config import BLOCK_TOKENS, HEAD_DIM, V_HEAD_DIM
from cute_kernels.mla.loads.gather import SLAB_BYTES
from layouts import algebra
from tests.layouts.dsl_oracle import dsl_offsets, traced


def swizzled(byte: int) -> int:
    """Swizzle<3, 4, 3> on byte addresses, as the hardware's 128-byte mode applies it."""
    return byte ^ ((byte >> 7 & 7) << 4)


def place_of(row: int, column: int) -> int:
    """Byte offset in a tile as the producer warps compute it."""
    slab, within = divmod(column, wgmma_tiles.SLAB_COLUMNS)
    return slab * SLAB_BYTES + wgmma_tiles.piece_offset(stand_in(row), within // 8) + within % 8 * 2


def outer_offsets(kind: str, shape: tuple[int, int], order: tuple[int, int]) -> list[int]:
    """Element offsets of a tile's layout without its swizzle, first mode fastest."""

    def body():
        import cutlass
        from cutlass import cute
        from cutlass.cute.nvgpu import warpgroup

        atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, kind), cutlass.BFloat16)
        layout = cute.tile_to_shape(atom, shape, order=order)
        assert str(layout.inner) == "S<3,4,3>"
        return dsl_offsets(layout.outer, shape[0] * shape[1])

    return traced(body)


def test_k_major_tile_lies_where_the_gathering_warps_write():
    offsets = outer_offsets("K_SW128", (BLOCK_TOKENS, HEAD_DIM), (0, 1))
    for i, offset in enumerate(offsets):
        assert swizzled(2 * offset) == place_of(i % BLOCK_TOKENS, i // BLOCK_TOKENS)


@pytest.mark.parametrize("columns", [V_HEAD_DIM // 4, V_HEAD_DIM // 2, V_HEAD_DIM])
def test_values_are_the_transpose_of_the_same_bytes(columns):
    offsets = outer_offsets("MN_SW128", (columns, BLOCK_TOKENS), (1, 0))
    for i, offset in enumerate(offsets):
        assert swizzled(2 * offset) == place_of(i // columns, i % columns)


def test_accumulators_of_scores_are_the_operand_of_the_next_product():
    """A thread's weights, in the order of its scores, are the A fragments of the k16 steps one after the other."""

    def body():
        scores = wgmma_tiles.mma(BLOCK_TOKENS)
        values = wgmma_tiles.mma(V_HEAD_DIM // 2, a_in_registers=True, b_transposed=True)
        return str(scores.tv_layout_C_tiled), str(values.tv_layout_A_tiled)

    accumulator, operand = (algebra.parse(text) for text in traced(body))
    for thread in range(wgmma_tiles.WARPGROUP_THREADS):
        for value in range(BLOCK_TOKENS // 2):
            column, row = divmod(accumulator(thread + wgmma_tiles.WARPGROUP_THREADS * value), 64)
            step, register = divmod(value, 8)
            assert (column - 16 * step, row) == divmod(operand(thread + wgmma_tiles.WARPGROUP_THREADS * register), 64)
            below, right = wgmma_tiles.sum_place(value)
            assert row == thread // 32 * 16 + thread % 32 // 4 + below
            assert column == 2 * (thread % 4) + right


def test_sums_of_a_product_are_those_of_narrower_ones_side_by_side():
    wide, narrow = V_HEAD_DIM // 2, V_HEAD_DIM // 4

    def body():
        return [str(wgmma_tiles.mma(n, b_transposed=True).tv_layout_C_tiled) for n in (wide, narrow)]

    whole, part = (algebra.parse(text) for text in traced(body))
    threads, values = wgmma_tiles.WARPGROUP_THREADS, narrow // 2
    for thread in range(threads):
        for value in range(wide // 2):
            column, row = divmod(whole(thread + threads * value), 64)
            own, own_row = divmod(part(thread + threads * (value % values)), 64)
            assert (column, row) == (value // values * narrow + own, own_row)
