"""`ActivationFunction`, the interface of activations, and their registry."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

if TYPE_CHECKING:
    from cutlass import Float32

    from cute_kernels.device.float_math import FloatMath

_NAME = re.compile(r"([a-z][a-z0-9_]*)(?:\(([^()]+)\))?\Z")
_IN_SYMBOLS = str.maketrans({".": "p", "-": "m", "+": "", ",": "_", "(": "_", ")": ""})

KindT = TypeVar("KindT", bound="type[ActivationFunction]")
_KINDS: dict[str, type[ActivationFunction]] = {}
_BY_NAME: dict[str, ActivationFunction] = {}  # those that were made, which torch.compile follows


@dataclass(frozen=True)
class ActivationFunction(ABC):
    """The function that a product applies to its fp32 sums after biases: to each feature, or to each pair of gate and
    up.

    Subclasses are frozen dataclasses whose fields are numbers with default values. Equal objects are one activation,
    and share kernels.

    Attributes:
        kind: a C identifier, by which the class is registered.
        gated: whether a result is computed from two rows of the weight, gate and up, which are interleaved.
        number: the integer by which a launch selects a standard activation. 0 if the activation is not standard;
            kernels are then compiled for it.
        name: the name in operators and messages: the kind, then the field values in parentheses if there are fields.
    """

    kind: ClassVar[str]
    gated: ClassVar[bool] = False
    number: ClassVar[int] = 0

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...  # an attribute of each object: calls look it up

    def __post_init__(self) -> None:
        for field in fields(self):  # 7 and 7.0 are one activation
            object.__setattr__(self, field.name, float(getattr(self, field.name)))
        numbers = ",".join(repr(getattr(self, field.name)) for field in fields(self))
        object.__setattr__(self, "name", f"{self.kind}({numbers})" if numbers else self.kind)
        _BY_NAME.setdefault(self.name, self)

    def wanted_numbers(self) -> str:
        """Returns the requirement that a field value violates, or "" if all field values are valid."""
        finite = all(math.isfinite(getattr(self, field.name)) for field in fields(self))
        return "" if finite else "finite numbers"

    @abstractmethod
    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        """Computes the activation in torch, in the dtype of the values: x, or gate and up."""

    @abstractmethod
    def device(self, math: FloatMath, *values: Float32) -> Float32:
        """Computes the activation on the device for a thread's x, or for its gate and up. Implementations use only
        ``math``, so that their files need not import the compiler."""

    def of_rows(self, y: torch.Tensor) -> torch.Tensor:
        """Computes the reference for y [..., N]. A gated activation returns [..., N / 2]: even columns of y are gates,
        odd ones ups."""
        return self.reference(y[..., ::2], y[..., 1::2]) if self.gated else self.reference(y)


def register(kind: KindT) -> KindT:
    """Registers a class of activations by its kind; returns it.

    Raises:
        ValueError: the kind is taken by another class, or is no identifier; the message names it.
    """
    found = _NAME.match(kind.kind)
    if found is None or found.group(2):
        raise ValueError(f"kind: got {kind.kind!r}, want lower-case letters, digits and underscores")
    if _KINDS.setdefault(kind.kind, kind) is not kind:
        raise ValueError(f"{kind.kind}: got another activation of that name, want one class for each")
    return kind


def registered() -> tuple[ActivationFunction, ...]:
    """Returns all activations, with their default numbers, the standard ones first."""
    kinds = sorted(_KINDS.values(), key=lambda kind: (not kind.number, kind.number))
    return tuple(kind() for kind in kinds)


def activation_named(given: object) -> ActivationFunction | None:
    """Returns the activation whose name is ``given``. If ``given`` is an activation or None, returns it unchanged.

    Raises:
        ValueError: no activation has that name; the message lists all names.
    """
    return None if given is None else experts_activation(given, "None, ")


def experts_activation(given: object, others: str = "") -> ActivationFunction:
    """Returns the activation of experts, which is given as an object or by its name. Raises ValueError for anything
    else. others: further choices that the message names."""
    found = (_BY_NAME.get(given) or _parsed(given)) if isinstance(given, str) else given
    if not isinstance(found, ActivationFunction):
        names = ", ".join(repr(each.name) for each in registered())
        raise ValueError(f"activation: got {given!r}, want {others}{names}")
    return found


def _parsed(name: str) -> ActivationFunction | None:
    """Makes the activation that a name such as "clamped_swiglu(1.702,7.0,1.0)" describes; None if there is none. The
    name may come from another process."""
    found = _NAME.match(name)
    kind: Callable[..., ActivationFunction] | None = _KINDS.get(found.group(1)) if found else None
    try:
        return kind(*map(float, found.group(2).split(","))) if kind and found and found.group(2) else kind and kind()
    except (TypeError, ValueError):
        return None


def name_of(given: object) -> str | None:
    """Returns the name of an activation in operators' arguments."""
    found = activation_named(given)
    return None if found is None else found.name


def number_of(given: object) -> int:
    """Returns the integer by which a launch selects ``given``: 0 for no activation, and for one that is not
    standard.
    """
    found = activation_named(given)
    return 0 if found is None else found.number


def config_of(given: object) -> ActivationFunction | None:
    """Returns the activation that a configuration holds. Returns None for no activation, and for a standard one, which
    a launch selects by number."""
    found = activation_named(given)
    return None if found is None or found.number else found


def symbol_of(own: ActivationFunction | None) -> str:
    """Returns the activation's part of a kernel's name."""
    return "" if own is None else f"_{own.name.translate(_IN_SYMBOLS)}"


def out_features(n: int, given: object) -> int:
    """Returns the number of columns of the result for a weight of ``n`` rows: n, or n / 2 with a gated activation."""
    found = activation_named(given)
    return n // 2 if found is not None and found.gated else n
