"""The type of objects that belong to an engine or a model and have attributes unknown to type checkers."""

from __future__ import annotations

from typing import Any, Protocol


class Foreign(Protocol):
    """A layer, a method or a configuration of vLLM, or a module of a transformers model.

    Its attributes are known only at run time, from an engine's class or a model's architecture. Unlike a value of type
    Any, a `Foreign` can be neither called nor indexed, and does not pass for a tensor or a module.
    """

    def __getattribute__(self, name: str, /) -> Any: ...

    def __setattr__(self, name: str, value: Any, /) -> None: ...
