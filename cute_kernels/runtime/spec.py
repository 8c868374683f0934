"""The identity of one compiled kernel: a family, a configuration, a symbol, and how to compile it.

Everything else in the runtime (memory and disk caches, ahead-of-time bundles, resource gates) handles kernels through
this one class and knows nothing about attention or GEMMs.
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
from typing import Any, ClassVar, Protocol

from cute_kernels.architecture import LIMITS, Limits, least_of
from cute_kernels.runtime.device import SUPPORTED_ARCHS

_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Config(Protocol):
    """A configuration that can say whether it can be implemented."""

    def can_implement(self) -> str | None:
        """None, or why not."""
        ...


def check_config(config: Config) -> None:
    """Raises ValueError if the configuration cannot be implemented."""
    reason = config.can_implement()
    if reason is not None:
        raise ValueError(f"config: {reason} ({config})")


class KernelSpec(ABC):
    """One configuration of one kernel family; equal and hashable by (class, family, config).

    Subclasses give `family` and `config` as attributes (a frozen dataclass `class DecodeSpec(KernelSpec)` with a
    `config` field and a `ClassVar` `family` is the usual form) and implement `compile`.

    They must be importable by name, so that worker processes can compile them, and cheap to create: importing the
    DSL belongs inside `compile`, because a process that loads kernels from the cache never imports it.
    """

    family: ClassVar[str]
    """Name of the family, a C identifier; the room under `cute_kernels/` it lives in."""

    archs: ClassVar[tuple[str, ...]] = tuple(SUPPORTED_ARCHS.values())
    """Architectures that the kernel is written for: its instructions, and the shared memory, registers and threads that
    its configurations count with. Others are refused, not tried."""

    config: Any
    """Frozen dataclass whose fields JSON can hold: every compile-time choice, and nothing else."""

    @abstractmethod
    def compile(self, arch: str) -> Any:
        """Compiles for `arch` (such as "sm_90a") with fake tensors and `launch_arguments.compile_options(arch)`.

        Returns the object that `cute.compile` returned. Must not need a GPU.
        """

    @property
    def symbol(self) -> str:
        """C identifier of the kernel, unique per configuration: the configuration's `name`, or else a digest of it."""
        return getattr(self.config, "name", None) or self._digest_symbol

    @functools.cached_property
    def _digest_symbol(self) -> str:
        digest = hashlib.sha256(self.identity_json().encode()).hexdigest()
        return f"{self.family}_{digest[:16]}"

    def policies(self) -> tuple[object, ...]:
        """Returns the objects that decide the kernel besides `config` and the names that the code reaches: formats,
        which the configuration knows by name, and "module:attribute" of code that is imported late.

        :mod:`.sources` has the rest. None as a rule.
        """
        return ()

    def modules(self) -> tuple[str, ...]:
        """Returns the modules outside this package that a process must import to compile the kernel; none as a rule."""
        return ()

    def config_json(self) -> str:
        """Returns the configuration as canonical JSON (sorted keys), which `wanted` makes a spec of again.

        Where a value's fields do not tell its class, as of policies and formats, it has it as "class".

        Raises TypeError if `config` is no dataclass instance or holds something that JSON cannot.
        """
        if not dataclasses.is_dataclass(self.config) or isinstance(self.config, type):
            raise TypeError(f"config of {type(self).__qualname__} must be a dataclass instance, got {self.config!r}")
        try:
            return json.dumps(_plain(self.config), sort_keys=True, separators=(",", ":"))
        except TypeError as error:
            raise TypeError(f"config of {type(self).__qualname__} must hold JSON values only: {error}") from error

    def identity_json(self) -> str:
        """Returns `config_json` with the names of classes, but not of their modules, which may move."""
        return re.sub(r'"class":"[\w.]+:', '"class":"', self.config_json())

    @property
    def limits(self) -> Limits:
        """The limits that its configuration assumes: its own, or else the least of its architectures."""
        return getattr(self.config, "limits", None) or least_of(self.archs)

    def check_arch(self, arch: str) -> None:
        """Raises ValueError unless the kernel is written for ``arch``, and assumes no more than it has."""
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
    """A configuration, or what one holds, as JSON has it."""
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
    """Fields of a dataclass whose values do not tell their class by their own fields."""
    hints = typing.get_type_hints(config)
    return tuple(field.name for field in dataclasses.fields(config) if _is_unclear(hints[field.name]))


def _is_unclear(declared: object) -> bool:
    """Whether it is an abstract class, or None or such, or a union of dataclasses with the same fields."""
    options = typing.get_args(declared)
    kinds = [_told_by(each) for each in options if dataclasses.is_dataclass(each)]
    bound = declared.__bound__ if isinstance(declared, typing.TypeVar) else declared
    return len(set(kinds)) < len(kinds) or isinstance(bound, ABCMeta) or any(map(inspect.isabstract, options))


def _told_by(kind: Any) -> tuple[Any, ...]:
    """Names of a dataclass's fields, with the values of those that are constants."""
    return tuple((field.name, None if field.init else field.default) for field in dataclasses.fields(kind))
