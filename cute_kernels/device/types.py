"""Types of values that device code passes on, where the DSL has none, or more than one would do."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar, cast

import cutlass.cute as cute
from cutlass import Int32

Index: TypeAlias = int | Int32
"""An integer that is known while a kernel is traced, or stands in a register."""

ScalarT = TypeVar("ScalarT")


class RegisterTensor(Protocol[ScalarT]):
    """Registers of a thread, as `cute.make_rmem_tensor` makes them; ``RegisterTensor[Float32]`` holds fp32 numbers.

    `cute.Tensor` would be true of them, too, but says of an element that it may be a tensor or a tuple.
    """

    def __getitem__(self, index: Index, /) -> ScalarT: ...

    def __setitem__(self, index: Index, value: ScalarT, /) -> None: ...

    def fill(self, value: float, /) -> None:
        """Every register becomes ``value``."""
        ...


def extents(tensor: cute.Tensor) -> tuple[Int32, ...]:
    """Returns the sizes of a tensor whose modes are not nested, which `cute.Tensor.shape` says nothing of."""
    assert isinstance(tensor.shape, tuple)
    return cast("tuple[Int32, ...]", tensor.shape)
