"""Offline layouts and byte formats for low-precision kernels: generated, proved and drawn without a GPU."""

OWNER = "cute-kernels"
"""Whose package this is; PyPI has another project's of the same name."""
