"""Renames arguments in error messages: from this package's names to those of the library whose function was called."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """Returns ``error``, whose message is "name: got ...", with the argument's name replaced as ``names`` maps it."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}:{rest}") if colon and name in names else error
