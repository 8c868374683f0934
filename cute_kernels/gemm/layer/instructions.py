"""PTX instructions that only launches of a layer's products use."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32, Int64, Uint32

from cute_kernels.device.instruction import Asm, effect, pure


@pure
def multiply_bytes(sums: Sequence[Int32], a: Sequence[Uint32], b: Sequence[Uint32]) -> Asm[list[Int32]]:
    """Computes D = A B + C of signed bytes for one warp, exact in int32: A 16 x 32, B 32 x 8, C and D 16 x 8.

    Lane 4g + t holds these elements. A: register 0 is row g, columns 4t to 4t + 3; register 1 is row g + 8, the same
    columns; registers 2 and 3 are the same rows, 16 columns to the right. B: register 0 is column g, rows 4t to 4t + 3;
    register 1 is 16 rows below. C (``sums``) and D: rows g and g + 8, columns 2t and 2t + 1.
    """
    registers = "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7}"
    return Asm(f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {registers};", count=4)


@effect
def store_shared_longs(address: Int32, offset: int, values: Sequence[Int64]) -> Asm[None]:
    """Stores two words of 64 bits to shared memory."""
    return Asm(f"st.shared.v2.b64 [$0 + {offset}], {{$1, $2}};")


@effect
def load_shared_longs(address: Int32, offset: int) -> Asm[list[Int64]]:
    """Loads two words of 64 bits from shared memory."""
    return Asm(f"ld.shared.v2.b64 {{$0, $1}}, [$2 + {offset}];", count=2)


@effect
def store_relaxed(address: Int64, word: Uint32) -> Asm[None]:
    """Stores one word to global memory, for threads that poll it by `ptx.load_relaxed`."""
    return Asm("st.relaxed.gpu.global.u32 [$0], $1;")


@effect
def fence() -> Asm[None]:
    """Makes the thread's earlier stores visible to the whole GPU before its later memory accesses."""
    return Asm("fence.acq_rel.gpu;")


@effect
def copy_elected(destination: Int32, source: Int64, num_bytes: Int32 | int, barrier: Int32) -> Asm[None]:
    """Copies as `ptx.bulk_copy_to_shared` does, by one elected lane of a converged warp. All lanes have the same
    operands. If a branch selected the lane, the compiler would add code for lanes with different addresses.
    """
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    return Asm(f"{{ .reg .pred p; elect.sync _|p, 0xffffffff; @p {copy} }}")
