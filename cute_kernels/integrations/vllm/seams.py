"""Common parts of seams: the replacement of a vLLM function, and log lines that are written once."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cute_kernels.integrations.objects import Foreign

logger = logging.getLogger("vllm.cute_kernels")  # a child of vLLM's, so that lines go where vLLM's go
said: set[str] = set()
"""Lines that `say_once` has written."""


def say_once(line: str, level: int = logging.INFO) -> None:
    """Writes a line to vLLM's log, unless this process has written it already."""
    if line not in said:
        said.add(line)
        logger.log(level, "cute-kernels: %s", line)


def replace_once(module: str, name: str, made: Callable[[Any], Any]) -> None:
    """Replaces a function of vLLM by ``made(function)``, unless it is replaced already.

    name: "function" or "Class.method".
    """
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    original = getattr(owner, last)
    if not getattr(original, "is_cute_kernels", False):
        replacement = functools.wraps(original)(made(original))
        vars(replacement)["is_cute_kernels"] = True
        setattr(owner, last, replacement)


def refusal(wrong: Mapping[str, object]) -> str | None:
    """Returns a message with those reasons of ``wrong`` that are true; None if no reason is true.

    wrong: for each reason, whether it is true.
    """
    found = [what for what, is_so in wrong.items() if is_so]
    return f"{', '.join(found)} not supported" if found else None


class Layer(NamedTuple):
    """An attention layer that vLLM makes.

    name: the layer's name or, if it reads another layer's cache, the other layer's name.
    """

    name: str | None = None
    has_alibi: bool = False


_layer = Layer()


def layer_made() -> Layer:
    """Returns the layer that vLLM is making."""
    return _layer


@contextmanager
def making(layer: Layer) -> Iterator[None]:
    """Records, within the context, which layer vLLM is making, since vLLM does not tell the backend."""
    global _layer
    _layer = layer
    try:
        yield
    finally:
        _layer = Layer()


def packs_here(what: str, serve: Callable[[Any, Any], str | None], original: Any) -> Any:
    """Wraps a method's `process_weights_after_loading`: ``serve`` first tries to pack the loaded layer.

    If ``serve`` returns a reason why it cannot pack the layer, vLLM's own method runs, and the reason is logged.
    """

    def process_weights_after_loading(self: Foreign, layer: Foreign) -> None:
        reason = serve(self, layer)
        if reason is not None:
            original(self, layer)
        say_once(f"{what} run here" if reason is None else f"{what} are left to vLLM: {reason}")

    return process_weights_after_loading
