"""`KernelSpec`, the identity of one compiled kernel: a family, a configuration, a symbol, and how to compile it.

The rest of the runtime (memory and disk caches, ahead-of-time bundles, resource reports) handles kernels through
`KernelSpec` alone. It knows nothing about attention or GEMMs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import re
import typing
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, Protocol

from cute_kernels.architecture import LIMITS, Limits, least_of
from cute_kernels.runtime.device import SUPPORTED_ARCHS

_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Config(Protocol):
    """A configuration that can say whether it can be implemented."""

    def can_implement(self) -> str | None:
        """Returns why the configuration cannot be implemented, or None."""
        ...


def check_config(config: Config) -> None:
    """Raises ValueError if the configuration cannot be implemented."""
    reason = config.can_implement()
    if reason is not None:
        raise ValueError(f"config: {reason} ({config})")


def one_of(value: object, wanted: Collection[object], name: str) -> str | None:
    """Returns why ``value`` is refused if it is not among ``wanted``, else None. name: the field's name, for the
    message."""
    return None if value in wanted else f"{name} {value!r} is not one of {', '.join(map(str, wanted))}"


class KernelSpec(ABC):
    """One configuration of one kernel family; equal and hashable by (class, family, config).

    Subclasses have the attributes `family` and `config`, and implement `compile`. Usually they are frozen dataclasses
    with a `ClassVar` `family` and a field `config`.

    Subclasses must be importable by name, so that worker processes can compile them. They must be cheap to create, so
    they import the DSL only in `compile`: a process that loads kernels from the cache never imports it.
    """

    family: ClassVar[str]
    """The name of the family, a C identifier."""

    archs: ClassVar[tuple[str, ...]] = tuple(SUPPORTED_ARCHS.values())
    """The architectures that the kernel is written for: their instructions, shared memory, registers and threads. Other
    architectures are refused, not tried."""

    config: Any
    """A frozen dataclass with every compile-time choice, and nothing else. Its fields must fit JSON."""

    @abstractmethod
    def compile(self, arch: str) -> Any:
        """Compiles for `arch` (such as "sm_90a") with fake tensors and `launch_arguments.compile_options(arch)`.

        Returns the object that `cute.compile` returned. Must not need a GPU.
        """

    @property
    def symbol(self) -> str:
        """The C identifier of the kernel, unique per configuration: the configuration's `name`, or else the family and
        a digest."""
        return getattr(self.config, "name", None) or self._digest_symbol

    @functools.cached_property
    def _digest_symbol(self) -> str:
        digest = hashlib.sha256(self.identity_json().encode()).hexdigest()
        return f"{self.family}_{digest[:16]}"

    def policies(self) -> tuple[object, ...]:
        """Returns further objects that decide the kernel: formats that the configuration has only by name, and
        "module:attribute" for code that is imported late.

        :mod:`.sources` finds all other code: it starts at `config` and follows the names that code uses. The default is
        none.
        """
        return ()

    def modules(self) -> tuple[str, ...]:
        """Returns the modules outside this package that a process must import to compile the kernel. The default is
        none."""
        return ()

    def config_json(self) -> str:
        """Returns the configuration as canonical JSON (sorted keys), from which `wanted` can rebuild a spec.

        A value whose fields do not tell its class, such as a policy or a format, has an entry "class".

        Raises TypeError if `config` is no dataclass instance or holds something that JSON cannot.
        """
        if not dataclasses.is_dataclass(self.config) or isinstance(self.config, type):
            raise TypeError(f"config of {type(self).__qualname__} must be a dataclass instance, got {self.config!r}")
        try:
            return json.dumps(_plain(self.config), sort_keys=True, separators=(",", ":"))
        except TypeError as error:
            raise TypeError(f"config of {type(self).__qualname__} must hold JSON values only: {error}") from error

    def identity_json(self) -> str:
        """Returns the configuration as JSON, as `config_json` does, but names classes without their modules, which may
        move.
        """
        return re.sub(r'"class":"[\w.]+:', '"class":"', self.config_json())

    @property
    def limits(self) -> Limits:
        """The limits that the configuration assumes: its attribute `limits`, or else the smallest limits of its
        architectures."""
        return getattr(self.config, "limits", None) or least_of(self.archs)

    def check_arch(self, arch: str) -> None:
        """Raises ValueError unless the kernel is written for ``arch`` and stays within its limits."""
        if arch not in self.archs:
            raise ValueError(f"arch: got {arch!r} for {self}, want {' or '.join(map(repr, self.archs))}")
        if not LIMITS[arch].holds(self.limits):
            raise ValueError(f"limits: got {self.limits} for {self}, want no more than {arch} has: {LIMITS[arch]}")

    def check(self) -> None:
        """Raises ValueError if `family` or `symbol` cannot name a C function."""
        for what in ("family", "symbol"):
            value = getattr(self, what)
            if not isinstance(value, str) or not _C_IDENTIFIER.match(value):
                raise ValueError(f"{what} of {type(self).__qualname__} must be a C identifier, got {value!r}")

    def _identity(self) -> tuple[type, str, Any]:
        return type(self), self.family, self.config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        return f"{self.family}:{self.symbol}"


def _plain(value: object) -> Any:
    """Returns a configuration, or a value in it, as JSON types."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    plain = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    for name in unclear_fields(type(value)):
        kind = type(getattr(value, name))
        if plain[name] is not None:
            plain[name] = {"class": f"{kind.__module__}:{kind.__qualname__}", **plain[name]}
    return plain


@functools.cache
def unclear_fields(config: type) -> tuple[str, ...]:
    """Returns the names of the fields of a dataclass whose values need an entry "class" in JSON. The class of such a
    value does not follow from its fields."""
    hints = typing.get_type_hints(config)
    return tuple(field.name for field in dataclasses.fields(config) if _is_unclear(hints[field.name]))


def _is_unclear(declared: object) -> bool:
    """Returns whether a field's type leaves the class of its value open. Such a type is an abstract class, a union with
    an abstract class, or a union of dataclasses with the same fields."""
    options = typing.get_args(declared)
    kinds = [_told_by(each) for each in options if dataclasses.is_dataclass(each)]
    bound = declared.__bound__ if isinstance(declared, typing.TypeVar) else declared
    return len(set(kinds)) < len(kinds) or isinstance(bound, ABCMeta) or any(map(inspect.isabstract, options))


def _told_by(kind: Any) -> tuple[Any, ...]:
    """Returns (name, value) of each field of a dataclass. The value is None unless the field is constant."""
    return tuple((field.name, None if field.init else field.default) for field in dataclasses.fields(kind))
