"""What a transformed cache's center has taken off scores."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Shift(ScoreOption):
    """softmax_scale times a number of each query: what a transformed cache's centre has taken off its scores."""

    name, term = "shift", f"{TERMS}:ShiftTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.shift

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        call = block.call
        if call.q_shift is None:
            return scores
        shift = call.softmax_scale * call.q_shift.to(scores.dtype)
        return scores + shift.unflatten(2, (call.num_kv_heads, call.group)).unsqueeze(-1)
