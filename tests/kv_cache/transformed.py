"""Calls of append whose cache has a transform, with channels of K that drown the others."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.kv_cache import CacheTransform
from cute_kernels.kv_cache.call import AppendCall


def make_transform(
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    device: Any = "cpu",
    *,
    k_rotation: int = 1,
    v_rotation: int = 1,
    parts: str = "center factor v_factor",
    seed: int = 0,
) -> CacheTransform:
    """A transform with these of its arrays: centres about as large as K, factors of both signs within 4 octaves."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(columns: int) -> torch.Tensor:
        return torch.randn(num_kv_heads, columns, generator=generator, device=device)

    def factors(columns: int) -> torch.Tensor:
        return normal(columns).sign() * torch.exp2(normal(columns).clamp(-2, 2))

    given = parts.split()
    return CacheTransform(
        k_center=normal(head_dim) if "center" in given else None,
        k_factor=factors(head_dim) if "factor" in given else None,
        k_rotation=k_rotation,
        v_factor=factors(v_head_dim or head_dim) if "v_factor" in given else None,
        v_rotation=v_rotation,
    )


def with_transform(call: AppendCall, transform: CacheTransform, shift: bool = True) -> AppendCall:
    """The call with a transform and, if it has a center, a place for the shifts; ``shift``: whether they are wanted."""
    wanted = shift and call.q is not None and transform.k_center is not None
    q_shift = None
    if wanted:
        assert call.q is not None
        q_shift = torch.full(call.q.shape[:2], torch.nan, device=call.k.device)
    return call._replace(transform=transform, q_shift=q_shift)
