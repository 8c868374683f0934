"""Warpgroup MMAs of E4M3: their operands, and an order of keys that saves exchanging probabilities between lanes.

Both operands are K-major, in rows of 128 bytes with the 128-byte swizzle. Operand B is K, or V's transpose, whose
columns are a tile's keys. With t = lane % 4, a thread holds columns 2t and 2t + 1 of every 8 columns of an accumulator,
but columns 4t to 4t + 3 of every 16 columns of operand A. So the keys in V's tile are permuted: column 4t + 2j + i of
each 16 is key 8j + 2t + i (:data:`KEYS_IN_ORDER`). A thread's probabilities then are its part of operand A: four of one
row make a word.

Hopper's tensor cores add products of E4M3 in some 14 bits. docs/design/extend_attention.md says what errors this makes.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.instruction import Asm, pure

QUARTERS = 0x28282828  # four codes of 1/4: four lanes add up the same sum, which then counts once
MMA_K = 32  # the K of an MMA of bytes
KEYS_IN_ORDER = tuple(8 * j + 2 * t + i for t in range(4) for j in range(2) for i in range(2))  # of 16 columns


@pure
def pack_e4m3x4(values: Sequence[Float32]) -> Asm[Uint32]:
    """Packs four fp32 numbers into a word, the first in the lowest byte. They are rounded to nearest-even E4M3 and
    saturated at 448."""
    return Asm(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }"
    )


def accumulators_of(word: int) -> tuple[int, int, int, int]:
    """Returns the four accumulators of a thread that become word ``word`` of the next MMA's operand A. They lie in one
    row: two neighbouring columns of each of two blocks of 8 columns."""
    first = word // 2 * 8 + word % 2 * 2
    return first, first + 1, first + 4, first + 5


def transposed(words: Sequence[Uint32]) -> list[list[Uint32]]:
    """Transposes a lane's part of V's tile: 16 words, one for each key, with codes of 4 columns. Returns [column][4
    words] of V^T."""
    columns: list[list[Uint32]] = [[], [], [], []]
    for first in range(0, len(KEYS_IN_ORDER), 4):
        a, b, c, d = (words[key] for key in KEYS_IN_ORDER[first : first + 4])
        for column, select in ((0, 0x5140), (2, 0x7362)):  # of two words their lower, upper halves' bytes in turn
            low, high = ptx.prmt(a, b, Uint32(select)), ptx.prmt(c, d, Uint32(select))
            columns[column].append(ptx.prmt(low, high, Uint32(0x5410)))
            columns[column + 1].append(ptx.prmt(low, high, Uint32(0x7632)))
    return columns


def multiply(sums, a, b, n: int) -> None:
    """Issues sums = A B^T in FP8, as :func:`.wgmma_tiles.multiply` does in 16 bits.

    a: tensor [64, k] in shared memory, or a rank-3 fragment of registers (values, 1, k / 32). b: tensor [n, k] in
    shared memory. Both are Float8E4M3FN; tensors in shared memory come from :func:`.wgmma_tiles.tile`.
    """
    in_registers = a.memspace == cute.AddressSpace.rmem
    operation = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (wgmma_tiles.WARPGROUP_ROWS, n, MMA_K),
        OperandSource.RMEM if in_registers else OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    tiled = cute.make_tiled_mma(cute.make_mma_atom(operation), (1, 1, 1))
    thread = tiled.get_slice(0)  # operands in shared memory are the warpgroup's, not a thread's
    a_fragment = a if in_registers else tiled.make_fragment_A(thread.partition_A(a))
    b_fragment = tiled.make_fragment_B(thread.partition_B(b))
    for step in range(cute.size(b_fragment.shape[2])):
        tiled.set(warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(tiled, sums, a_fragment[None, None, step], b_fragment[None, None, step], sums)
