"""Types for annotations of device code that the DSL lacks."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar, cast

import cutlass.cute as cute
from cutlass import Int32

Index: TypeAlias = int | Int32
"""An integer that is known while a kernel is traced, or that is in a register."""

ScalarT = TypeVar("ScalarT")


class RegisterTensor(Protocol[ScalarT]):
    """Registers of a thread, as `cute.make_rmem_tensor` makes them; ``RegisterTensor[Float32]`` holds fp32 numbers.

    They are a `cute.Tensor`, too, but that type says that an element may be a tensor or a tuple.
    """

    def __getitem__(self, index: Index, /) -> ScalarT: ...

    def __setitem__(self, index: Index, value: ScalarT, /) -> None: ...

    def fill(self, value: float, /) -> None:
        """Sets every register to ``value``."""
        ...


def extents(tensor: cute.Tensor) -> tuple[Int32, ...]:
    """Returns the sizes of a tensor whose modes are not nested, typed as a plain tuple, unlike `cute.Tensor.shape`."""
    assert isinstance(tensor.shape, tuple)
    return cast("tuple[Int32, ...]", tensor.shape)
