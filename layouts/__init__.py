"""Offline layouts and byte formats for low-precision kernels: generated, proved and drawn without a GPU."""

OWNER = "cute-kernels"
"""The project that owns this package. PyPI has an unrelated package of the same name."""
