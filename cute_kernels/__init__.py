"""Low-precision LLM decode kernels for NVIDIA Hopper, in CuTe DSL."""

from cute_kernels._version import __version__
from cute_kernels.attention import decode_attention, merge_states
from cute_kernels.runtime.device import UnsupportedGPUError

__all__ = ["UnsupportedGPUError", "__version__", "decode_attention", "merge_states"]
