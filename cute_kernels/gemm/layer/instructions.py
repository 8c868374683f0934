"""PTX instructions that only these launches use."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device.ptx import _effect, struct_of


@dsl_user_op
def multiply_bytes(
    sums: Sequence[Int32], a: Sequence[Uint32], b: Sequence[Uint32], *, loc=None, ip=None
) -> list[Int32]:
    """D = A B + C of signed bytes for one warp, exact in int32: A 16 x 32, B 32 x 8, C and D 16 x 8.

    Of lane (g, t) A register 0 is row g, columns 4t to 4t + 3, 1 is eight rows below, 2 and 3 are as these, 16 columns
    on; B registers are column g, rows 4t to 4t + 3, and 16 rows on; sums are rows g and g + 8, columns 2t and 2t + 1.
    """
    i32 = Int32.mlir_type
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in sums]
    asm = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=r"] * 4 + ["r"] * 10)
    struct = llvm.inline_asm(struct_of(i32, 4), operands, asm, constraints, has_side_effects=False, loc=loc, ip=ip)
    return [Int32(llvm.extractvalue(i32, struct, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def store_shared_longs(address: Int32, offset: int, values: Sequence[Int64], *, loc=None, ip=None) -> None:
    """Two words of 64 bits to shared memory."""
    operands = [Int32(address), *(Int64(value) for value in values)]
    _effect(operands, f"st.shared.v2.b64 [$0 + {offset}], {{$1, $2}};", "r,l,l", loc=loc, ip=ip)


@dsl_user_op
def load_shared_longs(address: Int32, offset: int, *, loc=None, ip=None) -> list[Int64]:
    """Two words of 64 bits of shared memory."""
    i64 = Int64.mlir_type
    struct = llvm.inline_asm(
        struct_of(i64, 2),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ld.shared.v2.b64 {{$0, $1}}, [$2 + {offset}];",
        "=l,=l,r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Int64(llvm.extractvalue(i64, struct, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def store_relaxed(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """One word to global memory, for whoever polls it by `ptx.load_relaxed`."""
    _effect([Int64(address), Uint32(word)], "st.relaxed.gpu.global.u32 [$0], $1;", "l,r", loc=loc, ip=ip)


@dsl_user_op
def fence(*, loc=None, ip=None) -> None:
    """What the thread has stored is seen by the GPU before what it does next."""
    _effect([], "fence.acq_rel.gpu;", "", loc=loc, ip=ip)


@dsl_user_op
def copy_elected(destination: Int32, source: Int64, num_bytes: int, barrier: Int32, *, loc=None, ip=None) -> None:
    """As `ptx.bulk_copy_to_shared`, by one lane of a warp whose lanes are all here with the same operands.

    In a branch of one lane the compiler would ask each time which lanes have which addresses.
    """
    operands = [Int32(destination), Int64(source), Int32(num_bytes), Int32(barrier)]
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _effect(operands, f"{{ .reg .pred p; elect.sync _|p, 0xffffffff; @p {copy} }}", "r,l,r,r", loc=loc, ip=ip)
