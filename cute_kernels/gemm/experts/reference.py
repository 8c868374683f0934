"""The reference of layers of experts, in fp32 PyTorch. It also computes calls with CPU tensors."""

from __future__ import annotations

import functools
import itertools

import torch

from cute_kernels.gemm.activations import ActivationFunction, out_features
from cute_kernels.gemm.operands.fp8 import fp8_rows
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.reference import linear_reference


def grouped_linear_reference(
    x: torch.Tensor,
    weight: PackedExperts,
    expert_offsets: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | ActivationFunction | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    activations: str | None = None,
) -> torch.Tensor:
    """Computes row p of the result as activation(x[rows[p]] W_e^T + bias_e) for each place p of each expert e. The
    places of expert e are expert_offsets[e] to expert_offsets[e + 1] - 1.

    Products are as in `cute_kernels.gemm.linear_reference`. Results at places that no expert has are 0.

    Args:
        x, weight, expert_offsets, rows, bias, activation, out_dtype, batch_invariant, activations: as for
            `cute_kernels.gemm.experts.grouped_linear`.
    """
    places = x.shape[0] if rows is None else rows.shape[0]
    columns = out_features(weight.out_features, activation)
    out = torch.zeros(places, columns, dtype=out_dtype or x.dtype, device=x.device)
    product = functools.partial(linear_reference, activation=activation, batch_invariant=batch_invariant)
    for expert, (first, last) in enumerate(itertools.pairwise(expert_offsets.tolist())):
        if first == last:
            continue
        chosen = x[first:last] if rows is None else x[rows[first:last].long()]
        expert_bias = None if bias is None else bias[expert]
        rounded = chosen if activations is None else fp8_rows(chosen, weight.format)
        out[first:last] = product(rounded, weight[expert], expert_bias, out_dtype=out.dtype)
    return out


def route_reference(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts assignments by expert, and keeps the order of each expert's assignments. It never waits for a device.

    Args:
        topk_ids: integers [tokens, topk]; an assignment to an id outside 0 to num_experts - 1 goes nowhere.

    Returns:
        offsets int32 [num_experts + 1], the first place of each expert; rows int32 [tokens * topk], the token at each
        place, 0 after the last one; places int32 [tokens, topk], the place of each assignment or -1.
    """
    ids = topk_ids.reshape(-1).long()
    known = (ids >= 0) & (ids < num_experts)
    ids = torch.where(known, ids, num_experts)
    order = ids.argsort(stable=True)
    offsets = torch.searchsorted(ids[order], torch.arange(num_experts + 1, device=ids.device)).int()
    places = torch.empty_like(ids).index_copy_(0, order, torch.arange(ids.numel(), device=ids.device))
    places = torch.where(known, places, -1).view(topk_ids.shape).int()
    rows = order // max(1, topk_ids.shape[1])
    rows = torch.where(torch.arange(ids.numel(), device=ids.device) < offsets[-1], rows, 0)
    return offsets, rows.int(), places


def combine_reference(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Computes the sum over j of weights[t, j] * results[places[t, j]] in fp32, in the order of j. Assignments at place
    -1 are left out."""
    tokens, topk = places.shape
    out = torch.zeros(tokens, results.shape[1], dtype=torch.float32, device=results.device)
    for j in range(topk):
        place = places[:, j].long()
        part = results[place.clamp(min=0)].float() * weights[:, j, None].float() if results.shape[0] else out
        out = torch.where(place[:, None] >= 0, out + part, out)
    return out.to(out_dtype)


def fused_moe_reference(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str | ActivationFunction = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    activations: str | None = None,
) -> torch.Tensor:
    """Computes the sum over j of topk_weights[t, j] * down_e(activation(gate_e(x[t]), up_e(x[t]))), e = topk_ids[t, j].

    Hidden activations are rounded to x's dtype, as tensor cores read them. All other numbers are fp32.

    Args:
        x, gate_up, down, topk_ids, topk_weights, activation, gate_up_bias, down_bias, out_dtype, batch_invariant,
        activations: as for `cute_kernels.gemm.experts.fused_moe`.
    """
    offsets, rows, places = route_reference(topk_ids, len(gate_up))
    product = functools.partial(grouped_linear_reference, batch_invariant=batch_invariant, activations=activations)
    hidden = product(x, gate_up, offsets, rows=rows, bias=gate_up_bias, activation=activation)
    results = product(hidden, down, offsets, bias=down_bias, out_dtype=torch.float32)
    return combine_reference(results, places, topk_weights, out_dtype or x.dtype)
