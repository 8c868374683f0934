"""What seams have in common: hooks around SGLang's functions, and what keeps any of them from serving a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.integrations.sglang import rows
from cute_kernels.runtime.workspace import COUNTERS, POOL

CAPABILITY = (9, 0)
WANTED = "wanted_by_sglang.json"
"""In the directory of the kernel cache: kernels that were asked for, are in no bundle, and cannot be compiled here."""


class Hook(NamedTuple):
    """A function to put around one of SGLang's with these parameters."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]


def reasons_against(device: torch.device) -> list[str]:
    """Why no seam serves anything on a device of this server."""
    reasons = []
    if (capability := capability_of(device)) != CAPABILITY:
        reasons.append(f"compute capability {capability}; supported: {CAPABILITY} (Hopper)")
    return reasons + (["--enable-memory-saver is not supported"] if rows.saves_memory() else [])


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """A CUDA device's compute capability; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def share_workspaces() -> None:
    """Has captured graphs share workspaces: SGLang replays its graphs one at a time, and they share a memory pool."""
    for pool in (POOL, COUNTERS):
        pool.share_among_captures()
