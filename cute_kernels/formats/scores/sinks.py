"""A logit more in the denominator of each head."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Sinks(ScoreOption):
    """One more logit of each head in the denominator: no score changes; `reference.apply_sinks` says what does."""

    name, term = "sinks", f"{TERMS}:SinksTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.sinks

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores
