"""Errors in the terms of whoever called: the operators name their own arguments, a compatible call has others."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """``error`` with the argument that it is about, "name: got ...", called as ``names`` has it."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}:{rest}") if colon and name in names else error
