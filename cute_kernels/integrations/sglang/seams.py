"""Common parts of seams: hooks around SGLang's functions, reasons why no seam can be used, and log lines."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cute_kernels.integrations import ready
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.workspace import COUNTERS, POOL

logger = logging.getLogger("sglang.cute_kernels")
IN_PLACE: set[str] = set()
"""The names of seams whose hooks were all seen to take effect in this process."""
CAPABILITY = (9, 0)
WANTED = "wanted_by_sglang.json"
"""A file in the kernel cache's directory. It lists kernels that were requested, are in no bundle, and cannot be
compiled here."""


@functools.cache
def say_once(line: str, level: int = logging.INFO) -> None:
    """Writes a line to SGLang's log, unless this process wrote it already."""
    logger.log(level, "cute-kernels: %s", line)


def named(name: str) -> Any:
    """Returns the object with a full name such as "package.module.Class.method".

    Raises:
        ImportError, AttributeError: there is no such object. If a module fails to import, the error is that of the
            import; pkgutil's error would only say that the package lacks an attribute.
    """
    try:
        return pkgutil.resolve_name(name)
    except AttributeError as error:
        if isinstance(error.obj, ModuleType) and hasattr(error.obj, "__path__"):
            importlib.import_module(f"{error.obj.__name__}.{error.name}")
        raise


class Hook(NamedTuple):
    """A function to call around a function of SGLang, and the parameters that SGLang's function must have."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Seam:
    """A place where the plug-in takes over from SGLang.

    Attributes:
        what: the name in log lines.
        hooks: a function that returns the hooks, by the full names of SGLang's functions. It raises ImportError or
            AttributeError, naming what this SGLang lacks.
        offer: a function that is called once all hooks are in place.
    """

    what: str
    hooks: Callable[[Interface], dict[str, Hook]]
    offer: Callable[[Interface], object] = lambda interface: None


SERVED = "cute_kernels_served"
"""Attribute of a layer that runs here: the weight and options for its product."""


@dataclass(frozen=True)
class Layers:
    """Layers with quantised weights, and the hooks around their owners' methods that load and multiply.

    Attributes:
        what: the seam's name in log lines.
        kinds: the kinds of layers. A kind's ``owner`` is the field of `Interface` with the owner's name, its
            ``product`` is the name of the owner's method that multiplies.
        pack: a function from (kind, owner, layer) to (new tensors by the names of parameters, the value of
            :data:`SERVED`). If SGLang's own method has to load the layer, it raises an AttributeError, TypeError or
            ValueError that says why.
        multiply: a function from (served, layer, *arguments) to the result.
        parameters: the names of these arguments.
    """

    what: str
    kinds: tuple[Foreign, ...]
    pack: Callable[..., tuple[dict[str, torch.Tensor | None], object]]
    multiply: Callable[..., Any]
    parameters: tuple[str, ...]

    def hooks(self, interface: Interface) -> dict[str, Hook]:
        """Returns the hooks around SGLang's methods, by the methods' full names."""
        found: dict[str, Hook] = {}
        for kind in self.kinds:
            owner = getattr(interface, kind.owner)
            load = Hook(functools.partial(self.load, kind), ("self", "layer"))
            found[f"{owner}.process_weights_after_loading"] = load
            found[f"{owner}.{kind.product}"] = Hook(self.product, ("self", "layer", *self.parameters))
        return found

    def load(self, kind: Foreign, original: Callable[..., None], owner: Foreign, layer: torch.nn.Module) -> None:
        """Packs a loaded layer, or lets SGLang load it and logs why."""
        if getattr(layer, SERVED, None) is not None:
            return  # nothing was loaded since: parameters that are packed have no loader
        try:
            if self.what not in IN_PLACE:
                raise ValueError("its hooks were not seen to take effect")
            tensors, served = self.pack(kind, owner, layer)
        except (AttributeError, TypeError, ValueError) as error:
            say_once(f"{self.what} are left to SGLang: {kind.owner}: {error}", logging.WARNING)
            original(owner, layer)
            return
        for name, tensor in tensors.items():
            if (before := getattr(layer, name, None)) is not None:  # what has no meaning here is emptied
                new = before.data.new_empty(0) if tensor is None else tensor
                setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
        vars(layer)["_original_shapes"] = {}  # which SGLang would give parameters before it loads them again
        setattr(layer, SERVED, served)
        say_once(f"{self.what} run here")

    def product(
        self, original: Callable[..., Any], owner: Foreign, layer: torch.nn.Module, *arguments: object, **named: object
    ) -> Any:
        """Returns the layer's result, computed here if the layer is packed, else by SGLang's own method."""
        served = getattr(layer, SERVED, None)
        if served is None:
            return original(owner, layer, *arguments, **named)
        return self.multiply(served, layer, *arguments, **named)


def refuse(reasons: Iterable[str]) -> None:
    """Raises ValueError with all reasons, if there are any."""
    if said := "; ".join(reasons):
        raise ValueError(said)


def reasons_against(device: torch.device) -> list[str]:
    """Returns the reasons why no seam can serve layers on a device of this server."""
    reasons = []
    if (capability := capability_of(device)) != CAPABILITY:
        reasons.append(f"compute capability {capability}; supported: {CAPABILITY} (Hopper)")
    return reasons + (["--enable-memory-saver is not supported"] if rows.saves_memory() else [])


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Returns a CUDA device's compute capability; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def make_ready(device: torch.device, specs: Callable[[], Iterable[KernelSpec]]) -> list[str]:
    """Loads or compiles the kernels of a layer's steps, once for all equal layers. Returns the reasons why they are not
    ready."""
    reason = ready.make_ready(device, specs, logger, WANTED)
    share_workspaces(device)
    return [] if reason is None else [reason]


def share_workspaces(device: torch.device) -> None:
    """Makes captured graphs share workspaces. SGLang replays its graphs one at a time, and they share a memory pool
    anyway."""
    for pool in (POOL, COUNTERS) if device.type == "cuda" else ():
        pool.share_among_captures()
