"""Warpgroup MMAs over bf16 or fp16 tiles of shared memory in the 128-byte swizzle: layouts, operands, issue.

A tile has R rows and C columns, C a multiple of 64. It consists of C / 64 slabs; a slab has R rows of 128 bytes. Row r
of a slab has its 16-byte pieces permuted by ``piece ^ (r % 8)``. The same bytes serve as a K-major operand [rows,
columns] and as an MN-major operand [columns, rows]: a tile can be K in one product and V in the next.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Numeric
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource, SmemLayoutAtomKind

from cute_kernels.device.types import Index

WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64  # M of an instruction
SLAB_COLUMNS = 64
ROW_BYTES = 128  # of a row in a slab
PIECE_BYTES = 16  # what the swizzle permutes


def piece_offset(row: Int32, piece: Index) -> Int32:
    """Returns the byte offset in a slab of 16-byte piece ``piece`` (0 to 7) of a row."""
    return row * ROW_BYTES + (piece ^ (row & 7)) * PIECE_BYTES


def tile(pointer, rows: int, columns: int, dtype: type[Numeric] = BFloat16) -> cute.Tensor:
    """Returns the K-major tensor [rows, columns] at a pointer to shared memory aligned to 1024 bytes; BFloat16 or
    Float16."""
    return _tensor(pointer, tile_layout(rows, columns, dtype), dtype)


def tile_layout(rows: int, columns: int, dtype: type[Numeric] = BFloat16):
    """Returns the layout of :func:`tile`, with its swizzle."""
    atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


def transposed_tile(pointer, rows: int, columns: int, dtype: type[Numeric] = BFloat16) -> cute.Tensor:
    """Returns the bytes of :func:`tile` as the MN-major tensor [columns, rows]."""
    atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.MN_SW128, dtype)
    return _tensor(pointer, cute.tile_to_shape(atom, (columns, rows), order=(1, 0)), dtype)


def _tensor(pointer, layout, dtype) -> cute.Tensor:
    # Descriptors are made of affine layouts: the swizzle goes with the pointer.
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def mma(
    n: int, *, a_in_registers: bool = False, b_transposed: bool = False, dtype: type[Numeric] = BFloat16
) -> cute.TiledMma:
    """Returns the MMA of one warpgroup with M = 64, N = ``n`` and fp32 accumulators. Make a new one for every use, as
    it holds state."""
    operation = warpgroup.MmaF16BF16Op(
        dtype,
        Float32,
        (WARPGROUP_ROWS, n, 16),
        OperandSource.RMEM if a_in_registers else OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.MN if b_transposed else OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(operation), (1, 1, 1))


def make_sums(n: int) -> Any:
    """Makes a thread's fp32 accumulators of a 64 x n product: 4 for every 8 columns, see :func:`sum_place`."""
    tiled = mma(n)
    return cute.make_rmem_tensor(tiled.partition_shape_C((WARPGROUP_ROWS, n)), Float32)


def part_of_sums(sums, n: int, part: int) -> Any:
    """Returns a view of the accumulators of a wider product. The view has the columns ``part * n`` to ``(part + 1) * n
    - 1``, as a 64 x n product.
    """
    shape = mma(n).partition_shape_C((WARPGROUP_ROWS, n))
    return cute.make_tensor(sums.iterator + part * (n // 2), cute.make_layout(shape))


def sum_place(index: int) -> tuple[int, int]:
    """Returns (row, column) of a thread's ``index``-th accumulator, relative to the thread's first accumulator.

    Lane l of warp w has its first accumulator in row 16 w + l / 4, column 2 (l % 4).
    """
    return 8 * (index >> 1 & 1), 8 * (index >> 2) + (index & 1)


def multiply(sums, a, b, n: int, *, zero: bool = False, b_transposed: bool = False, steps: range | None = None) -> None:
    """Issues sums += A B^T, or sums = A B^T with ``zero``. The caller commits and waits.

    Args:
        a: K-major tensor [64, k] in shared memory, or a rank-3 fragment of registers (values, 1, k / 16).
        b: [n, k] in shared memory, from :func:`tile` or, with b_transposed, from :func:`transposed_tile`.
        steps: indices of the k16 steps to multiply; by default all.
    """
    in_registers = a.memspace == cute.AddressSpace.rmem
    tiled = mma(n, a_in_registers=in_registers, b_transposed=b_transposed, dtype=b.element_type)
    thread = tiled.get_slice(0)  # operands in shared memory are the warpgroup's, not a thread's
    a_fragment = a if in_registers else tiled.make_fragment_A(thread.partition_A(a))
    b_fragment = tiled.make_fragment_B(thread.partition_B(b))
    for step in steps or range(cute.size(b_fragment.shape[2])):
        tiled.set(warpgroup.Field.ACCUMULATE, not (zero and step == 0))
        cute.gemm(tiled, sums, a_fragment[None, None, step], b_fragment[None, None, step], sums)


def begin() -> None:
    """Makes earlier writes of registers visible to the MMAs of a commit group. Call it before the commit group's first
    :func:`multiply`.
    """
    warpgroup.fence()


def commit() -> None:
    """Commits the MMAs since the last commit as one commit group."""
    warpgroup.commit_group()


def wait(pending: int = 0) -> None:
    """Waits until at most ``pending`` commit groups are running."""
    warpgroup.wait_group(pending)
