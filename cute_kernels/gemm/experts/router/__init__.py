"""The router of a mixture of experts: from hidden states to each token's experts and their weights.

Read on in `routing` (what a model's router computes, as data), `reference` (the same in fp32 PyTorch), `call` and
`ops`. `plan` chooses a call's kernel, `kernel` has one launch from hidden states or from logits, and `selection` says
how a warp chooses a token's experts.
"""

from __future__ import annotations

import torch

from cute_kernels.gemm.experts.router import ops
from cute_kernels.gemm.experts.router.call import RouteCall
from cute_kernels.gemm.experts.router.routing import Routing

__all__ = ["Routing", "route"]


def route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts by hidden weight^T + bias; products, sums and scores are in fp32.

    Nothing waits for the device, and `cute_kernels.fused_moe` takes both results as they are. Works under
    ``torch.compile(fullgraph=True)`` as the operator ``cute_kernels::route``. It has no gradient. Up to 64 tokens of
    bf16 or fp16 are one launch on Hopper, and a token's bits do not depend on the others. With more tokens, last bits
    may depend on their number.

    Args:
        hidden: bf16, fp16 or fp32 [T, K]; T may be 0.
        weight: bf16, fp16 or fp32 [E, K], contiguous, E and K at least 1.
        routing: how logits become experts and weights.
        bias: [E], floating, added to the logits.
        correction: [E], floating, added to the scores that experts are ranked by, and not to their weights (DeepSeek's
            ``e_score_correction_bias``).
        padding: bool [T], contiguous; ids of tokens for which it is True are -1, of no expert.

    Returns:
        (ids int32 [T, top_k], weights fp32 [T, top_k]), each token's experts in order of rank. Among equal scores the
        lower index ranks first. NaN ranks above all numbers, as in `torch.topk`.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    return ops.route(RouteCall(hidden, weight, routing, bias, correction, padding))
