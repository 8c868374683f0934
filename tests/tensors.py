"""The same numbers, elsewhere in memory."""

from __future__ import annotations

import torch


def offset(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Starting ``num_bytes`` past a multiple of 16."""
    size = x.numel() * x.element_size()
    room = torch.empty(size + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + num_bytes
    return room[start : start + size].view(x.dtype).view(x.shape).copy_(x)


def apart(x: torch.Tensor) -> torch.Tensor:
    """With gaps between rows."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
