"""Checks, for the doctor command, what the plugin would replace in the installed vLLM. vLLM is not imported."""

from __future__ import annotations

from cute_kernels.integrations.vllm import environment, kv_formats, versions
from cute_kernels.runtime.doctor import LIMITED, OK, Finding

REPLACED = {
    "linear": "weight-only linear layers",
    "attention": "attention over quantised KV caches",
    "moe": "experts with 4- and 8-bit weights, gpt-oss's MXFP4 among them, and their routers",
    "mla": "decoding of MLA",
    "fusion": "gates, sums and norms around quantised linear layers",
    "float_linear": "linear layers in FP8, MXFP4 and NVFP4",
}
"""What each seam of `environment` replaces."""


def examine() -> Finding:
    """Returns the finding about vLLM for `python -m cute_kernels doctor`."""
    version = versions.installed()
    if version is None:
        return Finding("vllm", OK, "not installed")
    try:
        seams = environment.wanted_seams()
        environment.check()
        form = kv_formats.described()
        constants = environment.wanted_constants()
    except (OSError, ValueError) as error:
        return Finding("vllm", LIMITED, str(error), "set it to what is wanted: vLLM does not start so")
    if constants is not None and not constants.is_file():
        what = f"{environment.CONSTANTS}: {constants} is no file"
        return Finding("vllm", LIMITED, what, "name a file of cute-kernels calibrate: vLLM does not start so")
    interface = versions.interface_of(version)
    if interface is None:
        remedy = f"supported: {versions.supported()}; everything is left to vLLM"
        return Finding("vllm", LIMITED, f"{version} is installed, nothing is replaced", remedy)
    if not environment.is_loaded():
        remedy = f"add {environment.PLUGIN} to it, or unset it"
        return Finding("vllm", LIMITED, f"{environment.VLLMS_PLUGINS} does not name {environment.PLUGIN}", remedy)
    if not seams:
        return Finding("vllm", OK, f"{version}, nothing is replaced ({environment.SWITCH}=0)")
    replaced = ", ".join(REPLACED[seam] for seam in seams if interface.has(seam))
    cache = "" if form is None else f"; KV caches in {form} with --kv-cache-dtype auto"
    cache += "" if constants is None else f", by the constants of {constants}"
    return Finding("vllm", OK, f"{version}, replaced: {replaced}{cache}; {environment.SWITCH}=0 replaces nothing")
