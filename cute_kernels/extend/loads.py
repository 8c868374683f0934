"""Loads of single words that may not exist."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load_word_below(index: Int32, limit: Int32, address: Int64, offset: int = 0, *, loc=None, ip=None) -> Uint32:
    """One word of read-only global memory where 0 <= ``index`` < ``limit``, else zero and no access."""
    asm = f"{{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0; @p ld.global.nc.u32 $0, [$3 + {offset}]; }}"
    values = [x.ir_value(loc=loc, ip=ip) for x in (Int32(index), Int32(limit), Int64(address))]
    return Uint32(llvm.inline_asm(Uint32.mlir_type, values, asm, "=&r,r,r,l", has_side_effects=True, loc=loc, ip=ip))
