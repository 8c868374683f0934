"""What the plugin would replace in the vLLM that is installed; nothing of vLLM is imported."""

from __future__ import annotations

from cute_kernels.integrations.vllm import environment, versions
from cute_kernels.runtime.doctor import LIMITED, OK, Finding

REPLACED = {
    "linear": "weight-only linear layers",
    "attention": "attention over quantised KV caches",
    "moe": "experts with 4- and 8-bit weights",
    "mla": "decoding of MLA",
    "fusion": "gates, sums and norms around quantised linear layers",
}
"""What each seam of `environment.SEAMS` replaces."""


def examine() -> Finding:
    """What `python -m cute_kernels doctor` says of vLLM."""
    version = versions.installed()
    if version is None:
        return Finding("vllm", OK, "not installed")
    try:
        seams = environment.wanted_seams()
    except ValueError as error:
        return Finding("vllm", LIMITED, str(error), f"set {environment.SWITCH} to one of these")
    if versions.interface_of(version) is None:
        remedy = f"supported: {versions.supported()}; everything is left to vLLM"
        return Finding("vllm", LIMITED, f"{version} is installed, nothing is replaced", remedy)
    if not seams:
        return Finding("vllm", OK, f"{version}, nothing is replaced ({environment.SWITCH}=0)")
    replaced = ", ".join(REPLACED[seam] for seam in seams)
    form = environment.wanted_kv_format()
    cache = f"; KV caches in {form}" if form else ""
    return Finding("vllm", OK, f"{version}, replaced: {replaced}{cache}; {environment.SWITCH}=0 replaces nothing")
