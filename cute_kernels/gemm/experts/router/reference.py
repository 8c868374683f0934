"""The reference of a router, in fp32 PyTorch. It also computes calls with CPU tensors, and calls that no kernel
supports."""

from __future__ import annotations

import torch
from torch.nn import functional

from cute_kernels.gemm.experts.router.routing import LEAST_SUM, Routing


def route_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (ids, weights) as `cute_kernels.gemm.experts.route` does, on any device. It does not wait for the
    device."""
    logits = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    ids, weights = select_reference(logits, routing, correction)
    return ids if padding is None else ids.masked_fill(padding[:, None], -1), weights


def select_reference(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids int32 [T, top_k], weights [T, top_k] in the dtype of logits [T, E])."""
    scores = scores_of(logits, routing)
    ranked = logits if routing.ranks_logits(correction is not None) else scores
    if correction is not None:
        ranked = ranked + correction.to(ranked.dtype)
    if routing.groups > 1:
        ranked = _within_groups(ranked, routing)
    ids = _first(ranked, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return ids.int(), weights * routing.scale


def scores_of(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the scores of logits [T, E]."""
    if routing.scoring == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if routing.scoring == "sigmoid" else functional.softplus(logits).sqrt()


def _within_groups(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns ``ranked`` with -inf for experts outside the groups that the token keeps."""
    grouped = ranked.view(len(ranked), routing.groups, ranked.shape[1] // routing.groups)
    best = grouped.sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)
    left = torch.ones_like(best, dtype=torch.bool).scatter_(1, _first(best, routing.kept_groups), False)
    return grouped.masked_fill(left[..., None], -torch.inf).view_as(ranked)


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices of each row's largest values, int64 [T, count]. NaN is greater than all numbers. Among equal
    values, the one with the lower index comes first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
