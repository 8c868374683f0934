"""Which architecture a GPU is compiled for."""

from __future__ import annotations

import functools

# Compute capability -> the architecture the kernels are compiled for. Hopper's wgmma and TMA need the "a" variant.
SUPPORTED_ARCHS: dict[tuple[int, int], str] = {(9, 0): "sm_90a"}


class UnsupportedGPUError(RuntimeError):
    """There is no CUDA GPU, or one the kernels were not written for."""


def supported() -> str:
    """The supported GPUs in words, for error messages."""
    names = ", ".join(f"{arch} (compute capability {a}.{b})" for (a, b), arch in SUPPORTED_ARCHS.items())
    return f"supported: {names}, such as H100, H200 and GH200"


def arch_of(device_index: int | None = None) -> str:
    """The architecture of a CUDA device, such as "sm_90a"; of the current device if no index is given.

    Raises UnsupportedGPUError, naming the device and what is supported.
    """
    if device_index is None:
        import torch

        device_index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return _arch_of(device_index)


@functools.cache
def _arch_of(device_index: int) -> str:
    import torch

    if not torch.cuda.is_available():
        build = "built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
        raise UnsupportedGPUError(f"no GPU: torch {torch.__version__} {build}; {supported()}")
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise ValueError(f"device_index must be in [0, {count}), got {device_index}")
    capability = torch.cuda.get_device_capability(device_index)
    if capability not in SUPPORTED_ARCHS:
        name = torch.cuda.get_device_name(device_index)
        have = f"{capability[0]}.{capability[1]}"
        raise UnsupportedGPUError(f"cuda:{device_index} is {name}, compute capability {have}; {supported()}")
    return SUPPORTED_ARCHS[capability]
