"""An additive bias."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Bias(ScoreOption):
    """A number of each request, query, head and key."""

    name, term = "bias", f"{TERMS}:BiasTerm"

    def is_in(self, features: Features) -> bool:
        return features.bias is not None

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        call = block.call
        if call.bias is None:
            return scores
        full = call.bias.tensor.expand(call.batch, call.q_len, call.num_q_heads, call.max_seq_len)
        part = full[..., block.keys_at].to(scores.dtype)
        return scores + part.unflatten(2, (call.num_kv_heads, call.group))
