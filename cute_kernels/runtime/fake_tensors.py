"""Fake tensors, from which the compiler learns the types of a kernel's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def element_type(name: str) -> Any:
    """Returns the DSL's type of elements called ``name``; E4M3 codes are passed as bytes."""
    import cutlass

    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "e4m3": cutlass.Uint8}
    return types[name]


def dense(dtype: Any, shape: tuple[Any, ...], align: int | None = None, memory: Any = None) -> Any:
    """Returns a fake tensor without gaps, with strides of 32 bits. align: the tensor's alignment in bytes; default 16,
    or 4 for 32-bit elements.
    """
    from cutlass.cute.runtime import make_fake_compact_tensor

    align = align or (4 if dtype.width == 32 else 16)
    order, places = tuple(reversed(range(len(shape)))), {} if memory is None else {"memspace": memory}
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align, **places)


def strided(dtype: Any, shape: tuple[Any, ...], units: Sequence[int], align: int, memory: Any = None) -> Any:
    """Returns a fake tensor whose dimension i, for i < len(units), may have any stride that is a multiple of
    ``units[i]`` bytes. The strides of the other dimensions follow from the shape."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = [cute.sym_int64(divisibility=unit * 8 // dtype.width) for unit in units]
    inner = [math.prod(shape[i + 1 :]) for i in range(len(units), len(shape))]
    places = {} if memory is None else {"memspace": memory}
    return make_fake_tensor(dtype, shape, stride=(*strides, *inner), assumed_align=align, **places)
