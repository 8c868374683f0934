"""The base classes of packed weights, of one layer or of all its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.runtime.device import device_of

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")


class kept(Generic[T]):  # as functools.cached_property, which takes a lock up to Python 3.11
    """A property of immutable objects that is computed once."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, own: Any, owner: type | None = None) -> T:
        found = own.__dict__[self.name] = self.make(own)
        return found


class OfFormat:
    """The base of weights, and of layers that hold weights. It has the properties that follow from format and shape.
    The shape is (N, K) without padding."""

    shape: tuple[int, int]

    @property
    def _form(self) -> WeightFormat:
        raise NotImplementedError

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self._form.bits

    @property
    def group_size(self) -> int | None:
        """How many consecutive inputs share a scale; None for one scale per row."""
        return self._form.group_size or None

    @property
    def out_features(self) -> int:
        """N: number of output features, rows of the weight (of each expert) without padding."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """K: number of input features, columns of the weight (of each expert) without padding."""
        return self.shape[1]


class Packed(OfFormat):
    """The tensors of weights in one format. Subclasses are frozen dataclasses whose constructors have an argument
    `check_values`.

    Attributes:
        codes, scales: the packed tensors.
        format: the weight format of codes and scales.
        shape: (N, K) without padding.
        tensor_names: fields that are tensors or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: WeightFormat
    shape: tuple[int, int]
    tensor_names: ClassVar[tuple[str, ...]]

    @property
    def _form(self) -> WeightFormat:
        return self.format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations that the weights take. Scales of integer formats have it, too."""
        return self.format.activation_dtype(self.scales.dtype)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the fields of a copied or loaded object, but not its `kept` properties: the device, for example, may
        be another one."""
        self.__dict__.update({each.name: state[each.name] for each in fields(cast("Any", self))})

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Returns the weights on another device. Tensors that are there already are not copied.

        Raises:
            TypeError, ValueError: there is no such device.
        """
        where = device_of(device) or self.device
        moved = {name: tensor.to(where, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        return replace(cast("Any", self), **cast("Any", moved), check_values=False)  # subclasses are dataclasses

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name in self.tensor_names if (value := getattr(self, name)) is not None}
