"""What vLLM calls: it replaces the seams that are wanted, and says so."""

from __future__ import annotations

import hashlib
import importlib
import logging
from dataclasses import dataclass

from cute_kernels._version import __version__
from cute_kernels.integrations.vllm import environment, versions
from cute_kernels.runtime.workspace import COUNTERS, POOL

FINGERPRINT = "CUTE_KERNELS_VLLM_PLUGIN"
"""Name under which vLLM's compile cache sees what is replaced: graphs with and without the plugin are kept apart."""


@dataclass(frozen=True)
class Replacement:
    """One seam and what became of it. ``reason`` says why it is left to vLLM; None where it is replaced."""

    seam: str
    what: str
    reason: str | None = None


_outcomes: dict[str, Replacement] = {}
_served: set[str] = set()


def note_served(what: str) -> None:
    """Remembers what of a model these kernels serve: graphs that vLLM keeps depend on it.

    Which kernels are asked is settled by `register`, but whether they take a layer also depends on bundles that are
    there today and were not yesterday.
    """
    _served.add(what)


def fingerprint() -> str:
    """The version, the seams that are replaced, and what of this process's models is served."""
    replaced = ",".join(sorted(seam for seam, outcome in _outcomes.items() if outcome.reason is None))
    return f"{__version__}:{replaced}:{hashlib.sha256(repr(sorted(_served)).encode()).hexdigest()[:16]}"


def register() -> None:
    """Replaces what the environment asks for in the vLLM of this process. Calling it again changes nothing.

    Raises:
        ValueError: a switch of `environment` has a value that means nothing.
    """
    seams = environment.wanted_seams()
    environment.check_kv_format()  # refused here, where they ask for what no layer would ever look at
    environment.wanted_constants()
    fresh = [seam for seam in seams if seam not in _outcomes]
    for seam in fresh:
        _outcomes[seam] = _replace(seam)
    if fresh:
        for pool in (POOL, COUNTERS):
            pool.share_among_captures()  # vLLM replays its graphs one at a time: they share one memory pool
        _mark_compile_cache()
        _log(fresh)
    elif not seams and not _outcomes:
        ignored = environment.wanted_kv_format() and f"; {environment.KV_FORMAT} is not looked at"
        _logger().info("cute-kernels: off (%s=0)%s", environment.SWITCH, ignored or "")


def is_replaced(seam: str) -> bool:
    """Whether a seam is replaced in this process."""
    return seam in _outcomes and _outcomes[seam].reason is None


def outcomes() -> list[Replacement]:
    """What `register` did in this process."""
    return list(_outcomes.values())


def _replace(seam: str) -> Replacement:
    import vllm

    version = str(vllm.__version__)
    interface = versions.interface_of(version)
    if interface is None:
        return Replacement(seam, "", f"vLLM {version} is not supported; supported: {versions.supported()}")
    try:
        module = importlib.import_module(f"cute_kernels.integrations.vllm.{seam}")
        return Replacement(seam, module.replace(interface))
    except (ImportError, AttributeError) as error:
        # A private build, or a release in between that moved something: vLLM's own code is right there.
        return Replacement(seam, "", f"it does not fit vLLM {version} ({type(error).__name__}: {error})")


def _mark_compile_cache() -> None:
    """Makes what is replaced a factor of vLLM's compile cache, whose key knows the environment but no plugin."""
    from vllm import envs

    envs.environment_variables[FINGERPRINT] = fingerprint  # asked for when a graph is looked up: layers are there then


def _log(seams: list[str]) -> None:
    for seam in seams:
        outcome = _outcomes[seam]
        if outcome.reason is None:
            _logger().info("cute-kernels %s: %s", __version__, outcome.what)
        else:
            _logger().warning("cute-kernels %s: %s is left to vLLM: %s", __version__, seam, outcome.reason)


def _logger() -> logging.Logger:
    # A child of vLLM's logger, so that it goes where vLLM's lines go.
    return logging.getLogger("vllm.cute_kernels")
