"""Renames arguments in error messages: from this package's names to those of the library whose function was called."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """Renames the argument in an error's message, "name: got ...", as ``names`` maps it. Returns the new error, or
    ``error`` itself if ``names`` lacks the name."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}:{rest}") if colon and name in names else error
