"""Renames arguments in errors: operators name their own arguments, and callers of another library's function know its
names."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """Returns ``error``, whose message is "name: got ...", with the argument's name replaced as ``names`` maps it."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}:{rest}") if colon and name in names else error
