"""Raises ImportError if `layouts` is another project's package. PyPI has an unrelated `layouts`, which pip installs
over cute-kernels' package of that name. Without this check, a later import fails with a missing name."""

from __future__ import annotations

OWNER = "cute-kernels"  # what layouts/__init__.py says of itself

try:
    import layouts
except ImportError as error:  # theirs wants packages that need not be here
    found, cause = str(error), error
else:
    cause = None
    found = None if getattr(layouts, "OWNER", None) == OWNER else str(getattr(layouts, "__file__", None))

if found is not None:
    raise ImportError(
        f"layouts: got another package than cute-kernels' ({found}), want ours: `pip uninstall layouts`, then "
        "in this package's checkout `pip install --force-reinstall --no-deps .`"
    ) from cause
