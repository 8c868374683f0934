"""What every public operator asks of its tensors before it looks at them, whatever the kernel family."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.compiler import is_compiling


def shape_of(tensor: torch.Tensor) -> list[int]:
    """A shape as messages print it."""
    return list(tensor.shape)


# Whether every call's values are checked, too. Read once: looking at the environment would cost a call 0.7 us.
DEBUG = os.environ.get("CUTE_KERNELS_DEBUG", "") not in ("", "0")


def check_tensors(**tensors: object) -> None:
    """Raises TypeError naming the first argument that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a torch.Tensor")


def needs_dispatch(**tensors: object) -> bool:
    """Whether a call must go through its operator: it is being traced, or a tensor is not a plain one.

    The first tensor speaks for the device. Raises TypeError for an argument that is no tensor at all.
    """
    if is_compiling():
        return True
    for tensor in tensors.values():
        if type(tensor) is not torch.Tensor:
            check_tensors(**tensors)
            return True
    first: Any = next(iter(tensors.values()))
    return not (first.is_cuda or first.is_cpu)
