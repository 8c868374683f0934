"""Loads of fp32 numbers, and loads and stores of words that may lie out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.instruction import Asm, effect, stored


def load_float(address: Int64) -> Float32:
    """Loads one fp32 of read-only global memory."""
    return ptx.load_global_words(address, 0, 1)[0].bitcast(Float32)


def load_floats(address: Int64, offset: int, count: int) -> list[Any]:
    """Loads 2 or 4 neighbouring fp32 of read-only global memory."""
    return [word.bitcast(Float32) for word in ptx.load_global_words(address, offset, count)]


@effect
def load_word_below(index: Int32, limit: Int32, address: Int64, offset: int = 0) -> Asm[Uint32]:
    """Loads one word of read-only global memory if 0 <= ``index`` < ``limit``; otherwise returns 0 without an
    access."""
    load = f"@p ld.global.nc.u32 $0, [$3 + {offset}];"
    return Asm(f"{{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0; {load} }}", early=True, memory=False)


@effect
def store_below(index: Int32, limit: Int32, address: Int64, values: Sequence, offset: int = 0) -> Asm[None]:
    """Stores 2 or 4 values of 32 bits to global memory in one access if 0 <= ``index`` < ``limit``. All are fp32 or all
    are words."""
    kind, inputs = stored(values, 3)
    return Asm(
        f"{{ .reg .pred p; setp.lt.u32 p, $0, $1; @p st.global{kind} [$2 + {offset}], {inputs}; }}", memory=False
    )
