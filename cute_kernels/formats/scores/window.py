"""Sliding windows."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Window(ScoreOption):
    """Keys far back are not seen: no score changes, and `reference.seen_keys` says which are."""

    name, term = "window", f"{TERMS}:WindowTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.window

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores
