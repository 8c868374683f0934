"""Low-precision LLM decode kernels for NVIDIA Hopper, in CuTe DSL."""

from cute_kernels._version import __version__

__all__ = ["__version__"]
