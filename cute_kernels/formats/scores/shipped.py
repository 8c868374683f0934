"""The shipped score options with their formulas in the reference; :mod:`.terms` has their device code."""

from __future__ import annotations

import torch

from cute_kernels.formats.scores.base import TERMS, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import Features


class Shift(ScoreOption):
    """Adds softmax_scale times q . k_center to each score. Subtracting the center of a transformed cache has lowered q
    . k by q . k_center.
    """

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


class SoftCap(ScoreOption):
    """Replaces scores by cap * tanh(score / cap)."""

    name, term = "soft_cap", f"{TERMS}:SoftCapTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.soft_cap

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        cap = block.call.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Alibi(ScoreOption):
    """Adds the query head's slope times (key position - query position) (Press et al. 2022)."""

    name, term = "alibi", f"{TERMS}:AlibiTerm"

    def is_in(self, features: Features) -> bool:
        return features.alibi

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        slopes = block.call.alibi_slopes
        if slopes is None:
            return scores
        return scores + block.by_head(slopes, scores.dtype) * block.distances.to(scores.dtype)


class Sinks(ScoreOption):
    """Adds one more logit for each query head to the softmax's denominator. Scores do not change;
    `reference.apply_sinks` applies the sinks.
    """

    name, term = "sinks", f"{TERMS}:SinksTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.sinks

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores


class Bias(ScoreOption):
    """Adds the number that a bias tensor has for each request, query, head and key."""

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


class Window(ScoreOption):
    """Hides keys farther back than a window. Scores do not change; `reference.seen_keys` says which keys are hidden."""

    name, term = "window", f"{TERMS}:WindowTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.window

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores
