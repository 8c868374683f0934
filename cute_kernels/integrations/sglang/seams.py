"""The common part of seams: hooks around SGLang's functions, reasons that keep all of them from serving, lines of the
log."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.workspace import COUNTERS, POOL

logger = logging.getLogger("sglang.cute_kernels")
IN_PLACE: set[str] = set()
"""Seams, in words, whose hooks were all seen to take effect in this process."""
CAPABILITY = (9, 0)
WANTED = "wanted_by_sglang.json"
"""In the directory of the kernel cache: kernels that were asked for, are in no bundle, and cannot be compiled here."""


@functools.cache
def say_once(line: str, level: int = logging.INFO) -> None:
    """Writes a line to SGLang's log, unless this process wrote it already."""
    logger.log(level, "cute-kernels: %s", line)


def named(name: str) -> Any:
    """Returns what a full name such as "package.module.Class.method" names.

    Raises:
        ImportError, AttributeError: there is none. pkgutil says of a module that cannot be imported only that its
            package has no such attribute; this says what the import lacks.
    """
    try:
        return pkgutil.resolve_name(name)
    except AttributeError as error:
        if isinstance(error.obj, ModuleType) and hasattr(error.obj, "__path__"):
            importlib.import_module(f"{error.obj.__name__}.{error.name}")
        raise


class Hook(NamedTuple):
    """A function to put around one of SGLang's with these parameters."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]


def hooks_of_layers(
    interface: Interface,
    kinds: Iterable[Foreign],
    load: Callable[..., None],
    multiply: Callable[..., Any],
    parameters: tuple[str, ...],
) -> dict[str, Hook]:
    """The hooks around the two methods of the owners of layers, by their full names.

    kinds: each with its ``owner``, a field of the interface, and ``product``, the owner's method that multiplies. load:
    wraps the method that reorders loaded weights, with the kind as first argument. parameters: of ``multiply``.
    """
    found: dict[str, Hook] = {}
    for kind in kinds:
        owner = getattr(interface, kind.owner)
        found[f"{owner}.process_weights_after_loading"] = Hook(functools.partial(load, kind), ("self", "layer"))
        found[f"{owner}.{kind.product}"] = Hook(multiply, ("self", "layer", *parameters))
    return found


def reasons_against(device: torch.device) -> list[str]:
    """The reasons why no seam serves anything on a device of this server."""
    reasons = []
    if (capability := capability_of(device)) != CAPABILITY:
        reasons.append(f"compute capability {capability}; supported: {CAPABILITY} (Hopper)")
    return reasons + (["--enable-memory-saver is not supported"] if rows.saves_memory() else [])


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """A CUDA device's compute capability; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def share_workspaces() -> None:
    """Makes captured graphs share workspaces: SGLang replays its graphs one at a time, and they share a memory pool."""
    for pool in (POOL, COUNTERS):
        pool.share_among_captures()
