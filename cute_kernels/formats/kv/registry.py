"""The registry of KV formats, by name."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

from cute_kernels.formats.kv.base import HEAD_DIMS, KvFormat, Use
from cute_kernels.names import KvFormatName

PACKAGE = __name__.partition(".")[0]

FORMATS: dict[str, KvFormat] = {}
"""The shipped formats, by name."""

ALIASES = {"int4": "int4_g4", "int8": "int8_token_head", "fp8": "e4m3_token_head"}
"""The recommended format of each kind, by the kind's name."""

_registered: dict[str, KvFormat] = {}  # formats from elsewhere, and those in blocks


def ship(module: ModuleType) -> None:
    """Registers the formats of a module of this package. The module's `FORMS` are formats for every use; its `BESIDE`
    are formats for K alone or for `append_kv` alone.
    """
    shipped, beside = getattr(module, "FORMS", ()), getattr(module, "BESIDE", ())
    FORMATS.update({form.name: form for form in shipped})
    for form in beside:
        register(form)


def register(form: KvFormat) -> KvFormat:
    """Registers a format by its name, for every function that takes ``kv_format``, and returns the format.

    Registering an equal format again changes nothing.

    Raises:
        ValueError: another format has the name, or at some head_dim the row object's size contradicts the format.
    """
    taken = FORMATS.get(form.name) or _registered.get(form.name)
    if form.name in ALIASES or (taken is not None and taken != form):
        raise ValueError(f"name: got {form.name!r}, which is the name of another format, want a new name")
    for head_dim in HEAD_DIMS if form.make_row is not None else ():
        try:
            row = form.row(head_dim)
        except ValueError:
            continue  # no such rows
        if row.row_bytes != form.row_bytes(head_dim):
            raise ValueError(
                f"make_row: got {row.row_bytes} bytes at head_dim {head_dim}, want {form.row_bytes(head_dim)}: "
                f"{form.header_bytes} bytes in front of {head_dim} codes of {form.code_bits} bits"
            )
    return _registered.setdefault(form.name, form)


def names() -> tuple[str, ...]:
    """Returns the names of all formats, shipped ones first."""
    return (*FORMATS, *(name for name, form in _registered.items() if not form.by_token))


def format_of(name: str) -> KvFormat:
    """Returns the format called ``name``. Raises ValueError with the known names if it is unknown, TypeError if it is
    no string."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        if name in _registered:
            return _registered[name]
        known = (*names(), *ALIASES)
        raise ValueError(f"kv_format: got {name!r}, want one of {', '.join(known)}") from None
    except TypeError:  # not hashable
        raise TypeError(f"kv_format: got {name!r}, want the name of a format") from None


def format_pair(kv_format: object) -> tuple[KvFormatName, KvFormatName]:
    """Returns the names of K's and V's formats. Raises TypeError unless ``kv_format`` is a name or a pair of names."""
    if isinstance(kv_format, str):
        name = cast("KvFormatName", kv_format)  # `format_of` says whether there is such a one
        return name, name
    if isinstance(kv_format, Sequence) and len(kv_format) == 2 and all(isinstance(name, str) for name in kv_format):
        return cast("tuple[KvFormatName, KvFormatName]", tuple(kv_format))
    raise TypeError(f"kv_format: got {kv_format!r}, want the name of a format or a pair of names (K's, V's)")


# -- device code ------------------------------------------------------------------------------------------------------


def modules_of(*names: str) -> tuple[str, ...]:
    """Returns the modules outside this package that have the device code of the named formats. A process must import
    these modules to compile kernels for the formats."""
    places = (place for name in names for place in format_of(name).places())
    return tuple(dict.fromkeys(module for place in places if _is_foreign(module := place.partition(":")[0])))


def code_of(use: Use, *names: str) -> tuple[object, ...]:
    """Returns the parts of a kernel's key for the named formats: the formats, and the modules of their device code."""
    forms = tuple(dict.fromkeys(map(format_of, names)))
    return *forms, *dict.fromkeys(place for form in forms for place in form.places(use))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] != PACKAGE
