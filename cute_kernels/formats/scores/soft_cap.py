"""Scores that stay below a cap."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class SoftCap(ScoreOption):
    """cap * tanh(score / cap)."""

    name, term = "soft_cap", f"{TERMS}:SoftCapTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.soft_cap

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        cap = block.call.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)
