"""Routers of mixtures of experts in one launch, for routers whose ``forward`` has code of a class in `ROUTERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN

from cute_kernels.gemm.experts import QuantizedMoE, QuantizedRoutedExperts, Routing
from cute_kernels.gemm.experts.router.call import RouteCall
from cute_kernels.gemm.experts.router.ops import route
from cute_kernels.gemm.experts.router.routing import Scoring
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.blocks import Block
from cute_kernels.integrations.transformers.patterns import Known, recognise

CHECKED_TOKENS = 16


@dataclass(frozen=True)
class KnownRouter(Known):
    """A router: a product with ``weight``, and ``bias`` if there is one. The module's attributes have the settings.

    Attributes:
        scoring: as in `Routing`.
        renormalize: the attribute that says whether weights are divided by their sum; None: they always are.
        scale: the attribute with the number by which weights are multiplied.
        groups: the attributes with the number of groups and the number of groups that are kept.
        correction: the name of the buffer that is added to scores.
        function: the attribute with the scoring module, if the model's configuration chooses it.
    """

    scoring: Scoring = "softmax"
    renormalize: str | None = None
    scale: str | None = None
    groups: tuple[str, str] | None = None
    correction: str | None = None
    function: str | None = None

    def fits(self, router: Foreign) -> bool:
        """Returns whether a module with this code scores by ``scoring``. It is always True unless the model's
        configuration chooses the scoring.
        """
        return self.function is None or type(getattr(router, self.function)) is type(ACT2FN[self.scoring])

    def routing(self, router: Foreign) -> Routing:
        """Returns the routing that a module of this code computes."""
        return Routing(
            router.top_k,
            self.scoring,
            self.renormalize is None or bool(getattr(router, self.renormalize)),
            1.0 if self.scale is None else float(getattr(router, self.scale)),
            *((1, 1) if self.groups is None else (getattr(router, name) for name in self.groups)),
        )


ROUTERS = (
    KnownRouter("mixtral", "MixtralTopKRouter"),
    KnownRouter("qwen3_moe", "Qwen3MoeTopKRouter", renormalize="norm_topk_prob"),
    KnownRouter("gpt_oss", "GptOssTopKRouter"),
    KnownRouter(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        scoring="sigmoid",
        renormalize="norm_topk_prob",
        scale="routed_scaling_factor",
        groups=("num_group", "topk_group"),
        correction="e_score_correction_bias",
    ),
    KnownRouter(
        "deepseek_v4",
        "DeepseekV4TopKRouter",
        scoring="sqrtsoftplus",
        scale="routed_scaling_factor",
        correction="e_score_correction_bias",
        function="score_fn",
    ),
)
"""Routers by the class that defines their code. Other classes with equal code match, too: GLM-4.5's matches DeepSeek
V3's."""


class RouterBlock(Block):
    """A router's ``forward`` that returns (None, weights fp32, ids int32), as quantised experts take them.

    None replaces the logits, which `QuantizedMoE` and `QuantizedRoutedExperts` do not read.
    """

    compiles = True

    def __init__(self, module: nn.Module, known: KnownRouter) -> None:
        super().__init__(module)
        self.known, self.routing = known, known.routing(self.module)

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module = self.module
        if not self._may_pass_by([module]):
            return self.own(hidden_states)
        correction = None if self.known.correction is None else getattr(module, self.known.correction)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = route(RouteCall(x, module.weight, self.routing, getattr(module, "bias", None), correction))
        return None, weights, ids


def router_blocks(model: nn.Module) -> Iterator[RouterBlock]:
    """Yields blocks for all known routers of quantised experts."""
    for module in model.modules():
        children = dict(module.named_children())
        if isinstance(module, QuantizedMoE) or isinstance(children.get("experts"), QuantizedRoutedExperts):
            router = children.get("gate", children.get("router"))
            known = None if router is None else recognise(router, ROUTERS)
            if router is not None and known is not None and known.fits(router):
                yield RouterBlock(router, known)


def weights_on_noise(block: RouterBlock, forward: Callable[..., Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the weights of the experts that a router's ``forward`` chooses for random tokens.

    They are sorted, since rounding may change the order or the last expert.
    """
    weight = block.module.weight
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((CHECKED_TOKENS, weight.shape[1]), generator=generator, device="cpu", dtype=torch.float32)
    noise = noise.to(weight.device, weight.dtype)
    return [forward(noise)[1].to(weight.dtype).sort(dim=-1).values]
