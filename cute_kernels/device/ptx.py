"""PTX instructions for which CuTe DSL 4.8.1 has no wrapper, or only a volatile one.

Operands and results are DSL scalars. A packed pair of 16-bit numbers is a ``Uint32``.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device.instruction import REGISTERS, Asm, effect, loaded, pure, stored, zero_extended

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def address(tensor) -> Int64:
    """Returns the address of a tensor's first element."""
    return tensor.iterator.toint()


@pure
def prmt(a: Uint32, b: Uint32, selector: Uint32) -> Asm[Uint32]:
    """Permutes bytes: byte i of the result is byte ``selector[4i+2:4i]`` of the 8 bytes (a low, b high)."""
    return Asm("prmt.b32 $0, $1, $2, $3;")


@pure
def half2_low_to_float(x: Uint32) -> Asm[Float32]:
    """Returns the low fp16 of a packed pair as fp32 (exact)."""
    return Asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }")


@pure
def half2_high_to_float(x: Uint32) -> Asm[Float32]:
    """Returns the high fp16 of a packed pair as fp32 (exact)."""
    return Asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, hi; }")


@pure
def pack_f16x2(low: Float32, high: Float32) -> Asm[Uint32]:
    """Rounds two fp32 numbers to nearest-even fp16 and packs them, ``low`` in the low half."""
    return Asm("cvt.rn.f16x2.f32 $0, $2, $1;")


@pure
def pack_bf16x2(low: Float32, high: Float32) -> Asm[Uint32]:
    """Rounds two fp32 numbers to nearest-even bf16 and packs them, ``low`` in the low half."""
    return Asm("cvt.rn.bf16x2.f32 $0, $2, $1;")


@pure
def add_f16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the sums of two packed fp16 pairs, each rounded to nearest even."""
    return Asm("add.rn.f16x2 $0, $1, $2;")


@pure
def add_bf16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the sums of two packed bf16 pairs, each rounded to nearest even (sm_90)."""
    return Asm("add.rn.bf16x2 $0, $1, $2;")


@pure
def mul_f16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the products of two packed fp16 pairs, each rounded to nearest even."""
    return Asm("mul.rn.f16x2 $0, $1, $2;")


@pure
def mul_bf16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the products of two packed bf16 pairs, each rounded to nearest even (sm_90)."""
    return Asm("mul.rn.bf16x2 $0, $1, $2;")


@pure
def fma_f16x2(a: Uint32, b: Uint32, c: Uint32) -> Asm[Uint32]:
    """Returns a * b + c of packed fp16 pairs, each rounded once."""
    return Asm("fma.rn.f16x2 $0, $1, $2, $3;")


@pure
def max_f16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns, in each half of a packed fp16 pair, the larger element of a and b. If one element is NaN, it is the
    other element.
    """
    return Asm("max.f16x2 $0, $1, $2;")


@pure
def e4m3x2_low_to_f16x2(x: Uint32) -> Asm[Uint32]:
    """Converts bytes 0 and 1 of a word, FP8 E4M3, to packed fp16 (exact)."""
    return Asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }")


@pure
def e4m3x2_high_to_f16x2(x: Uint32) -> Asm[Uint32]:
    """Converts bytes 2 and 3 of a word, FP8 E4M3, to packed fp16 (exact)."""
    return Asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, hi; }")


@pure
def exp2(x: Float32) -> Asm[Float32]:
    """Returns 2**x by the special-function unit; exp2(-inf) = 0."""
    return Asm("ex2.approx.ftz.f32 $0, $1;")


@pure
def fma(a: Float32, b: Float32, c: Float32) -> Asm[Float32]:
    """Returns a * b + c, rounded once."""
    return Asm("fma.rn.f32 $0, $1, $2, $3;")


@pure
def reciprocal(x: Float32) -> Asm[Float32]:
    """Returns 1 / x by the special-function unit, at most 1 ulp off."""
    return Asm("rcp.approx.ftz.f32 $0, $1;")


@pure
def log2(x: Float32) -> Asm[Float32]:
    """Returns log2(x) by the special-function unit; log2(0) = -inf."""
    return Asm("lg2.approx.ftz.f32 $0, $1;")


@pure
def bf16x2_low_to_float(x: Uint32) -> Asm[Float32]:
    """Returns the low bf16 of a packed pair as fp32 (exact)."""
    return Asm("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }")


@pure
def bf16x2_high_to_float(x: Uint32) -> Asm[Float32]:
    """Returns the high bf16 of a packed pair as fp32 (exact)."""
    return Asm("{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }")


@dsl_user_op
def pinned(x, *, loc=None, ip=None):
    """Returns the value unchanged. The compiler cannot see where the result comes from, so it keeps the value in a
    register instead of computing it again.
    """
    kind = type(x)
    move, letter, value = f"mov.b{kind.width} $0, $1;", REGISTERS[kind], x.ir_value(loc=loc, ip=ip)
    kept = llvm.inline_asm(kind.mlir_type, [value], move, f"={letter},{letter}", has_side_effects=True, loc=loc, ip=ip)
    return kind(kept)


@pure
def absolute(x: Float32) -> Asm[Float32]:
    """Returns |x|."""
    return Asm("abs.f32 $0, $1;")


@pure
def fmax(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns max(a, b); if one is NaN, the other."""
    return Asm("max.f32 $0, $1, $2;")


@effect
def transpose_8x8(x: Uint32) -> Asm[Uint32]:
    """Transposes an 8 x 8 matrix of 16-bit elements held by a warp, one packed pair a lane (movmatrix)."""
    # A warp-collective: must not be moved into divergent code, so it is marked as having side effects.
    return Asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", memory=False)


@pure
def mma_m16n8k16(c: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, dtype: str) -> Asm[list[Float32]]:
    """Returns D = A B + C of one warp. A lane has four packed pairs of A [16, 16], two of B [16, 8], and four fp32 of C
    and D [16, 8].

    ``dtype`` is "f16" or "bf16". fp16 subnormal operands are used exactly, at full speed.
    """
    registers = "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7}"
    return Asm(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {registers};", count=4)


@pure
def mma_m16n8k8(c: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, dtype: str) -> Asm[list[Float32]]:
    """Multiplies as :func:`mma_m16n8k16` does, with K = 8: a lane has two packed pairs of A and one of B."""
    registers = "{$0, $1, $2, $3}, {$8, $9}, {$10}, {$4, $5, $6, $7}"
    return Asm(f"mma.sync.aligned.m16n8k8.row.col.f32.{dtype}.{dtype}.f32 {registers};", count=4)


@effect
def load_matrix_x4(address: Int32, offset: int, *, transpose: bool) -> Asm[list[Uint32]]:
    """Loads four 8 x 8 matrices of 16-bit elements (ldmatrix.x4). Lane i gives the address of row i%8 of matrix i//8.

    ``offset`` bytes, known at compile time, are added to every address.
    """
    trans = ".trans" if transpose else ""
    return Asm(f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];", count=4)


@effect
def store_matrix_x4(address: Int32, offset: int, words: Sequence[Uint32], *, transpose: bool) -> Asm[None]:
    """Stores four 8 x 8 matrices of 16-bit elements (stmatrix.x4). Lane i gives the address of row i%8 of matrix i//8.

    Lane (g, t) = (lane / 4, lane % 4) holds columns 2t and 2t + 1 of row g of each matrix; with ``transpose`` rows 2t
    and 2t + 1 of column g.
    """
    trans = ".trans" if transpose else ""
    return Asm(f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0 + {offset}], {{$1, $2, $3, $4}};")


@effect
def bulk_copy_to_shared(destination: Int32, source: Int64, num_bytes: Int32, barrier: Int32) -> Asm[None]:
    """Copies ``num_bytes`` by cp.async.bulk, global -> shared. ``barrier`` counts the bytes. Size and addresses are
    multiples of 16.
    """
    return Asm("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];")


@effect
def async_copy_word(destination: Int32, source: Int64) -> Asm[None]:
    """Copies 4 bytes by cp.async, global -> shared. Wider copies would need rows with more alignment."""
    return Asm("cp.async.ca.shared.global [$0], [$1], 4;")


@effect
def load_shared(address: Int32, offset: int) -> Asm[Uint32]:
    """Loads one 32-bit word of shared memory at ``address + offset`` bytes, ``offset`` known at compile time."""
    return Asm(f"ld.shared.u32 $0, [$1 + {offset}];")


@effect
def load_shared_vector(address: Int32, offset: int, num_words: int) -> Asm[list[Uint32]]:
    """Loads ``num_words`` (1, 2 or 4) words of shared memory in one access; the address is aligned to its width."""
    return Asm(f"ld.shared{loaded(num_words)}, [${num_words} + {offset}];", count=num_words)


@effect
def load_shared_part(address: Int32, offset: int, num_bytes: int) -> Asm[Uint32]:
    """Loads 1, 2 or 4 bytes of shared memory at ``address + offset``, zero-extended."""
    return Asm(zero_extended("ld.shared", num_bytes, f"[$1 + {offset}]"))


@effect
def store_shared(address: Int32, offset: int, values: Sequence) -> Asm[None]:
    """Stores 1, 2 or 4 values of 32 bits (all fp32 or all words) in shared memory in one access, aligned to its
    width."""
    kind, inputs = stored(values, 1)
    return Asm(f"st.shared{kind} [$0 + {offset}], {inputs};")


@effect
def store_shared_half(address: Int32, offset: int, word: Uint32) -> Asm[None]:
    """Stores the lower 16 bits of a word in shared memory."""
    return Asm(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; st.shared.b16 [$0 + {offset}], low; }}")


@effect
def store_shared_zero16(address: Int32, offset: int, zero: Uint32 | int = 0) -> Asm[None]:
    """Stores 16 zero bytes in shared memory."""
    return Asm(f"st.shared.v4.u32 [$0 + {offset}], {{$1, $1, $1, $1}};")


@effect
def store_shared_zero(address: Int32, zero: Uint32 | int = 0) -> Asm[None]:
    """Stores 4 zero bytes in shared memory."""
    return Asm("st.shared.u32 [$0], $1;")


@effect
def load_global_words(address: Int64, offset: int, num_words: int, *, constant: bool = True) -> Asm[list[Uint32]]:
    """Loads 1, 2 or 4 words of global memory in one access, which the compiler does not move.

    constant: whether the words stay unchanged while the kernel runs. If not, the access keeps its order among other
    accesses.
    """
    load = f"ld.global{'.nc' if constant else ''}{loaded(num_words)}, [${num_words} + {offset}];"
    return Asm(load, count=num_words, memory=not constant)


@effect
def load_global_or(condition: Int32, address: Int64, otherwise: Int32) -> Asm[Uint32]:
    """Returns a word of global memory if ``condition`` is not 0; else ``otherwise``, without an access. The word must
    stay unchanged while the kernel runs."""
    load = "mov.u32 $0, $3; @p ld.global.nc.u32 $0, [$2];"
    return Asm(f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; {load} }}", early=True, memory=False)


@effect
def store_global(address: Int64, values: Sequence, *, offset: int = 0) -> Asm[None]:
    """Stores 1, 2 or 4 values of 32 bits (all fp32 or all words) in global memory in one access, at ``address +
    offset`` bytes."""
    kind, inputs = stored(values, 1)
    return Asm(f"st.global{kind} [$0+{offset}], {inputs};")


@effect
def prefetch_line(address: Int64) -> Asm[None]:
    """Prefetches the line of global memory around an address into the SM's L1 cache."""
    return Asm("prefetch.global.L1 [$0];", memory=False)


@effect
def load_relaxed(address: Int64, num_words: int, *, offset: int = 0) -> Asm[list[Uint32]]:
    """Loads 2 or 4 words of global memory at ``address + offset`` bytes, as last written by any CTA of the GPU
    (relaxed)."""
    return Asm(f"ld.relaxed.gpu.global{loaded(num_words)}, [${num_words}+{offset}];", count=num_words)


@effect
def load_relaxed_part(address: Int64, num_bytes: int) -> Asm[Uint32]:
    """Loads 2 or 4 bytes of global memory as last written by any CTA of the GPU (relaxed), zero-extended."""
    return Asm(zero_extended("ld.relaxed.gpu.global", num_bytes, "[$1]"))


@effect
def atomic_add(address: Int64, value: Int32) -> Asm[Int32]:
    """Adds to a word of global memory at GPU scope, without ordering other accesses. Returns the word's old value."""
    return Asm("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;")


@effect
def warp_sum(x: Int32) -> Asm[Int32]:
    """Returns the sum over the lanes of a warp, in all of them."""
    # A warp-collective, as is `warp_max`: must not be moved into divergent code.
    return Asm("redux.sync.add.s32 $0, $1, 0xffffffff;", memory=False)


@effect
def warp_max(x: Int32) -> Asm[Int32]:
    """Returns the maximum over the lanes of a warp, in all of them."""
    return Asm("redux.sync.max.s32 $0, $1, 0xffffffff;", memory=False)
