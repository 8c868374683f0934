"""Imports device code by its place, so that nothing imports a compiler before it compiles."""

from __future__ import annotations

import importlib
from typing import Any


def load_code(place: str) -> Any:
    """Imports and returns the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
