"""The list of interface checks, which `interface` runs."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}
"""By name, in the order in which they run."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def hopper() -> Any:
    """The platform as the plugin sees it on an H200."""
    from vllm.platforms import PlatformEnum

    return SimpleNamespace(
        _enum=PlatformEnum.CUDA,
        is_cuda=lambda: True,
        is_device_capability=lambda capability: capability == 90,
        get_device_capability=lambda: (9, 0),
    )
