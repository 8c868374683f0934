"""Says why something that was to be measured is not: in a line, as records and tables hold it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

MOST_CHARACTERS = 200


def said_by(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    return " ".join(str(error).split())[:MOST_CHARACTERS]


def short(error: BaseException) -> str:
    """Returns an error's class and what it says, in one line."""
    return f"{type(error).__name__}: {said_by(error)}"


def module_missing(*names: str) -> Callable[[], str | None]:
    """Makes a function that imports modules, once, and returns why the first one that is not there is not; else None.
    A peer's module may raise anything where it is imported."""

    @functools.cache
    def missing() -> str | None:
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"not installed: import {name}: {short(error)}"
        return None

    return missing
