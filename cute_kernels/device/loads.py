"""Loads of fp32, and loads and stores of words that may not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device import ptx


def load_float(address: Int64) -> Float32:
    """One fp32 of read-only global memory."""
    return ptx.load_global_words(address, 0, 1)[0].bitcast(Float32)


def load_floats(address: Int64, offset: int, count: int) -> list[Any]:
    """2 or 4 neighbouring fp32 of read-only global memory."""
    return [word.bitcast(Float32) for word in ptx.load_global_words(address, offset, count)]


@dsl_user_op
def load_word_below(
    index: Int32, limit: Int32, address: Int64, offset: int = 0, *, around: bool = False, loc=None, ip=None
) -> Uint32:
    """One word of read-only global memory where 0 <= ``index`` < ``limit``, else zero and no access. around: whether
    others want what lies beside it soon: L2 asks memory for 256 bytes at once."""
    kind = ".L2::256B" if around else ""
    asm = f"{{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0; @p ld.global.nc{kind}.u32 $0, [$3 + {offset}]; }}"
    values = [x.ir_value(loc=loc, ip=ip) for x in (Int32(index), Int32(limit), Int64(address))]
    return Uint32(llvm.inline_asm(Uint32.mlir_type, values, asm, "=&r,r,r,l", has_side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def store_below(
    index: Int32, limit: Int32, address: Int64, values: Sequence, offset: int = 0, *, loc=None, ip=None
) -> None:
    """2 or 4 values of 32 bits (all fp32 or all words) to global memory in one access where 0 <= ``index`` <
    ``limit``, else none."""
    kind, letter = ("f32", "f") if isinstance(values[0], Float32) else ("u32", "r")
    inputs = ", ".join(f"${i + 3}" for i in range(len(values)))
    store = f"@p st.global.v{len(values)}.{kind} [$2 + {offset}], {{{inputs}}};"
    operands = [Int32(index), Int32(limit), Int64(address), *values]
    asm = f"{{ .reg .pred p; setp.lt.u32 p, $0, $1; {store} }}"
    constraints = ",".join(["r", "r", "l", *[letter] * len(values)])
    values_ir = [x.ir_value(loc=loc, ip=ip) for x in operands]
    llvm.inline_asm(None, values_ir, asm, constraints, has_side_effects=True, loc=loc, ip=ip)
