"""Attention states for tests of their merge, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class State(NamedTuple):
    """Attention over some keys: out [..., num_heads, head_dim], lse fp32 [..., num_heads]."""

    out: torch.Tensor
    lse: torch.Tensor


def random_states(
    shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> tuple[State, State]:
    """Two states of normal outputs whose log-sum-exps differ by a few units, either way."""
    generator = torch.Generator(device).manual_seed(seed)

    def state() -> State:
        out = torch.randn(*shape, generator=generator, device=device).to(dtype)
        return State(out, 3 * torch.randn(*shape[:-1], generator=generator, device=device))

    return state(), state()


def fp64(a: State, b: State) -> tuple[torch.Tensor, torch.Tensor]:
    """What two states merge into, for finite log-sum-exps."""
    weights = torch.softmax(torch.stack((a.lse, b.lse)).double(), dim=0).unsqueeze(-1)
    return weights[0] * a.out.double() + weights[1] * b.out.double(), torch.logaddexp(a.lse.double(), b.lse.double())
