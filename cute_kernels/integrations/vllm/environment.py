"""Switches of the plugin, read from the environment.

CUTE_KERNELS_VLLM            unset or "1": every seam of SEAMS; "0": none; else a list such as "linear,attention"
CUTE_KERNELS_VLLM_KV_FORMAT  a cache format of this package that replaces the one `--kv-cache-dtype` names, or a file
                             (.json) of formats by layer
CUTE_KERNELS_VLLM_CONSTANTS  a file of constants that `cute-kernels calibrate` has found for such a cache
CUTE_KERNELS_VLLM_ACTIVATIONS  "16bit": float_linear's layers keep activations in 16 bits even if vLLM rounds to FP8
VLLM_KV_CACHE_LAYOUT         vLLM's own: whether tokens or heads come first, here within a page of K or V
"""

from __future__ import annotations

import os
from pathlib import Path

from cute_kernels.names import CacheLayout

SWITCH = "CUTE_KERNELS_VLLM"
KV_FORMAT = "CUTE_KERNELS_VLLM_KV_FORMAT"
CONSTANTS = "CUTE_KERNELS_VLLM_CONSTANTS"
ACTIVATIONS = "CUTE_KERNELS_VLLM_ACTIVATIONS"
IN_16_BITS = "16bit"
VLLMS_PLUGINS = "VLLM_PLUGINS"
"""vLLM's environment variable with the plug-ins that it loads; all if it is unset."""
PLUGIN = "cute_kernels"
"""The name of this package's plug-in in vLLM's variable."""
SEAMS = ("linear", "attention", "moe", "mla", "fusion", "float_linear")
"""The seams, in the order in which they are replaced. "1" asks for all of them."""


def switch() -> str:
    """Returns the environment variable `SWITCH`; "1" if it is unset."""
    return os.environ.get(SWITCH, "1").strip()


def wanted_seams() -> tuple[str, ...]:
    """Returns the seams that the environment asks for.

    Raises:
        ValueError: the switch names something that is no seam.
    """
    text = switch()
    if text in ("", "0"):
        return ()
    if text == "1":
        return SEAMS
    names = [name.strip() for name in text.split(",")]
    if not {*names} <= {*SEAMS}:
        raise ValueError(f"{SWITCH}: got {text!r}, want 0, 1 or a list of {', '.join(SEAMS)}")
    return tuple(seam for seam in SEAMS if seam in names)


def is_loaded() -> bool:
    """Returns whether vLLM loads the plug-in at all."""
    named = os.environ.get(VLLMS_PLUGINS)
    return named is None or PLUGIN in named.split(",")


def wanted_kv_format() -> str | None:
    """Returns the cache format that the environment asks for; None if vLLM's own flag decides."""
    return os.environ.get(KV_FORMAT, "").strip() or None


def wanted_layout() -> CacheLayout | None:
    """Returns the order of rows in a page that vLLM's variable asks for; None if the variable asks for none. Each of
    vLLM's names, such as "LBNHC", has N for tokens and H for heads.
    """
    text = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    return ("NHD" if "NH" in text else "HND") if text else None


def check() -> None:
    """Refuses settings that would be ignored.

    Raises:
        ValueError: a switch has an unknown value, or none of the wanted seams reads it.
    """
    wanted_constants()
    keeps_activations()
    named, seams = wanted_kv_format(), wanted_seams()
    if named is not None and seams and "attention" not in seams:
        raise ValueError(f"{KV_FORMAT}: got {named!r}, want the seam attention in {SWITCH} with it")


def wanted_constants() -> Path | None:
    """Returns the file of constants that the environment names for the cache; None if it names none.

    Raises:
        ValueError: the environment does not ask for a cache format that could have constants.
    """
    text = os.environ.get(CONSTANTS, "").strip()
    if not text:
        return None
    if wanted_kv_format() is None or "attention" not in wanted_seams():
        raise ValueError(f"{CONSTANTS}: got {text!r}, want {KV_FORMAT} with it, and the seam attention in {SWITCH}")
    return Path(text)


def keeps_activations() -> bool:
    """Returns whether activations stay in 16 bits even if a checkpoint makes vLLM round them to FP8.

    Raises:
        ValueError: the switch has an unknown value, or no wanted seam reads it.
    """
    text = os.environ.get(ACTIVATIONS, "").strip()
    if text and (text != IN_16_BITS or not {"float_linear"} & {*wanted_seams()}):
        raise ValueError(f"{ACTIVATIONS}: got {text!r}, want {IN_16_BITS}, and the seam float_linear in {SWITCH}")
    return bool(text)
