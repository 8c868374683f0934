"""`matrix_shape`, the sizes of a matrix that a kernel receives."""

from __future__ import annotations

from typing import cast

import cutlass.cute as cute
from cutlass import Int32


def matrix_shape(x: cute.Tensor) -> tuple[Int32, Int32]:
    """Returns (rows, columns) of a matrix, typed as two integers; the DSL types a shape as any nest of integers."""
    return cast("tuple[Int32, Int32]", x.shape)
