"""Which architecture a GPU is compiled for."""

from __future__ import annotations

import functools

import torch

from cute_kernels.runtime.gpu import GPU, per_gpu

# Compute capability -> the architecture the kernels are compiled for. Hopper's wgmma and TMA need the "a" variant.
SUPPORTED_ARCHS: dict[tuple[int, int], str] = {(9, 0): "sm_90a"}

# What kernels that use nothing newer than sm_80 are compiled for, the latest first: machine code for a compute
# capability runs on later ones of the same major number.
PORTABLE_ARCHS: dict[tuple[int, int], str] = {
    (12, 0): "sm_120",
    (10, 0): "sm_100",
    **SUPPORTED_ARCHS,
    (8, 9): "sm_89",
    (8, 6): "sm_86",
    (8, 0): "sm_80",
}
PORTABLE = "supported: weight-only linear layers on compute capability 8.0 and later, all else on 9.0 (H100, H200)"


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
        device_index = (GPU.current() or 0) if GPU.is_available() else 0
    return _arch_of(device_index)


@per_gpu
@functools.cache
def portable_arch_of(device_index: int) -> str:
    """The architecture that portable kernels are compiled for on a CUDA device, such as "sm_80".

    Raises UnsupportedGPUError, naming the device and what is supported.
    """
    capability, name = _device(device_index, PORTABLE)
    for (major, minor), arch in PORTABLE_ARCHS.items():
        if capability[0] == major and capability[1] >= minor:
            return arch
    have = f"{capability[0]}.{capability[1]}"
    raise UnsupportedGPUError(f"cuda:{device_index} is {name}, compute capability {have}; {PORTABLE}")


def is_supported(device_index: int) -> bool:
    """Whether all kernels run on a CUDA device, not the portable ones alone."""
    return GPU.capability(device_index) in SUPPORTED_ARCHS


@per_gpu
@functools.cache
def _arch_of(device_index: int) -> str:
    capability, name = _device(device_index, supported())
    if capability not in SUPPORTED_ARCHS:
        have = f"{capability[0]}.{capability[1]}"
        raise UnsupportedGPUError(f"cuda:{device_index} is {name}, compute capability {have}; {supported()}")
    return SUPPORTED_ARCHS[capability]


def _device(device_index: int, wanted: str) -> tuple[tuple[int, int], str]:
    """Compute capability and name of a CUDA device; UnsupportedGPUError, which ends with ``wanted``, without any."""
    if not GPU.is_available():
        build = "built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
        raise UnsupportedGPUError(f"no GPU: torch {torch.__version__} {build}; {wanted}")
    count, lowest = GPU.count(), -1 if GPU.takes_cpu else 0  # CPU tensors say that they are on device -1
    if not lowest <= device_index < count:
        raise ValueError(f"device_index must be in [0, {count}), got {device_index}")
    return GPU.capability(device_index), GPU.name(device_index)
