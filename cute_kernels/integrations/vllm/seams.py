"""The common part of seams: how a function of vLLM's is replaced, and lines of its log that are written once."""

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
"""Lines of `say_once`."""


def say_once(line: str, level: int = logging.INFO) -> None:
    """Writes a line to vLLM's log, unless it stands there already."""
    if line not in said:
        said.add(line)
        logger.log(level, "cute-kernels: %s", line)


def replace_once(module: str, name: str, made: Callable[[Any], Any]) -> None:
    """Puts ``made`` of a function of vLLM's in its place, unless it is there already. name: "function" or
    "Class.method"."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    original = getattr(owner, last)
    if not getattr(original, "is_cute_kernels", False):
        replacement = functools.wraps(original)(made(original))
        vars(replacement)["is_cute_kernels"] = True
        setattr(owner, last, replacement)


def refusal(wrong: Mapping[str, object]) -> str | None:
    """Says in words which of the reasons hold, of each of which ``wrong`` says whether it does; None if none does."""
    found = [what for what, is_so in wrong.items() if is_so]
    return f"{', '.join(found)} not supported" if found else None


class Layer(NamedTuple):
    """A layer of attention that vLLM makes. name: its own, or that of the layer whose cache it reads."""

    name: str | None = None
    has_alibi: bool = False


_layer = Layer()


def layer_made() -> Layer:
    """The layer that vLLM is making."""
    return _layer


@contextmanager
def making(layer: Layer) -> Iterator[None]:
    """Notes, within the block, which layer vLLM makes: vLLM itself does not tell the backend."""
    global _layer
    _layer = layer
    try:
        yield
    finally:
        _layer = Layer()


def packs_here(what: str, serve: Callable[[Any, Any], str | None], original: Any) -> Any:
    """A method's `process_weights_after_loading` with ``serve`` before it, which packs a loaded layer, or logs why vLLM
    should."""

    def process_weights_after_loading(self: Foreign, layer: Foreign) -> None:
        reason = serve(self, layer)
        if reason is not None:
            original(self, layer)
        say_once(f"{what} run here" if reason is None else f"{what} are left to vLLM: {reason}")

    return process_weights_after_loading
