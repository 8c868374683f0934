"""Checks, for the doctor command, which seams the plug-in would replace in the installed SGLang. SGLang is not
imported.
"""

from __future__ import annotations

import importlib.metadata
import os

from cute_kernels.integrations.sglang import plugin, rows, versions
from cute_kernels.runtime.doctor import LIMITED, OK, Finding

SGLANGS_PLUGINS = "SGLANG_PLUGINS"
"""SGLang's environment variable with the plug-ins that it loads; all if it is unset."""
PLUGIN = "cute_kernels"
"""The name of this package's plug-in in SGLang's variable."""


def installed() -> str | None:
    """Returns the version of SGLang that is installed; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> Finding:
    """Returns the finding about SGLang for `python -m cute_kernels doctor`."""
    version = installed()
    if version is None:
        return Finding("sglang", OK, "not installed")
    if versions.interface_of(version) is None:
        remedy = f"supported: {versions.supported()}; everything is left to SGLang"
        return Finding("sglang", LIMITED, f"{version} is installed, nothing is replaced", remedy)
    named = os.environ.get(SGLANGS_PLUGINS)
    if named and PLUGIN not in (name.strip() for name in named.split(",")):
        return Finding("sglang", LIMITED, f"{SGLANGS_PLUGINS} does not name {PLUGIN}", f"add {PLUGIN}, or unset it")
    if (reason := plugin.why_not_wanted()) is not None:
        status = OK if reason.endswith("=0") else LIMITED
        return Finding("sglang", status, f"{version}, nothing is replaced ({reason})", "set it to 0 or 1")
    try:
        formats = rows.wanted_formats()
    except ValueError as error:
        return Finding("sglang", LIMITED, str(error), "set it to what is wanted: SGLang does not start so")
    what = ", ".join(seam.what for seam in plugin.SEAMS)
    cache = "" if formats is None else f", with pools in {formats}"
    return Finding("sglang", OK, f"{version}, served: {what}{cache}; {plugin.SWITCH}=0 replaces nothing")
