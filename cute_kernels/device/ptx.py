"""PTX instructions that CuTe DSL 4.8.1 has no wrapper for, or only a volatile one.

Arithmetic goes through ``llvm.inline_asm(has_side_effects=False)`` so that the compiler may move, merge and drop it;
the DSL's own ``inline_ptx`` marks everything volatile, which pins the instruction order it was traced in.
Operands and results are DSL scalars; packed 16-bit pairs travel as ``Uint32``.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def address(tensor) -> Int64:
    """Address of a tensor's first element."""
    return tensor.iterator.toint()


def _pure(result, operands: Sequence, asm: str, constraints: str, *, loc=None, ip=None):
    """One side-effect-free instruction with one result of DSL type ``result``."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return result(llvm.inline_asm(result.mlir_type, values, asm, constraints, has_side_effects=False, loc=loc, ip=ip))


@dsl_user_op
def prmt(a: Uint32, b: Uint32, selector: Uint32, *, loc=None, ip=None) -> Uint32:
    """Byte permute: result byte i is byte ``selector[4i+2:4i]`` of the 8 bytes (a low, b high)."""
    return _pure(
        Uint32, [Uint32(a), Uint32(b), Uint32(selector)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip
    )


@dsl_user_op
def half2_low_to_float(x: Uint32, *, loc=None, ip=None) -> Float32:
    """The low fp16 of a packed pair as fp32 (exact)."""
    asm = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }"
    return _pure(Float32, [Uint32(x)], asm, "=f,r", loc=loc, ip=ip)


@dsl_user_op
def half2_high_to_float(x: Uint32, *, loc=None, ip=None) -> Float32:
    """The high fp16 of a packed pair as fp32 (exact)."""
    asm = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, hi; }"
    return _pure(Float32, [Uint32(x)], asm, "=f,r", loc=loc, ip=ip)


@dsl_user_op
def pack_f16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Uint32:
    """Two fp32 values rounded to nearest-even fp16 and packed, ``low`` in the low half."""
    return _pure(Uint32, [Float32(high), Float32(low)], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", loc=loc, ip=ip)


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Uint32:
    """Two fp32 values rounded to nearest-even bf16 and packed, ``low`` in the low half."""
    return _pure(Uint32, [Float32(high), Float32(low)], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", loc=loc, ip=ip)


@dsl_user_op
def add_f16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Sums of two packed fp16 pairs, each rounded to nearest even."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "add.rn.f16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def add_bf16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Sums of two packed bf16 pairs, each rounded to nearest even (sm_90)."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def mul_f16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Products of two packed fp16 pairs, each rounded to nearest even."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def mul_bf16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Products of two packed bf16 pairs, each rounded to nearest even (sm_90)."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def fma_f16x2(a: Uint32, b: Uint32, c: Uint32, *, loc=None, ip=None) -> Uint32:
    """a * b + c of packed fp16 pairs, each rounded once."""
    operands = [Uint32(a), Uint32(b), Uint32(c)]
    return _pure(Uint32, operands, "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def max_f16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The larger ones of two packed fp16 pairs; of a number and a NaN the number."""
    return _pure(Uint32, [Uint32(a), Uint32(b)], "max.f16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip)


@dsl_user_op
def e4m3x2_low_to_f16x2(x: Uint32, *, loc=None, ip=None) -> Uint32:
    """Bytes 0 and 1 of a word, FP8 E4M3, as packed fp16 (exact)."""
    asm = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    return _pure(Uint32, [Uint32(x)], asm, "=r,r", loc=loc, ip=ip)


@dsl_user_op
def e4m3x2_high_to_f16x2(x: Uint32, *, loc=None, ip=None) -> Uint32:
    """Bytes 2 and 3 of a word, FP8 E4M3, as packed fp16 (exact)."""
    asm = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, hi; }"
    return _pure(Uint32, [Uint32(x)], asm, "=r,r", loc=loc, ip=ip)


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2**x by the special-function unit; exp2(-inf) = 0."""
    return _pure(Float32, [Float32(x)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once."""
    return _pure(
        Float32, [Float32(a), Float32(b), Float32(c)], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", loc=loc, ip=ip
    )


@dsl_user_op
def reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    """1 / x by the special-function unit, at most 1 ulp off."""
    return _pure(Float32, [Float32(x)], "rcp.approx.ftz.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """log2(x) by the special-function unit; log2(0) = -inf."""
    return _pure(Float32, [Float32(x)], "lg2.approx.ftz.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def bf16x2_low_to_float(x: Uint32, *, loc=None, ip=None) -> Float32:
    """The low bf16 of a packed pair as fp32 (exact)."""
    return _pure(Float32, [Uint32(x)], "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", "=f,r", loc=loc, ip=ip)


@dsl_user_op
def bf16x2_high_to_float(x: Uint32, *, loc=None, ip=None) -> Float32:
    """The high bf16 of a packed pair as fp32 (exact)."""
    asm = "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }"
    return _pure(Float32, [Uint32(x)], asm, "=f,r", loc=loc, ip=ip)


@dsl_user_op
def pinned(x, *, loc=None, ip=None):
    """``x`` as a value that the compiler cannot compute again: keeps loop invariants in registers."""
    dtype = type(x)
    width = {32: ("b32", "r"), 64: ("b64", "l")}[dtype.width]
    return dtype(
        llvm.inline_asm(
            dtype.mlir_type,
            [x.ir_value(loc=loc, ip=ip)],
            f"mov.{width[0]} $0, $1;",
            f"={width[1]},{width[1]}",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def absolute(x: Float32, *, loc=None, ip=None) -> Float32:
    """|x|."""
    return _pure(Float32, [Float32(x)], "abs.f32 $0, $1;", "=f,f", loc=loc, ip=ip)


@dsl_user_op
def fmax(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """max(a, b); a NaN operand loses against a number."""
    return _pure(Float32, [Float32(a), Float32(b)], "max.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip)


@dsl_user_op
def transpose_8x8(x: Uint32, *, loc=None, ip=None) -> Uint32:
    """Transposes an 8 x 8 matrix of 16-bit elements held by a warp, one packed pair a lane (movmatrix)."""
    # A warp-collective: must not be moved into divergent code, so it is marked as having side effects.
    return Uint32(
        llvm.inline_asm(
            Uint32.mlir_type,
            [Uint32(x).ir_value(loc=loc, ip=ip)],
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


def struct_of(element, count: int):
    """What an instruction with several results, of an MLIR type, returns."""
    return llvm.StructType.get_literal([element] * count)  # pyright: ignore[reportAttributeAccessIssue]


def _mma(asm: str, c: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, loc=None, ip=None):
    """Emits an mma.sync with four fp32 accumulators; returns the four results."""
    f32 = Float32.mlir_type
    result_type = struct_of(f32, 4)
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    constraints = ",".join(["=f"] * 4 + ["r"] * (len(a) + len(b)) + ["f"] * 4)
    struct = llvm.inline_asm(result_type, operands, asm, constraints, has_side_effects=False, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(f32, struct, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mma_m16n8k16(
    c: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, dtype: str, loc=None, ip=None
) -> list[Float32]:
    """D = A B + C for one warp: A 16 x 16 (four packed pairs a lane), B 16 x 8 (two), C and D fp32 16 x 8 (four).

    ``dtype`` is "f16" or "bf16". fp16 subnormal operands are used exactly, at full speed.
    """
    asm = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return _mma(asm, c, a, b, loc=loc, ip=ip)


@dsl_user_op
def mma_m16n8k8(
    c: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, dtype: str, loc=None, ip=None
) -> list[Float32]:
    """As :func:`mma_m16n8k16` with a contraction of 8: A two packed pairs a lane, B one."""
    asm = (
        f"mma.sync.aligned.m16n8k8.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    return _mma(asm, c, a, b, loc=loc, ip=ip)


@dsl_user_op
def load_matrix_x4(address: Int32, offset: int, *, transpose: bool, loc=None, ip=None) -> list[Uint32]:
    """ldmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i//8.

    ``offset`` bytes, known at compile time, are added to every address.
    """
    u32 = Uint32.mlir_type
    result_type = struct_of(u32, 4)
    trans = ".trans" if transpose else ""
    struct = llvm.inline_asm(
        result_type,
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(u32, struct, [i], loc=loc, ip=ip)) for i in range(4)]


def _effect(operands: Sequence, asm: str, constraints: str, *, loc=None, ip=None) -> None:
    """One instruction with side effects on memory and no result."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    llvm.inline_asm(
        None,
        values,
        asm,
        constraints + ("," if constraints else "") + "~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_matrix_x4(
    address: Int32, offset: int, words: Sequence[Uint32], *, transpose: bool, loc=None, ip=None
) -> None:
    """stmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i//8.

    Lane (g, t) holds columns 2t and 2t + 1 of row g of each; transposed, rows 2t and 2t + 1 of column g.
    """
    trans = ".trans" if transpose else ""
    asm = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0 + {offset}], {{$1, $2, $3, $4}};"
    _effect([Int32(address), *(Uint32(word) for word in words)], asm, "r,r,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def bulk_copy_to_shared(
    destination: Int32, source: Int64, num_bytes: Int32, barrier: Int32, *, loc=None, ip=None
) -> None:
    """cp.async.bulk global -> shared of ``num_bytes`` (a multiple of 16; addresses too), counted on ``barrier``."""
    operands = [Int32(destination), Int64(source), Int32(num_bytes), Int32(barrier)]
    asm = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _effect(operands, asm, "r,l,r,r", loc=loc, ip=ip)


@dsl_user_op
def async_copy_word(destination: Int32, source: Int64, *, loc=None, ip=None) -> None:
    """cp.async of 4 bytes, global -> shared: the narrowest, for rows that nothing wider can address."""
    _effect([Int32(destination), Int64(source)], "cp.async.ca.shared.global [$0], [$1], 4;", "r,l", loc=loc, ip=ip)


@dsl_user_op
def load_shared(address: Int32, offset: int, *, loc=None, ip=None) -> Uint32:
    """One 32-bit word of shared memory at ``address + offset`` bytes, ``offset`` known at compile time."""
    return Uint32(
        llvm.inline_asm(
            Uint32.mlir_type,
            [Int32(address).ir_value(loc=loc, ip=ip)],
            f"ld.shared.u32 $0, [$1 + {offset}];",
            "=r,r,~{memory}",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def load_shared_vector(address: Int32, offset: int, num_words: int, *, loc=None, ip=None) -> list[Uint32]:
    """``num_words`` (1, 2 or 4) words of shared memory in one access; the address is aligned to its width."""
    if num_words == 1:
        return [load_shared(address, offset, loc=loc, ip=ip)]
    u32 = Uint32.mlir_type
    outputs = ", ".join(f"${i}" for i in range(num_words))
    struct = llvm.inline_asm(
        struct_of(u32, num_words),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ld.shared.v{num_words}.u32 {{{outputs}}}, [${num_words} + {offset}];",
        ",".join(["=r"] * num_words) + ",r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(u32, struct, [i], loc=loc, ip=ip)) for i in range(num_words)]


@dsl_user_op
def load_shared_part(address: Int32, offset: int, num_bytes: int, *, loc=None, ip=None) -> Uint32:
    """1, 2 or 4 bytes of shared memory at ``address + offset``, zero-extended."""
    if num_bytes == 4:
        asm = f"ld.shared.u32 $0, [$1 + {offset}];"
    else:
        asm = f"{{ .reg .b16 t; ld.shared.u{8 * num_bytes} t, [$1 + {offset}]; cvt.u32.u16 $0, t; }}"
    value = Int32(address).ir_value(loc=loc, ip=ip)
    return Uint32(
        llvm.inline_asm(Uint32.mlir_type, [value], asm, "=r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)
    )


@dsl_user_op
def store_shared(address: Int32, offset: int, values: Sequence, *, loc=None, ip=None) -> None:
    """1, 2 or 4 values of 32 bits (all fp32 or all words) to shared memory in one access, aligned to its width."""
    kind, letter = ("f32", "f") if isinstance(values[0], Float32) else ("u32", "r")
    operands = [Int32(address), *values]
    vector = f".v{len(values)}" if len(values) > 1 else ""
    inputs = ", ".join(f"${i + 1}" for i in range(len(values)))
    asm = f"st.shared{vector}.{kind} [$0 + {offset}], " + (f"{{{inputs}}};" if vector else f"{inputs};")
    _effect(operands, asm, ",".join(["r"] + [letter] * len(values)), loc=loc, ip=ip)


@dsl_user_op
def store_shared_half(address: Int32, offset: int, word: Uint32, *, loc=None, ip=None) -> None:
    """The lower 16 bits of a word to shared memory."""
    asm = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; st.shared.b16 [$0 + {offset}], low; }}"
    _effect([Int32(address), Uint32(word)], asm, "r,r", loc=loc, ip=ip)


@dsl_user_op
def store_shared_zero16(address: Int32, offset: int, *, loc=None, ip=None) -> None:
    """16 zero bytes to shared memory."""
    zero = Uint32(0)
    _effect([Int32(address), zero], f"st.shared.v4.u32 [$0 + {offset}], {{$1, $1, $1, $1}};", "r,r", loc=loc, ip=ip)


@dsl_user_op
def store_shared_zero(address: Int32, *, loc=None, ip=None) -> None:
    """4 zero bytes to shared memory."""
    _effect([Int32(address), Uint32(0)], "st.shared.u32 [$0], $1;", "r,r", loc=loc, ip=ip)


@dsl_user_op
def load_global_words(
    address: Int64, offset: int, num_words: int, *, constant: bool = True, loc=None, ip=None
) -> list[Uint32]:
    """1, 2 or 4 words of global memory in one access, issued where it stands.

    constant: nobody writes them while the kernel runs. If not, the access stays behind what it must not pass.
    """
    u32 = Uint32.mlir_type
    outputs = ", ".join(f"${i}" for i in range(num_words))
    target = f".v{num_words}.u32 {{{outputs}}}" if num_words > 1 else ".u32 $0"
    result_type = struct_of(u32, num_words) if num_words > 1 else u32
    result = llvm.inline_asm(
        result_type,
        [Int64(address).ir_value(loc=loc, ip=ip)],
        f"ld.global{'.nc' if constant else ''}{target}, [${num_words} + {offset}];",
        ",".join(["=r"] * num_words) + (",l" if constant else ",l,~{memory}"),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    if num_words == 1:
        return [Uint32(result)]
    return [Uint32(llvm.extractvalue(u32, result, [i], loc=loc, ip=ip)) for i in range(num_words)]


@dsl_user_op
def store_global(address: Int64, values: Sequence, *, offset: int = 0, loc=None, ip=None) -> None:
    """1, 2 or 4 values of 32 bits (all fp32 or all words) to global memory in one access, ``offset`` bytes on."""
    kind, letter = ("f32", "f") if isinstance(values[0], Float32) else ("u32", "r")
    inputs = ", ".join(f"${i + 1}" for i in range(len(values)))
    asm = (
        f"st.global.{kind} [$0+{offset}], {inputs};"
        if len(values) == 1
        else f"st.global.v{len(values)}.{kind} [$0+{offset}], {{{inputs}}};"
    )
    _effect([Int64(address), *values], asm, ",".join(["l"] + [letter] * len(values)), loc=loc, ip=ip)


@dsl_user_op
def prefetch_line(address: Int64, *, loc=None, ip=None) -> None:
    """Asks for the line of global memory around an address, into the SM's L1 cache."""
    value = Int64(address).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(None, [value], "prefetch.global.L1 [$0];", "l", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_relaxed(address: Int64, num_words: int, *, offset: int = 0, loc=None, ip=None) -> list[Uint32]:
    """2 or 4 words of global memory, ``offset`` bytes on, each as some CTA of the GPU has last written it."""
    u32 = Uint32.mlir_type
    outputs = ", ".join(f"${i}" for i in range(num_words))
    struct = llvm.inline_asm(
        struct_of(u32, num_words),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        f"ld.relaxed.gpu.global.v{num_words}.u32 {{{outputs}}}, [${num_words}+{offset}];",
        ",".join(["=r"] * num_words) + ",l,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(u32, struct, [i], loc=loc, ip=ip)) for i in range(num_words)]


@dsl_user_op
def load_relaxed_part(address: Int64, num_bytes: int, *, loc=None, ip=None) -> Uint32:
    """2 or 4 bytes of global memory as some CTA of the GPU has last written them, zero-extended."""
    load = f"ld.relaxed.gpu.global.u{8 * num_bytes}"
    asm = f"{load} $0, [$1];" if num_bytes == 4 else f"{{ .reg .b16 t; {load} t, [$1]; cvt.u32.u16 $0, t; }}"
    value = Int64(address).ir_value(loc=loc, ip=ip)
    return Uint32(
        llvm.inline_asm(Uint32.mlir_type, [value], asm, "=r,l,~{memory}", has_side_effects=True, loc=loc, ip=ip)
    )


@dsl_user_op
def atomic_add(address: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """Adds to a word of global memory, at GPU scope, without ordering anything else; the word's value before."""
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int64(address).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)],
            "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;",
            "=r,l,r,~{memory}",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


def _warp_redux(operation: str, x: Int32, *, loc=None, ip=None) -> Int32:
    # A warp-collective: must not be moved into divergent code, so it is marked as having side effects.
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int32(x).ir_value(loc=loc, ip=ip)],
            f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;",
            "=r,r",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def warp_sum(x: Int32, *, loc=None, ip=None) -> Int32:
    """Sum over the lanes of a warp, in all of them."""
    return _warp_redux("add", x, loc=loc, ip=ip)


@dsl_user_op
def warp_max(x: Int32, *, loc=None, ip=None) -> Int32:
    """Maximum over the lanes of a warp, in all of them."""
    return _warp_redux("max", x, loc=loc, ip=ip)
