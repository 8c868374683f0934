"""PTX instructions for number formats (rounding, division, 8-bit floats), and further copies, stores and barriers that
:mod:`.ptx` does not have.

As in :mod:`cute_kernels.device.ptx`, arithmetic has no side effects, so the compiler may move, merge and drop it.
"""

import struct
from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32, Uint64

from cute_kernels.device.instruction import Asm, effect, loaded, pure, stored, zero_extended

ROUNDER = 12582912.0  # 1.5 * 2**23: x + ROUNDER is x rounded to an integer (ties to even) in its low mantissa bits
ROUNDER_BITS = 0x4B400000


@pure
def fmin(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns min(a, b); if one is NaN, the other."""
    return Asm("min.f32 $0, $1, $2;")


@pure
def min_or_nan(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns min(a, b), NaN if either is NaN."""
    return Asm("min.NaN.f32 $0, $1, $2;")


@pure
def max_or_nan(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns max(a, b), NaN if either is NaN."""
    return Asm("max.NaN.f32 $0, $1, $2;")


@pure
def greater_magnitude(a: Uint32, b: Uint32, *, dtype: str) -> Asm[Uint32]:
    """Returns, in each half of a packed pair, whichever element of ``a`` and ``b`` has the greater magnitude; NaN if
    either is NaN. The signs are undefined.

    dtype: "bf16" or "fp16".
    """
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return Asm(f"max.NaN.xorsign.abs.{kind} $0, $1, $2;")


@pure
def multiply(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns a * b rounded to nearest, subnormals kept. The compiler never fuses it with a later addition."""
    return Asm("mul.rn.f32 $0, $1, $2;")


@pure
def add(a: Float32, b: Float32) -> Asm[Float32]:
    """Returns a + b rounded to nearest, subnormals kept. The compiler never fuses it with an earlier product."""
    return Asm("add.rn.f32 $0, $1, $2;")


@pure
def fma_in_unit(a: Float32, b: Float32, c: Float32) -> Asm[Float32]:
    """Returns a * b + c rounded to nearest, then clamped to [0, 1]; NaN becomes 0."""
    return Asm("fma.rn.sat.f32 $0, $1, $2, $3;")


@pure
def divide(a: Float32, b: float) -> Asm[Float32]:
    """Returns a / b rounded to nearest as IEEE 754 says, subnormals kept, for finite a and a constant b with few
    mantissa bits.

    The division takes five instructions in double precision (Markstein 1990). Quotients that lie halfway between two
    subnormals are exact there, so they are rounded correctly, too. div.rn.f32 would be a function call, around which
    registers are spilled.
    """
    over, minus = (struct.pack(">d", x).hex() for x in (1.0 / b, -b))
    return Asm(
        "{ .reg .f64 x, q, r; cvt.f64.f32 x, $1; "
        f"mul.rn.f64 q, x, 0d{over}; fma.rn.f64 r, q, 0d{minus}, x; fma.rn.f64 q, r, 0d{over}, q; "
        "cvt.rn.f32.f64 $0, q; }"
    )


@pure
def reciprocal_root(x: Float32) -> Asm[Float32]:
    """Returns x**-0.5 by the special-function unit, with a relative error below 2**-22."""
    return Asm("rsqrt.approx.f32 $0, $1;")


@pure
def cosine(x: Float32) -> Asm[Float32]:
    """Returns cos(x) by the special-function unit; the error is at most 2**-20.5 for x in [-2 pi, 2 pi]."""
    return Asm("cos.approx.f32 $0, $1;")


@pure
def sine(x: Float32) -> Asm[Float32]:
    """Returns sin(x) by the special-function unit; the error is at most 2**-20.5 for x in [-2 pi, 2 pi]."""
    return Asm("sin.approx.f32 $0, $1;")


@pure
def to_float(x: Int32) -> Asm[Float32]:
    """Converts a signed integer to fp32, rounded to nearest."""
    return Asm("cvt.rn.f32.s32 $0, $1;")


@pure
def bits(x: Float32) -> Asm[Uint32]:
    """Returns the bits of an fp32."""
    return Asm("mov.b32 $0, $1;")


@pure
def from_bits(x: Uint32) -> Asm[Float32]:
    """Returns the fp32 with these bits."""
    return Asm("mov.b32 $0, $1;")


@pure
def pack_e4m3x2(low: Float32, high: Float32) -> Asm[Uint32]:
    """Rounds two fp32 to nearest-even E4M3, saturating at 448. Returns them in the low two bytes of a word; the upper
    two bytes are 0."""
    return Asm("{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }")


@pure
def pack_e5m2x2(low: Float32, high: Float32) -> Asm[Uint32]:
    """Rounds two fp32 to nearest-even E5M2, saturating at 57344. Returns them in the low two bytes of a word; the upper
    two bytes are 0."""
    return Asm("{ .reg .b16 t; cvt.rn.satfinite.e5m2x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }")


@pure
def e4m3x2_to_f16x2(x: Uint32) -> Asm[Uint32]:
    """Converts the low two bytes, E4M3, to a packed fp16 pair (exact)."""
    return Asm("{ .reg .b16 t; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 $0, t; }")


@pure
def multiply_high(a: Uint64, b: Uint64) -> Asm[Uint64]:
    """Returns the upper 64 bits of a 128-bit product."""
    return Asm("mul.hi.u64 $0, $1, $2;")


@pure
def multiply_high_u32(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the upper 32 bits of a 64-bit product."""
    return Asm("mul.hi.u32 $0, $1, $2;")


@effect
def load_global_part(address: Int64, offset: int, num_bytes: int) -> Asm[Uint32]:
    """Loads 1, 2 or 4 bytes of read-only global memory, zero-extended."""
    return Asm(zero_extended("ld.global.nc", num_bytes, f"[$1 + {offset}]"), memory=False)


@effect
def store_global_part(address: Int64, offset: int, value: Uint32, num_bytes: int) -> Asm[None]:
    """Stores the low 1 or 2 bytes of a word to global memory."""
    kind = {1: "u8", 2: "u16"}[num_bytes]
    return Asm(f"{{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.{kind} [$0 + {offset}], t; }}")


@effect
def store_global_words(address: Int64, offset: int, words: Sequence[Uint32]) -> Asm[None]:
    """Stores 1, 2 or 4 words to global memory in one access, aligned to its width."""
    kind, inputs = stored(words, 1)
    return Asm(f"st.global{kind} [$0 + {offset}], {inputs};")


@pure
def multiply_bf16x2(a: Uint32, b: Uint32) -> Asm[Uint32]:
    """Returns the products of two packed bf16 pairs, each rounded to nearest even, subnormals kept."""
    return Asm("mul.rn.bf16x2 $0, $1, $2;")


@pure
def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32) -> Asm[Uint32]:
    """Returns a * b + c of packed bf16 pairs, each rounded once, subnormals kept."""
    return Asm("fma.rn.bf16x2 $0, $1, $2, $3;")


@effect
def load_global_if(
    condition: Int32, address: Int64, offset: int, num_words: int = 4, *, constant: bool = True
) -> Asm[list[Uint32]]:
    """Loads 2 or 4 words of global memory if ``condition`` is not 0. Otherwise returns zeros without an access.

    constant: whether the words stay unchanged while the kernel runs. If not, the access keeps its order among other
    accesses.
    """
    zeros = " ".join(f"mov.u32 ${i}, 0;" for i in range(num_words))
    load = f"ld.global{'.nc' if constant else ''}{loaded(num_words)}, [${num_words + 1} + {offset}];"
    asm = f"{{ .reg .pred p; setp.ne.b32 p, ${num_words}, 0; {zeros} @p {load} }}"
    return Asm(asm, count=num_words, early=True, memory=not constant)


@effect
def copy_async(destination: Int32, source: Int64, num_bytes: Int32) -> Asm[None]:
    """Copies 16 bytes by cp.async, global -> shared, bypassing L1. Only the first ``num_bytes`` bytes are read; the
    rest become zeros.
    """
    return Asm("cp.async.cg.shared.global [$0], [$1], 16, $2;")


@effect
def copy_async_if(condition: Int32, destination: Int32, source: Int64, num_bytes: Int32) -> Asm[None]:
    """Copies as :func:`copy_async` does, if condition is not 0."""
    return Asm("{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.cg.shared.global [$1], [$2], 16, $3; }")


@effect
def barrier_any(condition: Int32, barrier: Int32 | int, num_threads: int) -> Asm[Int32]:
    """Waits for ``num_threads`` threads at a named barrier. Returns 1 in all of them if any thread's condition is not
    0, else 0.

    Earlier stores of these threads to shared memory are then visible to all of them.
    """
    reduction = f"bar.red.or.pred q, $2, {num_threads}, p; selp.s32 $0, 1, 0, q;"
    return Asm(f"{{ .reg .pred p, q; setp.ne.s32 p, $1, 0; {reduction} }}")


@effect
def active_lanes() -> Asm[Uint32]:
    """Returns the mask of the warp's active lanes. The mask is never 0, but the compiler does not know that. So it
    keeps a branch on the mask.
    """
    return Asm("activemask.b32 $0;", memory=False)


@effect
def copy_word_async_or(condition: Int32, destination: Int32, source: Int64, otherwise: Int32) -> Asm[None]:
    """Copies a word by cp.async, global -> shared, if condition is not 0. Otherwise stores ``otherwise`` at the
    destination at once.
    """
    return Asm(
        "{ .reg .pred p; setp.ne.s32 p, $0, 0; "
        "@p cp.async.ca.shared.global [$1], [$2], 4; @!p st.shared.u32 [$1], $3; }"
    )


@effect
def arrive_when_copied(barrier: Int32) -> Asm[None]:
    """Arrives at an mbarrier when all earlier cp.async of this thread are done. The barrier's count must include the
    thread (noinc)."""
    return Asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];")


@effect
def prefetch_line_if(condition: Int32, address: Int64) -> Asm[None]:
    """Prefetches the line of 128 bytes around an address into L2, if condition is not 0."""
    return Asm("{ .reg .pred p; setp.ne.s32 p, $0, 0; @p prefetch.global.L2 [$1]; }")


@effect
def prefetch_bulk_if(condition: Int32, address: Int64, num_bytes: Int32) -> Asm[None]:
    """Prefetches ``num_bytes`` (a multiple of 16; the address too) into L2, if condition is not 0."""
    return Asm("{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; }")


@pure
def address_in(address: Int32, rank: Int32) -> Asm[Int32]:
    """Maps a shared address of this CTA to the corresponding address in CTA ``rank`` of the cluster."""
    return Asm("mapa.shared::cluster.u32 $0, $1, $2;")


@effect
def store_async(address: Int32, values: Sequence[Uint32], barrier: Int32) -> Asm[None]:
    """Stores 1 or 4 words in the shared memory of a CTA of the cluster. ``barrier`` in that CTA counts the bytes.
    ``address`` and ``barrier`` come from `address_in`.
    """
    words = ", ".join(f"${i + 1}" for i in range(len(values)))
    kind, data = (".v4.b32", f"{{{words}}}") if len(values) == 4 else (".b32", words)
    return Asm(f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{kind} [$0], {data}, [${len(values) + 1}];")


@effect
def copy_to_cluster(target: Int32, source: Int32, num_bytes: int, barrier: Int32) -> Asm[None]:
    """Copies ``num_bytes`` by cp.async.bulk from this CTA's shared memory to another CTA's in the cluster. ``barrier``
    in that CTA counts the bytes. Size and addresses are multiples of 16. After ordinary stores to the source, a fence
    of the async proxy must come first.
    """
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    return Asm(f"{copy} [$0], [$1], {num_bytes}, [$2];")


@effect
def copy_to_global(target: Int64, source: Int32, num_bytes: Int32) -> Asm[None]:
    """Copies ``num_bytes`` by cp.async.bulk from this CTA's shared memory to global memory, in the thread's bulk group.
    Size and addresses are multiples of 16. After ordinary stores to the source a fence of the async proxy must come
    first."""
    return Asm("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;")


@effect
def store_in_cluster(address: Int32, offset: int, values: Sequence[Float32]) -> Asm[None]:
    """Stores two fp32 in shared memory of the cluster, at an address from `address_in`."""
    return Asm(f"st.shared::cluster.v2.f32 [$0 + {offset}], {{$1, $2}};")


@effect
def load_in_cluster(address: Int32, num_words: int) -> Asm[list[Uint32]]:
    """Loads 2 or 4 words from shared memory of the cluster, at an address from `address_in`."""
    return Asm(f"ld.shared::cluster{loaded(num_words)}, [${num_words}];", count=num_words)


@effect
def store_released(address: Int64, word: Uint32) -> Asm[None]:
    """Stores one word in global memory with release semantics. A thread that reads it by `load_acquired` sees all
    stores that this thread made or saw before."""
    return Asm("st.release.gpu.global.u32 [$0], $1;")


@effect
def load_acquired(address: Int64) -> Asm[Uint32]:
    """Loads one word of global memory with acquire semantics. Later accesses see all stores before the `store_released`
    that wrote the word."""
    return Asm("ld.acquire.gpu.global.u32 $0, [$1];")


@effect
def arrive_in_cluster(barrier: Int32) -> Asm[None]:
    """Arrives at an mbarrier of any CTA of the cluster, at an address from `address_in`.

    The arrival orders accesses to shared memory, as an arrival within one CTA does. It does not order stores to global
    memory: for a release at cluster scope ptxas would wait until all of the thread's stores are visible on the GPU.
    """
    return Asm("mbarrier.arrive.shared::cluster.b64 _, [$0];")
