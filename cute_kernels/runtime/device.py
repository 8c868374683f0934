"""Devices: the device that an argument names, and the architecture that kernels for a GPU are compiled for."""

from __future__ import annotations

import functools

import torch

from cute_kernels.runtime.gpu import GPU, per_gpu

# Compute capability -> the architecture the kernels are compiled for. Hopper's wgmma and TMA need the "a" variant.
SUPPORTED_ARCHS: dict[tuple[int, int], str] = {(9, 0): "sm_90a"}


class UnsupportedGPUError(RuntimeError):
    """There is no CUDA GPU, or the kernels are not written for it."""


def supported() -> str:
    """Returns the supported GPUs in words, for error messages."""
    names = ", ".join(f"{arch} (compute capability {a}.{b})" for (a, b), arch in SUPPORTED_ARCHS.items())
    return f"supported: {names}, such as H100, H200 and GH200"


def device_of(device: object, name: str = "device") -> torch.device | None:
    """Returns the device that an argument names, None for None; raises TypeError or ValueError if this machine has no
    such device."""
    if device is None:
        return None
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(f"{name}: got {device!r}, want None, a torch.device or its name")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{name}: got {device!r}, want None or a device such as 'cpu' or 'cuda:0'") from error
    if found.type == "cuda" and (found.index or 0) >= GPU.count():
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(GPU.count()))])
        raise ValueError(f"{name}: got {str(found)!r}, want one of the devices that torch finds here: {there}")
    return found


def arch_of(device_index: int | None = None) -> str:
    """Returns the architecture of a CUDA device, such as "sm_90a"; of the current device if no index is given.

    Raises UnsupportedGPUError, naming the device and what is supported.
    """
    if device_index is None:
        device_index = (GPU.current() or 0) if GPU.is_available() else 0
    return _arch_of(device_index)


def is_supported(device_index: int) -> bool:
    """Returns whether the kernels run on a CUDA device."""
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
    """Returns (compute capability, name) of a CUDA device. Without a GPU it raises UnsupportedGPUError, whose message
    ends with ``wanted``."""
    if not GPU.is_available():
        build = "built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
        raise UnsupportedGPUError(f"no GPU: torch {torch.__version__} {build}; {wanted}")
    count, lowest = GPU.count(), -1 if GPU.takes_cpu else 0  # CPU tensors say that they are on device -1
    if not lowest <= device_index < count:
        raise ValueError(f"device_index must be in [0, {count}), got {device_index}")
    return GPU.capability(device_index), GPU.name(device_index)
