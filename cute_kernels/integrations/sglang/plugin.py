"""SGLang's entry point: it hooks the wanted seams, and checks that the hooks took effect.

SGLang applies hooks after the last plug-in has run. It logs errors of plug-ins and hooks, and goes on. So a seam is
used only after a check that all of its hooks are in place. With only some of them, Marlin could get packed weights.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from cute_kernels._version import __version__
from cute_kernels.integrations.sglang import attention, float_linear, linear, mla, moe, rows, seams, versions
from cute_kernels.integrations.sglang.seams import Seam, logger, named, say_once

SWITCH = "CUTE_KERNELS_SGLANG"


SEAMS = (linear.SEAM, float_linear.SEAM, moe.SEAM, moe.GPT_OSS_SEAM, attention.SEAM, mla.SEAM)


def register() -> None:
    """Hooks every seam in the SGLang of this process. A second call adds no hooks.

    With an unsupported SGLang, or with CUTE_KERNELS_SGLANG=0, it only logs one line. It does not initialise CUDA: each
    layer checks the GPU that holds its weights.
    """
    import sglang

    version = str(sglang.__version__)
    interface = versions.interface_of(version)
    if interface is None:
        reason = f"SGLang {version} is not supported; supported: {versions.supported()}"
    else:
        reason = why_not_wanted()
    if interface is None or reason is not None:
        ignored = f"; {rows.KV_FORMAT} is not looked at" if os.environ.get(rows.KV_FORMAT, "").strip() else ""
        say_once(f"{__version__}: nothing is replaced: {reason}{ignored}", logging.WARNING)
        return
    for seam in SEAMS:
        try:
            _hook(seam, interface)
        except Exception as error:  # a build that moved something, or a module that fails
            say_once(f"{seam.what} left to SGLang {version}: {type(error).__name__}: {error}", logging.ERROR)


def why_not_wanted() -> str | None:
    """Returns why the environment turns the plug-in off; None if the plug-in is on."""
    text = os.environ.get(SWITCH, "1").strip()
    if text == "1":
        return None
    return f"{SWITCH}=0" if text in ("", "0") else f"{SWITCH}: got {text!r}, want 0 or 1"


@functools.cache
def _hook(seam: Seam, interface: versions.Interface) -> None:
    """Registers all hooks of a seam, or none. A second call registers nothing, since SGLang would nest the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = seam.hooks(interface)
    originals = {target: named(target) for target in hooks}
    for target, original in originals.items():
        parameters = tuple(inspect.signature(original).parameters)
        if parameters != hooks[target].parameters:
            raise AttributeError(f"{target}: got parameters {parameters}, want {hooks[target].parameters}")
    for target, hook in hooks.items():
        HookRegistry.register(target, hook.function, HookType.AROUND)
    HookRegistry.apply_hooks = staticmethod(_then_look(HookRegistry.apply_hooks, seam, interface, originals))


def _then_look(
    apply_hooks: Callable[[], Any], seam: Seam, interface: versions.Interface, originals: Mapping[str, object]
) -> Callable[[], None]:
    """Returns a function that calls SGLang's ``apply_hooks``, and then checks that the seam's hooks are in place."""

    @functools.wraps(apply_hooks)
    def applied() -> None:
        apply_hooks()
        lacking = [target for target, original in originals.items() if named(target) is original]
        seams.IN_PLACE.discard(seam.what)
        if lacking:
            logger.error("cute-kernels %s: %s left to SGLang: not hooked: %s", __version__, seam.what, lacking)
        else:
            seams.IN_PLACE.add(seam.what)
            seam.offer(interface)
            logger.info("cute-kernels %s: %s can run here", __version__, seam.what)

    return applied
