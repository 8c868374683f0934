"""Offline layouts and byte formats for low-precision kernels: generated, proved and drawn without a GPU."""
