"""The type of objects that belong to an engine or to a model, and have attributes by name."""

from __future__ import annotations

from typing import Any, Protocol


class Foreign(Protocol):
    """A layer, a method or a configuration of vLLM, or a module of a model of transformers.

    Which attributes it has says its class, which is not installed where types are checked, or the architecture, which
    is known when it runs. Unlike Any it can be neither called nor indexed, and does not pass for a tensor or a module.
    """

    def __getattribute__(self, name: str, /) -> Any: ...

    def __setattr__(self, name: str, value: Any, /) -> None: ...
