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


ONCE: set[str] = set()
"""Names of those that see hardly anything of vLLM, and take seconds: they run with the reference alone."""


def check_once(function: Callable[[], None]) -> Callable[[], None]:
    ONCE.add(function.__name__)
    return check(function)


def hopper() -> Any:
    """The platform as the plugin sees it on an H200."""
    from vllm.platforms import PlatformEnum

    return SimpleNamespace(
        _enum=PlatformEnum.CUDA,
        is_cuda=lambda: True,
        is_device_capability=lambda capability: capability == 90,
        get_device_capability=lambda: (9, 0),
    )
