"""Launchers that take CPU tensors for CUDA ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime.operator import Launcher


def as_if_on_a_gpu(patch: pytest.MonkeyPatch, *launchers: Launcher[..., Any]) -> None:
    """Launchers without plans, whose device is that of CPU tensors."""
    for launcher in launchers:
        launcher.plans.clear()
    patch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
