"""What `python -m cute_kernels tune` sees of a GPU that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.tuning import command


def stand_for_a_gpu(patch: pytest.MonkeyPatch, loaded: list[Any]) -> None:
    """Makes the command find one; ``loaded`` gets the kernels that it would load."""
    patch.setattr(command, "arch_of", lambda: "sm_90a")
    patch.setattr(command, "load_many", lambda specs, arch, progress: loaded.extend(specs))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test GPU")
    properties = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
