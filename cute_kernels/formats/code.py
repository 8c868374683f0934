"""Imports device code by its import path, so that only processes that compile kernels import the compiler."""

from __future__ import annotations

import importlib
from typing import Any


def load_code(place: str) -> Any:
    """Imports and returns the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
