"""Rounding, division and 8-bit floats as PTX defines them: instructions that number formats are built from.

As in :mod:`cute_kernels.device.ptx`, arithmetic has no side effects, so the compiler may move, merge and drop it.
"""

import struct
from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device.ptx import _effect, _pure, struct_of

ROUNDER = 12582912.0  # 1.5 * 2**23: x + ROUNDER is x rounded to an integer (ties to even) in its low mantissa bits
ROUNDER_BITS = 0x4B400000


@dsl_user_op
def fmin(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """min(a, b); a NaN operand loses against a number."""
    return _pure(Float32, [Float32(a), Float32(b)], "min.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def min_or_nan(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """min(a, b), NaN if either is."""
    return _pure(Float32, [Float32(a), Float32(b)], "min.NaN.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def max_or_nan(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """max(a, b), NaN if either is."""
    return _pure(Float32, [Float32(a), Float32(b)], "max.NaN.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def greater_magnitude(a: Uint32, b: Uint32, *, dtype: str, loc=None, ip=None) -> Uint32:
    """Of two packed pairs the elements of greater magnitude, NaN if either is; their signs mean nothing.

    dtype: "bf16" or "fp16".
    """
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return _pure(Uint32, [Uint32(a), Uint32(b)], f"max.NaN.xorsign.abs.{kind} $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def multiply(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a * b rounded to nearest, subnormals kept, never fused with what follows."""
    return _pure(Float32, [Float32(a), Float32(b)], "mul.rn.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def add(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a + b rounded to nearest, subnormals kept, never fused with what came before."""
    return _pure(Float32, [Float32(a), Float32(b)], "add.rn.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def fma_in_unit(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c rounded to nearest, then brought into [0, 1]; NaN becomes 0."""
    return _pure(
        Float32, [Float32(a), Float32(b), Float32(c)], "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", loc=loc, ip=ip
    )


@dsl_user_op
def divide(a: Float32, b: float, *, loc=None, ip=None) -> Float32:
    """a / b rounded to nearest as IEEE 754 has it, subnormals kept, for finite a and a constant b of few digits.

    Five instructions in double precision, whose correctly rounded quotient (Markstein 1990) is exact where a's and b's
    quotient lies halfway between two subnormals; div.rn.f32 would be a call, around which registers are spilled.
    """
    over, minus = (struct.pack(">d", x).hex() for x in (1.0 / b, -b))
    code = (
        "{ .reg .f64 x, q, r; cvt.f64.f32 x, $1; "
        f"mul.rn.f64 q, x, 0d{over}; fma.rn.f64 r, q, 0d{minus}, x; fma.rn.f64 q, r, 0d{over}, q; "
        "cvt.rn.f32.f64 $0, q; }"
    )
    return _pure(Float32, [Float32(a)], code, "=f,f", loc=loc, ip=ip)


@dsl_user_op
def reciprocal_root(x: Float32, *, loc=None, ip=None) -> Float32:
    """x**-0.5 by the special-function unit, relative error below 2**-22."""
    return _pure(Float32, [Float32(x)], "rsqrt.approx.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def cosine(x: Float32, *, loc=None, ip=None) -> Float32:
    """cos(x) by the special-function unit; off by at most 2**-20.5 for x in [-2 pi, 2 pi]."""
    return _pure(Float32, [Float32(x)], "cos.approx.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def sine(x: Float32, *, loc=None, ip=None) -> Float32:
    """sin(x) by the special-function unit; off by at most 2**-20.5 for x in [-2 pi, 2 pi]."""
    return _pure(Float32, [Float32(x)], "sin.approx.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def to_float(x: Int32, *, loc=None, ip=None) -> Float32:
    """A signed integer rounded to nearest fp32."""
    return _pure(Float32, [Int32(x)], "cvt.rn.f32.s32 $0, $1;", "=f,r", loc=loc, ip=ip)


@dsl_user_op
def bits(x: Float32, *, loc=None, ip=None) -> Uint32:
    """The bits of an fp32."""
    return _pure(Uint32, [Float32(x)], "mov.b32 $0, $1;", "=r,f", loc=loc, ip=ip)


@dsl_user_op
def from_bits(x: Uint32, *, loc=None, ip=None) -> Float32:
    """The fp32 with these bits."""
    return _pure(Float32, [Uint32(x)], "mov.b32 $0, $1;", "=f,r", loc=loc, ip=ip)


@dsl_user_op
def pack_e4m3x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Uint32:
    """Two fp32 rounded to nearest-even E4M3, saturating at 448, in the low two bytes; the others are 0."""
    return _pack_fp8("e4m3x2", low, high, loc=loc, ip=ip)


@dsl_user_op
def pack_e5m2x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Uint32:
    """Two fp32 rounded to nearest-even E5M2, saturating at 57344, in the low two bytes; the others are 0."""
    return _pack_fp8("e5m2x2", low, high, loc=loc, ip=ip)


def _pack_fp8(kind: str, low: Float32, high: Float32, *, loc=None, ip=None) -> Uint32:
    asm = f"{{ .reg .b16 t; cvt.rn.satfinite.{kind}.f32 t, $1, $2; cvt.u32.u16 $0, t; }}"
    return _pure(Uint32, [Float32(high), Float32(low)], asm, "=r,f,f", loc=loc, ip=ip)


@dsl_user_op
def e4m3x2_to_f16x2(x: Uint32, *, loc=None, ip=None) -> Uint32:
    """The low two bytes, E4M3, as a packed fp16 pair (exact)."""
    return _pure(
        Uint32,
        [Uint32(x)],
        "{ .reg .b16 t; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 $0, t; }",
        "=r,r",
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def multiply_high(a: Uint64, b: Uint64, *, loc=None, ip=None) -> Uint64:
    """The upper 64 bits of a 128-bit product."""
    return _pure(Uint64, [Uint64(a), Uint64(b)], "mul.hi.u64 $0, $1, $2;", "=l,l,l", loc=loc, ip=ip)


@dsl_user_op
def multiply_high_u32(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The upper 32 bits of a 64-bit product."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "mul.hi.u32 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def load_global_part(address: Int64, offset: int, num_bytes: int, *, loc=None, ip=None) -> Uint32:
    """1, 2 or 4 bytes of read-only global memory, zero-extended."""
    if num_bytes == 4:
        asm = f"ld.global.nc.u32 $0, [$1 + {offset}];"
    else:
        asm = f"{{ .reg .b16 t; ld.global.nc.u{8 * num_bytes} t, [$1 + {offset}]; cvt.u32.u16 $0, t; }}"
    value = Int64(address).ir_value(loc=loc, ip=ip)
    return Uint32(llvm.inline_asm(Uint32.mlir_type, [value], asm, "=r,l", has_side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def store_global_part(address: Int64, offset: int, value: Uint32, num_bytes: int, *, loc=None, ip=None) -> None:
    """The low 1 or 2 bytes of a word to global memory."""
    kind = {1: "u8", 2: "u16"}[num_bytes]
    asm = f"{{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.{kind} [$0 + {offset}], t; }}"
    _effect([Int64(address), Uint32(value)], asm, "l,r", loc=loc, ip=ip)


@dsl_user_op
def store_global_words(address: Int64, offset: int, words: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """1, 2 or 4 words to global memory in one access, aligned to its width."""
    inputs = ", ".join(f"${i + 1}" for i in range(len(words)))
    target = f".v{len(words)}.u32 [$0 + {offset}], {{{inputs}}};" if len(words) > 1 else f".u32 [$0 + {offset}], $1;"
    operands = [Int64(address), *(Uint32(word) for word in words)]
    _effect(operands, "st.global" + target, ",".join(["l"] + ["r"] * len(words)), loc=loc, ip=ip)


@dsl_user_op
def multiply_bf16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Products of two packed bf16 pairs, each rounded to nearest even, subnormals kept."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32, *, loc=None, ip=None) -> Uint32:
    """a * b + c of packed bf16 pairs, each rounded once, subnormals kept."""
    operands = [Uint32(a), Uint32(b), Uint32(c)]
    return _pure(Uint32, operands, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def load_global_if(
    condition: Int32, address: Int64, offset: int, num_words: int = 4, *, constant: bool = True, loc=None, ip=None
) -> list[Uint32]:
    """2 or 4 words of global memory where ``condition`` is not 0, else zeros and no access.

    constant: nobody writes them while the kernel runs. If not, the access stays behind what it must not pass.
    """
    u32 = Uint32.mlir_type
    outputs = [f"${i}" for i in range(num_words)]
    struct = llvm.inline_asm(
        struct_of(u32, num_words),
        [Int32(condition).ir_value(loc=loc, ip=ip), Int64(address).ir_value(loc=loc, ip=ip)],
        f"{{ .reg .pred p; setp.ne.b32 p, ${num_words}, 0; {' '.join(f'mov.u32 {word}, 0;' for word in outputs)} "
        f"@p ld.global{'.nc' if constant else ''}.v{num_words}.u32 {{{', '.join(outputs)}}}, "
        f"[${num_words + 1} + {offset}]; }}",
        ",".join(["=&r"] * num_words) + (",r,l" if constant else ",r,l,~{memory}"),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(u32, struct, [i], loc=loc, ip=ip)) for i in range(num_words)]


@dsl_user_op
def copy_async(destination: Int32, source: Int64, num_bytes: Int32, *, loc=None, ip=None) -> None:
    """cp.async of 16 bytes, global -> shared, past L1: ``num_bytes`` are read, the rest are zeros."""
    operands = [Int32(destination), Int64(source), Int32(num_bytes)]
    _effect(operands, "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r", loc=loc, ip=ip)


@dsl_user_op
def copy_async_if(condition: Int32, destination: Int32, source: Int64, num_bytes: Int32, *, loc=None, ip=None) -> None:
    """:func:`copy_async` if condition is not 0."""
    operands = [Int32(condition), Int32(destination), Int64(source), Int32(num_bytes)]
    asm = "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.cg.shared.global [$1], [$2], 16, $3; }"
    _effect(operands, asm, "r,r,l,r", loc=loc, ip=ip)


@dsl_user_op
def barrier_any(condition: Int32, barrier: Int32 | int, num_threads: int, *, loc=None, ip=None) -> Int32:
    """Waits for ``num_threads`` threads at a named barrier; 1 in all of them if the condition of any is not 0.

    What they have written to shared memory before is seen by all after it.
    """
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int32(operand).ir_value(loc=loc, ip=ip) for operand in (condition, barrier)],
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            f"bar.red.or.pred q, $2, {num_threads}, p; selp.s32 $0, 1, 0, q; }}",
            "=r,r,r,~{memory}",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def active_lanes(*, loc=None, ip=None) -> Uint32:
    """The lanes of the warp that are here. Never 0, which no compiler knows: a branch on it is one that stays."""
    u32 = Uint32.mlir_type
    return Uint32(llvm.inline_asm(u32, [], "activemask.b32 $0;", "=r", has_side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def copy_word_async_or(
    condition: Int32, destination: Int32, source: Int64, otherwise: Int32, *, loc=None, ip=None
) -> None:
    """cp.async of a word, global -> shared, if condition is not 0; else ``otherwise`` is stored there at once."""
    operands = [Int32(condition), Int32(destination), Int64(source), Int32(otherwise)]
    asm = (
        "{ .reg .pred p; setp.ne.s32 p, $0, 0; "
        "@p cp.async.ca.shared.global [$1], [$2], 4; @!p st.shared.u32 [$1], $3; }"
    )
    _effect(operands, asm, "r,r,l,r", loc=loc, ip=ip)


@dsl_user_op
def arrive_when_copied(barrier: Int32, *, loc=None, ip=None) -> None:
    """This thread arrives at an mbarrier, for which it is counted, once all of its cp.async so far are done."""
    _effect([Int32(barrier)], "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", loc=loc, ip=ip)


@dsl_user_op
def prefetch_line_if(condition: Int32, address: Int64, *, loc=None, ip=None) -> None:
    """Brings the line of 128 bytes around an address into L2, if condition is not 0."""
    asm = "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p prefetch.global.L2 [$1]; }"
    _effect([Int32(condition), Int64(address)], asm, "r,l", loc=loc, ip=ip)


@dsl_user_op
def prefetch_bulk_if(condition: Int32, address: Int64, num_bytes: Int32, *, loc=None, ip=None) -> None:
    """Brings ``num_bytes`` (a multiple of 16; the address too) into L2, if condition is not 0."""
    asm = "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; }"
    _effect([Int32(condition), Int64(address), Int32(num_bytes)], asm, "r,l,r", loc=loc, ip=ip)


@dsl_user_op
def address_in(address: Int32, rank: Int32, *, loc=None, ip=None) -> Int32:
    """Where a place of this CTA's shared memory lies in that of CTA ``rank`` of the cluster."""
    return _pure(Int32, [Int32(address), Int32(rank)], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def store_async(address: Int32, values: Sequence[Uint32], barrier: Int32, *, loc=None, ip=None) -> None:
    """1 or 4 words into a CTA's shared memory, counted as bytes on a barrier there; addresses of the cluster."""
    words = ", ".join(f"${i + 1}" for i in range(len(values)))
    kind, data = (".v4.b32", f"{{{words}}}") if len(values) == 4 else (".b32", words)
    asm = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{kind} [$0], {data}, [${len(values) + 1}];"
    operands = [Int32(address), *(Uint32(value) for value in values), Int32(barrier)]
    _effect(operands, asm, ",".join(["r"] * len(operands)), loc=loc, ip=ip)


@dsl_user_op
def copy_to_cluster(target: Int32, source: Int32, num_bytes: int, barrier: Int32, *, loc=None, ip=None) -> None:
    """cp.async.bulk of ``num_bytes`` (a multiple of 16; addresses too) of this CTA's shared memory into a CTA of the
    cluster, counted on a barrier there. Stores before it need a fence of the async proxy."""
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    operands = [Int32(target), Int32(source), Int32(barrier)]
    _effect(operands, f"{copy} [$0], [$1], {num_bytes}, [$2];", "r,r,r", loc=loc, ip=ip)


@dsl_user_op
def copy_to_global(target: Int64, source: Int32, num_bytes: Int32, *, loc=None, ip=None) -> None:
    """cp.async.bulk of ``num_bytes`` (a multiple of 16; addresses too) of this CTA's shared memory to global memory, in
    the thread's bulk group. Stores before it need a fence of the async proxy."""
    asm = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _effect([Int64(target), Int32(source), Int32(num_bytes)], asm, "l,r,r", loc=loc, ip=ip)


@dsl_user_op
def store_in_cluster(address: Int32, offset: int, values: Sequence[Float32], *, loc=None, ip=None) -> None:
    """Two fp32 into the shared memory of a CTA of the cluster, by their address there."""
    operands = [Int32(address), *(Float32(value) for value in values)]
    _effect(operands, f"st.shared::cluster.v2.f32 [$0 + {offset}], {{$1, $2}};", "r,f,f", loc=loc, ip=ip)


@dsl_user_op
def load_in_cluster(address: Int32, num_words: int, *, loc=None, ip=None) -> list[Uint32]:
    """2 or 4 words of the shared memory of a CTA of the cluster, by their address there."""
    u32 = Uint32.mlir_type
    outputs = ", ".join(f"${i}" for i in range(num_words))
    struct = llvm.inline_asm(
        struct_of(u32, num_words),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ld.shared::cluster.v{num_words}.u32 {{{outputs}}}, [${num_words}];",
        ",".join(["=r"] * num_words) + ",r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(u32, struct, [i], loc=loc, ip=ip)) for i in range(num_words)]


@dsl_user_op
def store_released(address: Int64, word: Uint32, *, loc=None, ip=None) -> None:
    """One word to global memory: who reads it by `load_acquired` sees all that was stored or seen before it."""
    _effect([Int64(address), Uint32(word)], "st.release.gpu.global.u32 [$0], $1;", "l,r", loc=loc, ip=ip)


@dsl_user_op
def load_acquired(address: Int64, *, loc=None, ip=None) -> Uint32:
    """One word of global memory; what follows sees what was stored before the `store_released` that it is of."""
    value = Int64(address).ir_value(loc=loc, ip=ip)
    asm = "ld.acquire.gpu.global.u32 $0, [$1];"
    return Uint32(
        llvm.inline_asm(Uint32.mlir_type, [value], asm, "=r,l,~{memory}", has_side_effects=True, loc=loc, ip=ip)
    )


@dsl_user_op
def arrive_in_cluster(barrier: Int32, *, loc=None, ip=None) -> None:
    """Arrives at an mbarrier of any CTA of the cluster, by its address there.

    Orders what is done with tiles, as arrivals at home do, but no stores to global memory: to release at the scope of
    the cluster, ptxas waits for all of the thread's stores to be visible on the GPU.
    """
    asm = "mbarrier.arrive.shared::cluster.b64 _, [$0];"
    _effect([Int32(barrier)], asm, "r", loc=loc, ip=ip)
