"""`Routing`, which describes the computation of a model's router as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cute_kernels.arguments import check_count, check_flag, check_number

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""How a logit x becomes a score: by softmax over all experts, 1 / (1 + exp(-x)), or sqrt(log(1 + exp(x)))."""
SCORINGS: tuple[str, ...] = get_args(Scoring)

LEAST_SUM = 1e-20  # added to the sum that weights are divided by, as DeepSeek's own code does


@dataclass(frozen=True)
class Routing:
    """How a token's logits become experts and weights.

    A token ranks experts by their scores, plus the correction if there is one. With softmax, and without correction and
    groups, it ranks experts by their logits instead. The order is the same, and stays exact if different logits
    round to equal scores.

    | model | routing |
    |---|---|
    | Mixtral, gpt-oss (which takes softmax after its choice) | ``Routing(top_k, renormalize=True)`` |
    | Qwen3-MoE | ``Routing(top_k, renormalize=norm_topk_prob)`` |
    | DeepSeek V3, GLM-4.5 | ``Routing(top_k, "sigmoid", norm_topk_prob, routed_scaling_factor, n_group, topk_group)`` |
    | DeepSeek V4 | ``Routing(top_k, "sqrtsoftplus", True, routed_scaling_factor)`` |

    Attributes:
        top_k: number of experts that a token gets.
        scoring: how a logit becomes a score.
        renormalize: whether a token's weights are divided by their sum.
        scale: factor of the weights, applied last.
        groups: number of groups of neighbouring experts. All groups have the same size, at least two experts if there
            is more than one group.
        kept_groups: number of groups from which a token may choose experts. A token ranks groups by the sum of each
            group's two best scores.

    Raises:
        TypeError, ValueError: an attribute is none of these; the message names it.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k, 1)
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring: got {self.scoring!r}, want one of {', '.join(SCORINGS)}")
        check_flag("renormalize", self.renormalize)
        check_number("scale", self.scale)
        check_count("groups", self.groups, 1)
        check_count("kept_groups", self.kept_groups, 1, self.groups)

    @property
    def fields(self) -> tuple[int, Scoring, bool, float, int, int]:
        """The values of all fields, from which an equal `Routing` can be made."""
        return self.top_k, self.scoring, self.renormalize, self.scale, self.groups, self.kept_groups

    def check_experts(self, experts: int) -> None:
        """Raises ValueError unless tokens can choose among ``experts`` experts."""
        if experts % self.groups or (self.groups > 1 and experts < 2 * self.groups):
            raise ValueError(f"routing: got {self.groups} groups of {experts} experts, want equal ones of two or more")
        kept = experts // self.groups * self.kept_groups
        if self.top_k > kept:
            raise ValueError(f"routing: got top_k {self.top_k} of {kept} experts, want at most as many")

    def ranks_logits(self, has_correction: bool) -> bool:
        """Returns whether experts are ranked by their logits."""
        return self.scoring == "softmax" and self.groups == 1 and not has_correction
