"""Experts with biases and a clamped, shifted SwiGLU, as gpt-oss has them: two grouped products with PyTorch between.

    gate * sigmoid(alpha * gate) * (up + 1),  gate at most the limit, up between minus and plus the limit

The products add the biases in fp32; so what is activated is rounded once, to the inputs' dtype. Nothing waits for a
device. Routing, activation and adding up are PyTorch's, which is launches that `fused_moe` has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.gemm.experts.call import GroupedCall
from cute_kernels.gemm.experts.ops import grouped
from cute_kernels.gemm.experts.reference import combine_reference, route_reference
from cute_kernels.gemm.packed_experts import PackedExperts


@dataclass(frozen=True)
class ClampedSwiglu:
    """The activation.

    Args:
        alpha: what gates are multiplied with before the sigmoid.
        limit: of gates from above, and of ups on both sides.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, pairs: torch.Tensor) -> torch.Tensor:
        """[..., I] of pairs [..., 2 I], gate and up in turn, in their dtype."""
        gate, up = pairs[..., ::2], pairs[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


def clamped_moe(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    biases: tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: ClampedSwiglu,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Sum over j of topk_weights[t, j] * (down_e(activation(gate_up_e(x[t]) + biases[0][e])) + biases[1][e]).

    Args:
        x, gate_up, down, topk_weights, topk_ids, batch_invariant: as for `cute_kernels.fused_moe`.
        biases: [E, 2 I], in turn as the rows of gate_up, and [E, N], in x's dtype.
        activation: of the first product.

    Returns:
        [T, N] in x's dtype.

    Raises:
        TypeError, ValueError: as `cute_kernels.gemm.experts.grouped_linear`.
    """
    offsets, rows, places = route_reference(topk_ids, len(gate_up))
    wide: dict[str, Any] = {"out_dtype": torch.float32, "batch_invariant": batch_invariant}
    pairs = grouped(GroupedCall(x, gate_up, offsets, rows, biases[0], **wide))
    results = grouped(GroupedCall(activation(pairs).to(x.dtype), down, offsets, None, biases[1], **wide))
    return combine_reference(results, places, topk_weights, x.dtype)
