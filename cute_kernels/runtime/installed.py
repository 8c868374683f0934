"""Bundles that are installed as packages of their own, as by `pip install cute-kernels-sm90a`."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

from cute_kernels.runtime import native
from cute_kernels.runtime.aot import Bundle, BundleError, open_bundle

PACKAGES = {"sm_90a": "cute_kernels_sm90a"}
"""The names of packages with bundles, by the architecture of their kernels."""


def installed() -> dict[str, Path]:
    """Returns the folders of installed bundles, by their packages' names; imports no package."""
    found = {}
    for name in PACKAGES.values():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[name] = Path(next(iter(spec.submodule_search_locations)))
    return found


def open_installed() -> list[Bundle]:
    """Opens the installed bundles that fit this installation. For each other bundle, warns why it does not fit, and
    what to do."""
    bundles = []
    for name, folder in installed().items():
        try:
            bundles.append(open_bundle(folder))
        except (BundleError, native.RuntimeLibraryError) as error:
            distribution = name.replace("_", "-")
            warnings.warn(
                f"{distribution} is installed and not used: {error}; pip install the release of it that goes with this "
                f"one, or pip uninstall {distribution}",
                RuntimeWarning,
                stacklevel=2,
            )
    return bundles
