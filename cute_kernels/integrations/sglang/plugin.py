"""What SGLang calls: it hooks what is wanted, and sees to it that the hooks took effect.

SGLang's loader logs errors of plug-ins and of hooks and goes on, and applies hooks after the last plug-in has run. So
layers are served only once both hooks of their owner are seen in place: one alone would hand packed weights to Marlin.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from cute_kernels._version import __version__
from cute_kernels.integrations.sglang import linear, versions
from cute_kernels.integrations.sglang.log import logger, say_once

SWITCH = "CUTE_KERNELS_SGLANG"


def register() -> None:
    """Hooks linear layers in the SGLang of this process.

    Beside an SGLang that is not supported, or with CUTE_KERNELS_SGLANG=0, it does nothing, and one line says so. Which
    GPU there is, is asked where a layer's weights are: no process needs CUDA for this.
    """
    import sglang

    version = str(sglang.__version__)
    interface = versions.interface_of(version)
    if interface is None:
        reason = f"SGLang {version} is not supported; supported: {versions.supported()}"
    else:
        reason = _why_not_wanted()
    if interface is None or reason is not None:
        say_once(f"{__version__}: nothing is replaced: {reason}", logging.WARNING)
        return
    try:
        _hook(interface)
    except (ImportError, AttributeError) as error:  # a private build that moved something
        say_once(f"linear layers are left to SGLang {version}: {type(error).__name__}: {error}", logging.ERROR)


def _why_not_wanted() -> str | None:
    text = os.environ.get(SWITCH, "1").strip()
    if text == "1":
        return None
    return f"{SWITCH}=0" if text in ("", "0") else f"{SWITCH}: got {text!r}, want 0 or 1"


def _hook(interface: versions.Interface) -> None:
    """Registers both hooks of every owner of layers, or none."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, linear.Hook] = {}
    for kind in linear.KINDS:
        hooks |= kind.hooks(getattr(interface, kind.checkpoint))
    originals = {target: pkgutil.resolve_name(target) for target in hooks}
    for target, original in originals.items():
        found = tuple(inspect.signature(original).parameters)
        if found != hooks[target].parameters:
            raise AttributeError(f"{target}: got parameters {found}, want {hooks[target].parameters}")
    for target, hook in hooks.items():
        HookRegistry.register(target, hook.function, HookType.AROUND)
    HookRegistry.apply_hooks = staticmethod(_then_look(HookRegistry.apply_hooks, originals))


def _then_look(apply_hooks: Callable[[], Any], originals: Mapping[str, object]) -> Callable[[], None]:
    """SGLang's function that applies hooks, and a look at what it did."""

    @functools.wraps(apply_hooks)
    def applied() -> None:
        apply_hooks()
        lacking = [target for target, original in originals.items() if pkgutil.resolve_name(target) is original]
        linear.in_place = not lacking
        if lacking:
            logger.error("cute-kernels %s: linear layers are left to SGLang: not hooked: %s", __version__, lacking)
        else:
            logger.info("cute-kernels %s: weight-only linear layers are hooked", __version__)

    return applied
