"""Lets an engine's Python be imported without its extensions and without most of what it needs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

WANTED = (
    "aiohttp",
    "llguidance",
    "partial_json_parser",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed_tensors",
    "cpuinfo",
    "einops",
    "fastapi",
    "msgspec",
    "openai",
    "openai_harmony",
    "prometheus_client",
    "pybase64",
    "requests",
    "sse_starlette",
    "starlette",
    "urllib3",
    "uvloop",
    "xgrammar",
    "zmq",
)
"""What vLLM imports on the way to its linear layers and attention backends and this project does not need."""


class _Named(type):
    """A class whose attributes are their names, for enumerations; it takes whatever options a class may have."""

    def __new__(cls, name: str, bases: Any, body: Any, **_: Any) -> Any:
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    """A module that has every class that is asked for."""

    __path__: Sequence[str] = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        body = {"__module__": self.__name__, "__init__": lambda self, *a, **k: None}
        body["__class_getitem__"] = classmethod(lambda cls, item: cls)
        body["__init_subclass__"] = classmethod(lambda cls, **_: None)
        # A field of a pydantic model may be one: anything goes.
        body["__get_pydantic_core_schema__"] = classmethod(lambda cls, *_: {"type": "any"})
        value = _Named(name, (), body)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install(wanted: Sequence[str] = WANTED, parts: Sequence[str] = ()) -> None:
    """Stands in for what of ``wanted`` is not installed, and for ``parts`` of packages that are, in this process."""
    missing = frozenset(name for name in wanted if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
    sys.meta_path.insert(0, _Finder(frozenset(parts)))
