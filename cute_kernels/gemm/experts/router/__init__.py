"""The router of a mixture of experts: from hidden states to each token's experts and their weights.

`routing` describes a model's router as data. `reference` computes it in fp32 PyTorch. `call` and `ops` have the call
and its operator, and `plan` chooses a call's kernel. `kernel` has a kernel that starts from hidden states and one that
starts from logits. In both, a warp chooses a token's experts by `selection`.
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

    The host never waits for the device. `cute_kernels.fused_moe` takes both results without a change. Works under
    ``torch.compile(fullgraph=True)`` as the operator ``cute_kernels::route``. It has no gradient. On Hopper, up to 64
    tokens in bf16 or fp16 take one launch, and a token's result does not depend on the other tokens. With more tokens,
    the last bits of weights may depend on the number of tokens.

    Args:
        hidden: bf16, fp16 or fp32 [T, K]; T may be 0.
        weight: bf16, fp16 or fp32 [E, K], contiguous, E and K at least 1.
        routing: how logits become experts and weights.
        bias: [E], floating, added to the logits.
        correction: [E], floating, added to the scores that experts are ranked by, and not to their weights (DeepSeek's
            ``e_score_correction_bias``).
        padding: bool [T], contiguous. True: the token is padding and gets ids of -1, which is no expert.

    Returns:
        (ids int32 [T, top_k], weights fp32 [T, top_k]), each token's experts in order of rank. Among equal scores the
        lower index ranks first. NaN ranks above all numbers, as in `torch.topk`.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    return ops.route(RouteCall(hidden, weight, routing, bias, correction, padding))
