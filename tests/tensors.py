"""The same numbers, elsewhere in memory."""

from __future__ import annotations

import torch


def offset(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Starting ``num_bytes`` past a multiple of 16."""
    size = x.numel() * x.element_size()
    room = torch.empty(size + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + num_bytes
    return room[start : start + size].view(x.dtype).view(x.shape).copy_(x)


def apart(x: torch.Tensor, gap: int | None = None) -> torch.Tensor:
    """With gaps of ``gap`` elements between rows; as many as they have if not given."""
    return torch.cat([x, x.new_zeros((*x.shape[:-1], x.shape[-1] if gap is None else gap))], dim=-1)[..., : x.shape[-1]]


def padded(x: torch.Tensor, gap: int) -> torch.Tensor:
    """With gaps of ``gap`` elements between what the first dimension counts."""
    return apart(x.flatten(1), gap).unflatten(1, x.shape[1:])


def fused(q: torch.Tensor, gap: int = 384) -> torch.Tensor:
    """Queries [batch, q_len, heads, head_dim] as part of wider rows [batch * q_len, heads * head_dim + gap]."""
    return apart(q.flatten(0, 1).flatten(1), gap).unflatten(1, q.shape[2:]).unflatten(0, q.shape[:2])


def side_by_side(a: torch.Tensor, b: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of the same shape as views of one that holds both: [2, ...] with dim 0, [..., 2, ...] with others."""
    both = torch.stack((a, b), dim=dim)
    return both.select(dim, 0), both.select(dim, 1)


def among_others(x: torch.Tensor, dim: int, byte: int = 0xFF) -> tuple[torch.Tensor, torch.Tensor]:
    """(``x`` as every second slice of a tensor, before dimension ``dim``; the other slices, which hold ``byte``).

    A 16-bit float of bytes 0xFF is NaN.
    """
    room = torch.empty((*x.shape[:dim], 2, *x.shape[dim:]), dtype=x.dtype, device=x.device)
    room.view(torch.uint8).fill_(byte)
    view = room.select(dim, 0)
    view.copy_(x)
    return view, room.select(dim, 1)
