"""Lists of kernels as JSON: a program without the compiler writes the kernels that it needs, and a machine with a
compiler builds them.

    {"format": 1, "arch": "sm_90a", "kernels": [{"spec": "cute_kernels.gemm.spec:GemmSpec", "config": {...}}]}

A configuration is rebuilt field by field, by its dataclass's types. Only specs of this package are accepted.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cute_kernels.runtime.spec import KernelSpec

FORMAT = 1
PACKAGE = "cute_kernels."
_WRONG = KeyError, TypeError, ValueError, AttributeError, ImportError


def write(path: Path, specs: Iterable[KernelSpec], arch: str) -> None:
    """Writes a list of kernels to a file. If the file already has a list for the same architecture, that list's kernels
    are kept, except kernels that this version does not have. Raises OSError."""
    kernels = {json.dumps(record_of(spec), sort_keys=True) for spec in specs}
    try:
        content = json.loads(path.read_text())
        if (content["format"], content["arch"]) == (FORMAT, arch):
            kernels |= {json.dumps(record, sort_keys=True) for record in content["kernels"] if _is_known(record)}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none yet, or one that is of no use
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "arch": arch, "kernels": [json.loads(text) for text in sorted(kernels)]}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    os.replace(file.name, path)


def read(path: Path, arch: str) -> list[KernelSpec]:
    """Returns the kernels of a list. Raises OSError, or ValueError that says what is wrong in the list."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"got format {content['format']!r}, want {FORMAT}")
        if content["arch"] != arch:
            raise ValueError(f"got kernels for {content['arch']!r}, want {arch!r}")
        return [spec_of(record) for record in content["kernels"]]
    except _WRONG as error:
        raise ValueError(f"{path}: got no list of kernels of this version ({error}), want wanted_by_*.json") from error


def _is_known(record: dict[str, Any]) -> bool:
    """Returns whether this version has a record's kernel."""
    try:
        return isinstance(spec_of(record), KernelSpec)
    except _WRONG:
        return False


def record_of(spec: KernelSpec) -> dict[str, Any]:
    """Returns a spec as JSON types."""
    return {"spec": f"{type(spec).__module__}:{type(spec).__qualname__}", "config": json.loads(spec.config_json())}


def spec_of(record: dict[str, Any]) -> KernelSpec:
    """Returns the spec of a record of :func:`record_of`; raises ValueError or TypeError for other records."""
    spec_class = _class_of(record["spec"])
    if not issubclass(spec_class, KernelSpec):
        raise ValueError(f"got {record['spec']!r}, want a KernelSpec")
    make = typing.cast("Callable[[Any], KernelSpec]", spec_class)  # subclasses are dataclasses with a configuration
    config = _rebuilt(typing.get_type_hints(spec_class)["config"], record["config"])
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"got {record['config']!r}, want a configuration of {record['spec']}")
    return make(config)


def _class_of(name: str) -> type:
    """Returns the class "module:name"; raises ValueError for one outside this package."""
    module, _, qualname = name.partition(":")
    found = getattr(importlib.import_module(module), qualname) if module.startswith(PACKAGE) else None
    if not isinstance(found, type):
        raise ValueError(f"got {name!r}, want a class of {PACKAGE[:-1]}")
    return found


def _rebuilt(wanted: Any, value: Any) -> Any:
    """Rebuilds a value of the type ``wanted`` from JSON: a dataclass, a tuple, a member of a union, or the value
    itself."""
    if isinstance(value, dict) and "class" in value:
        fields = {name: each for name, each in value.items() if name != "class"}
        made = _rebuilt(_class_of(value["class"]), fields)
        return made.registered() if hasattr(made, "registered") else made  # a format: there is one object of each
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(origin):  # generic: a configuration with a mainloop of one kind
        wanted = origin
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        hints, marks = typing.get_type_hints(wanted), _marks(wanted)
        return wanted(**{name: _rebuilt(hints[name], each) for name, each in value.items() if name not in marks})
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        fitting = [each for each in arguments if _fits(each, value)]
        return _rebuilt(fitting[0], value) if fitting else value
    if isinstance(value, list):
        each = arguments[0] if arguments else Any
        return tuple(_rebuilt(each, item) for item in value)
    return value


def _fits(wanted: Any, value: Any) -> bool:
    """Returns whether a JSON value fits a type. A JSON object fits a dataclass if it has the dataclass's fields, and
    has its values for the constant fields."""
    is_class = isinstance(wanted, type) and dataclasses.is_dataclass(wanted)
    if isinstance(value, dict):
        if not is_class or {field.name for field in dataclasses.fields(wanted)} != value.keys():
            return False
        return all(value[name] == mark for name, mark in _marks(wanted).items())
    return not is_class and wanted is not types.NoneType


def _marks(wanted: Any) -> dict[str, Any]:
    """Returns the constant fields of a dataclass with their values. They distinguish dataclasses whose fields have the
    same names."""
    return {field.name: field.default for field in dataclasses.fields(wanted) if not field.init}
