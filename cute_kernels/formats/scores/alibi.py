"""Scores that fall with the distance of a key."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Alibi(ScoreOption):
    """A slope of each head times the distance from the query to the key (Press et al. 2022)."""

    name, term = "alibi", f"{TERMS}:AlibiTerm"

    def is_in(self, features: Features) -> bool:
        return features.alibi

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        slopes = block.call.alibi_slopes
        if slopes is None:
            return scores
        return scores + block.by_head(slopes, scores.dtype) * block.distances.to(scores.dtype)
