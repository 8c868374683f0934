"""Which Python stands for which instruction, and the one place where it is put in place of the compiler's.

Device code reaches the GPU by five ways, and :class:`Meanings` has a table for each: functions of
`cute_kernels.device.ptx` and `cute_kernels.device.numbers`; `cutlass.cute.arch`; `cutlass.cute`; `cutlass`; and scalar
types, which modules import by name. Functions under `@cute.jit` and `@cute.kernel` become the Python functions that the
compiler would take apart. An instruction without a meaning raises :class:`MissingInstruction` when it is reached.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np

PACKAGE = "cute_kernels"
SCALARS = ("Int16", "Int32", "Int64", "Uint16", "Uint32", "Uint64", "Float16", "BFloat16", "Float32", "const_expr")


Patch: TypeAlias = tuple[Any, str, Any]
"""A module or class, a name, a value."""


class MissingInstruction(NotImplementedError):
    """The backend has no meaning for an instruction."""


@dataclass(frozen=True)
class Meanings:
    """What a backend puts in place, by name.

    Attributes:
        instructions: has methods with the names and arguments of `device.ptx` and `device.numbers`.
        arch, cute, cutlass: attributes of `cutlass.cute.arch`, `cutlass.cute` and `cutlass`; others stay.
        scalars: of `SCALARS`; others stay.
        modules: attributes of other modules, or classes: models of what is not to be run.
    """

    instructions: object
    arch: Mapping[str, Any] = field(default_factory=dict)
    cute: Mapping[str, Any] = field(default_factory=dict)
    cutlass: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)


class Backend(Protocol):
    """A machine that kernels can run on."""

    def meanings(self) -> Meanings:
        """What it puts in place of the GPU."""
        ...


class Altered:
    """A machine of which some meanings are others.

    Args:
        backend: the machine. arch, cute, cutlass, scalars, modules: as in :class:`Meanings`, beside its own and before
            them.
    """

    def __init__(self, backend: Backend, **changes: Mapping[Any, Any]):
        self.backend, self.changes = backend, changes

    def meanings(self) -> Meanings:
        own = self.backend.meanings()
        return replace(own, **{name: {**getattr(own, name), **changed} for name, changed in self.changes.items()})


@contextmanager
def running(backend: Backend) -> Iterator[None]:
    """Device code that is called in this block runs on ``backend``; not for two threads with different ones.

    So is that of formats, score options and reductions from elsewhere. Modules that are imported for the first time
    inside the block take the backend's scalar types with them: they are given the compiler's when it ends. Numbers
    overflow and become NaN as on a GPU, without NumPy's warnings.
    """
    saved: list[Patch] = []
    meanings, loaded = backend.meanings(), frozenset(sys.modules)
    try:
        for owner, name, value in patches(meanings):
            saved.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        with np.errstate(all="ignore"):
            yield
    finally:
        saved += _taken(meanings.scalars, sys.modules.keys() - loaded, saved)
        for owner, name, value in reversed(saved):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_ABSENT = object()


def _taken(scalars: Mapping[str, Any], modules: Iterable[str], saved: list[Patch]) -> list[Patch]:
    """(module, name, value to put back) of scalar types that newly imported modules have by name."""
    import cutlass

    own = {name: value for owner, name, value in saved if owner is cutlass and name in scalars}
    new = [sys.modules[name] for name in modules]
    return [(module, name, own[name]) for module in new for name in own if vars(module).get(name) is scalars[name]]


def patches(meanings: Meanings) -> list[Patch]:
    """(module or class, name, value) of all that :func:`running` sets; later ones win."""
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.device import numbers, ptx
    from cute_kernels.formats import kv as kv_formats
    from cute_kernels.formats import scores as score_options
    from cute_kernels.formats.weights import integer_decode  # noqa: F401  # formats import it when they are asked
    from cute_kernels.gemm.wgmma.results import Reduction

    found: list[Patch] = []
    for module in (ptx, numbers):
        for name in _instructions(module):
            value = getattr(meanings.instructions, name, None)
            found.append((module, name, value if value is not None else _missing(module, name)))
    for owner, values in ((cute.arch, meanings.arch), (cute, meanings.cute), (cutlass, meanings.cutlass)):
        found += [(owner, name, value) for name, value in values.items()]
    replaced = {id(getattr(cutlass, name)): value for name, value in meanings.scalars.items()}
    found += [(cutlass, name, value) for name, value in meanings.scalars.items()]
    own = [name for name in sys.modules if name.startswith(PACKAGE) and name.partition(".")[0] == PACKAGE]
    own += [name for kind in Reduction.__subclasses__() if (name := kind.made_by.partition(":")[0]) in sys.modules]
    compiled, scalars = _sites(
        frozenset((*own, *kv_formats.modules_of(*kv_formats.names()), *score_options.modules_of()))
    )
    found += [(owner, name, _as_written(function)) for owner, name, function in compiled]
    found += [(module, name, replaced[key]) for module, name, key in scalars if key in replaced]
    for owner, values in meanings.modules.items():
        found += [(owner, name, value) for name, value in values.items()]
    return found


@functools.cache
def _instructions(module: ModuleType) -> list[str]:
    """The public functions of a module of wrappers."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _missing(module: ModuleType, name: str) -> Callable[..., Any]:
    def missing(*_: object, **__: object) -> NoReturn:
        raise MissingInstruction(f"{module.__name__}.{name}: this backend has no meaning for it")

    return missing


@functools.lru_cache(maxsize=8)
def _sites(names: frozenset[str]) -> tuple[list[tuple[Any, str, FunctionType]], list[tuple[ModuleType, str, int]]]:
    """Among loaded modules: (owner, name, plain function) of all that is compiled, and (module, name, identity) of
    every scalar type that a module has imported by name."""
    import cutlass

    identities = {id(getattr(cutlass, name)) for name in SCALARS}
    compiled: list[tuple[Any, str, FunctionType]] = []
    scalars: list[tuple[ModuleType, str, int]] = []
    for module_name in sorted(names):
        module = importlib.import_module(module_name)
        for name, value in list(vars(module).items()):
            if id(value) in identities:
                scalars.append((module, name, id(value)))
            elif _is_compiled(value):
                compiled.append((module, name, value.__wrapped__))
            elif isinstance(value, type) and value.__module__ == module_name:
                compiled += [(value, own, f.__wrapped__) for own, f in vars(value).items() if _is_compiled(f)]
    return compiled, scalars


def _as_written(function: FunctionType) -> FunctionType:
    """A function with its own code: the compiler gives other code to what it has compiled in this process."""
    code = getattr(function, "_original_code", function.__code__)
    if code is function.__code__:
        return function
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _is_compiled(value: object) -> bool:
    return hasattr(getattr(value, "__wrapped__", None), "_decorator_kind")
