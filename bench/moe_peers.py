"""Other libraries' layers of experts, as data: whether each is here, and the calls that stand for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional


class DenseExperts(NamedTuple):
    """Weights in bf16: gate and up [E, I, K], down [E, N, I]. gate and up are every other row of one tensor."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @property
    def gate_up(self) -> torch.Tensor:
        """[E, 2 I, K], rows of gate and up in turn."""
        experts, inner, k = self.gate.shape
        row, column = self.gate.stride(1) // 2, self.gate.stride(2)
        return self.gate.as_strided((experts, 2 * inner, k), (self.gate.stride(0), row, column))


@dataclass(frozen=True)
class Routed:
    """Tokens and their experts, and for the first product alone the rows as it takes them.

    x: [T, K]; ids: int32 [T, topk]; weights: fp32 [T, topk]; order: assignments by expert; counts: of each expert;
    ends: int32 [E]; rows: of x, in this order; sorted_x: [T * topk, K].
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    sorted_x: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routed:
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        ones = torch.ones_like(flat)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, ones)
        rows = order // ids.shape[1]
        return Routed(x, ids, weights, order, counts, counts.cumsum(0).int(), rows, x.index_select(0, rows))


@dataclass(frozen=True)
class MoePeer:
    """`first`: the first product of rows by index; `in_order`: of rows that lie in the order of the places already;
    `layer`: all of it, from ids to sums."""

    name: str
    missing: Callable[[], str | None]
    first: Callable[[DenseExperts, Routed], torch.Tensor]
    in_order: Callable[[DenseExperts, Routed], torch.Tensor]
    layer: Callable[[DenseExperts, Routed], torch.Tensor]


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[places, N] of x [places, K] and weight [E, N, K]."""
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends, out_dtype=torch.bfloat16)


def _torch_missing() -> str | None:
    return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no grouped products"


def _torch_first(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    return _grouped_mm(routed.x.index_select(0, routed.rows), dense.gate_up, routed.ends)


def _torch_in_order(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    return _grouped_mm(routed.sorted_x, dense.gate_up, routed.ends)


def _torch_layer(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    topk = routed.ids.shape[1]
    again = Routed.of(routed.x, routed.ids, routed.weights, dense.gate.shape[0])
    both = _grouped_mm(again.sorted_x, dense.gate_up, again.ends)
    hidden = functional.silu(both[:, ::2]) * both[:, 1::2]
    results = _grouped_mm(hidden, dense.down, again.ends) * again.weights.flatten()[again.order, None]
    out = torch.zeros((routed.x.shape[0], results.shape[1]), dtype=torch.float32, device=results.device)
    return out.index_add_(0, again.order // topk, results).to(torch.bfloat16)


PEERS = (MoePeer("torch grouped bf16", _torch_missing, _torch_first, _torch_in_order, _torch_layer),)
