"""vLLM's entry point, which replaces the wanted seams and logs the outcome."""

from __future__ import annotations

import hashlib
import importlib
import logging
from dataclasses import dataclass

from cute_kernels._version import __version__
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, versions
from cute_kernels.integrations.vllm.seams import logger, say_once
from cute_kernels.runtime.workspace import COUNTERS, POOL

FINGERPRINT = "CUTE_KERNELS_VLLM_PLUGIN"
"""Name under which vLLM's compile cache sees what is replaced, so that graphs with and without the plugin are kept
apart."""
CAPABILITY = 90
"""Compute capability of supported GPUs, as vLLM writes it."""


@dataclass(frozen=True)
class Replacement:
    """The outcome of one seam. ``reason`` says why vLLM's own code stays in use; None if the seam is replaced."""

    seam: str
    what: str
    reason: str | None = None


_outcomes: dict[str, Replacement] = {}
_served: set[str] = set()


def note_served(what: str) -> None:
    """Records which layers of a model use these kernels, since the compiled graphs that vLLM keeps depend on this.

    `register` decides which kernels are tried. Whether they support a layer also depends on the installed bundles.
    """
    _served.add(what)


def fingerprint() -> str:
    """Returns the version, the replaced seams, and a digest of the layers that use these kernels in this process."""
    replaced = ",".join(sorted(filter(is_replaced, _outcomes)))
    return f"{__version__}:{replaced}:{hashlib.sha256(repr(sorted(_served)).encode()).hexdigest()[:16]}"


def register() -> None:
    """Replaces the seams that the environment asks for in the vLLM of this process.

    Another call adds seams that the environment asks for by then. With an unsupported vLLM or GPU it only logs one
    line.

    Raises:
        ValueError: a switch of `environment` has an unknown value.
    """
    reason = _why_nothing()
    if reason is not None:
        ignored = f"; {environment.KV_FORMAT} is not looked at" if environment.wanted_kv_format() else ""
        say_once(f"{__version__}: nothing is replaced: {reason}{ignored}", logging.WARNING)
        return
    seams = environment.wanted_seams()
    environment.check()  # refused here, where they ask for what no layer would ever look at
    fresh = [seam for seam in seams if seam not in _outcomes]
    for seam in fresh:
        _outcomes[seam] = _replace(seam)
    if fresh:
        for pool in (POOL, COUNTERS):
            pool.share_among_captures()  # vLLM replays its graphs one at a time: they share one memory pool
        _mark_compile_cache()
        _log(fresh)


def _why_nothing() -> str | None:
    """Returns why the vLLM of this process is not changed; None if seams are to be replaced."""
    import vllm

    version = str(vllm.__version__)
    if versions.interface_of(version) is None:
        return f"vLLM {version} is not supported; supported: {versions.supported()}"
    if (platform := _platform()) is None:
        return "vLLM serves another device than a CUDA GPU"
    try:
        if not platform.is_device_capability(CAPABILITY):
            return f"compute capability {platform.get_device_capability()} is not supported; supported: 9.0 (Hopper)"
    except Exception as error:  # a driver that does not answer: vLLM says so where it needs it
        return f"the GPU is not known ({type(error).__name__}: {error})"
    return None if environment.wanted_seams() or _outcomes else f"{environment.SWITCH}=0"


def _platform() -> Foreign | None:
    """Returns vLLM's platform; None if its GPUs are not CUDA's. vLLM asks the driver, so CUDA is not initialised before
    processes fork."""
    from vllm.platforms import current_platform

    return current_platform if current_platform.is_cuda() else None


def is_replaced(seam: str) -> bool:
    """Returns whether a seam is replaced in this process and the environment still asks for it."""
    return seam in _outcomes and _outcomes[seam].reason is None and seam in environment.wanted_seams()


def outcomes() -> list[Replacement]:
    """Returns the outcomes of `register` in this process."""
    return list(_outcomes.values())


def _replace(seam: str) -> Replacement:
    import vllm

    version = str(vllm.__version__)
    interface = versions.interface_of(version)
    assert interface is not None
    if not interface.has(seam):
        return Replacement(seam, "", f"vLLM {version} has nothing that could be replaced there")
    try:
        module = importlib.import_module(f"cute_kernels.integrations.vllm.{seam}")
        return Replacement(seam, module.replace(interface))
    except (ImportError, AttributeError) as error:
        # A private build, or a release in between that moved something: vLLM's own code is right there.
        return Replacement(seam, "", f"it does not fit vLLM {version} ({type(error).__name__}: {error})")


def _mark_compile_cache() -> None:
    """Adds the replaced seams to the key of vLLM's compile cache. The key has environment variables, but says nothing
    of plug-ins, so the seams are added as an environment variable.
    """
    from vllm import envs

    envs.environment_variables[FINGERPRINT] = fingerprint  # asked for when a graph is looked up: layers are there then


def _log(seams: list[str]) -> None:
    for seam in seams:
        outcome = _outcomes[seam]
        if outcome.reason is None:
            logger.info("cute-kernels %s: %s", __version__, outcome.what)
        else:
            logger.warning("cute-kernels %s: %s is left to vLLM: %s", __version__, seam, outcome.reason)
