"""Routers of layers of experts: torch's launches beside `route`, alone and in front of the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from bench.peers import relative_error
from bench.suites import Bench, WrongOutput
from bench.timing import time_graph_cold
from bench.workloads import MoeModel, MoeShape
from cute_kernels.gemm.experts import Routing, fused_moe, route
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import LOGITS, TILE_TOKENS, RouterConfig, lane_experts_of
from cute_kernels.runtime import KernelSpec

if TYPE_CHECKING:
    from bench.moe_peers import MoeWeights

ROUTINGS: Mapping[str, Routing] = {
    "Mixtral-8x7B": Routing(2, renormalize=True),
    "Qwen3-30B-A3B": Routing(8, renormalize=True),
    "DeepSeek-V3": Routing(8, "sigmoid", True, 2.5, 8, 4),
}
TOLERANCE = 0.02  # relative error (norm) of sorted weights: torch's softmax has logits rounded to bf16

Routed = tuple[torch.Tensor, torch.Tensor]


def specs(model: MoeModel) -> list[KernelSpec]:
    """The kernels of a model's router."""
    lanes = lane_experts_of(model.experts)
    routers = [RouterConfig(lane_experts=lanes, tile_tokens=tile) for tile in TILE_TOKENS]
    return [RouterSpec(config) for config in (*routers, RouterConfig(weight=LOGITS, lane_experts=lanes))]


@dataclass(frozen=True)
class Router:
    """A model's router with random weights, and the tokens that it is given."""

    routing: Routing
    x: torch.Tensor
    weight: torch.Tensor
    correction: torch.Tensor | None

    @staticmethod
    def of(shape: MoeShape, device: torch.device | str = "cuda") -> Router:
        model, routing = shape.model, ROUTINGS[shape.model.name]
        generator = torch.Generator(device).manual_seed(shape.tokens)
        sizes = (shape.tokens, model.hidden), (model.experts, model.hidden)
        x, weight = (torch.randn(size, generator=generator, device=device).bfloat16() for size in sizes)
        correction = None
        if routing.scoring == "sigmoid":
            correction = 0.1 * torch.randn(model.experts, generator=generator, device=device)
        return Router(routing, x, weight * model.hidden**-0.5, correction)

    def ours(self) -> Routed:
        return route(self.x, self.weight, self.routing, correction=self.correction)

    def by_torch(self) -> Routed:
        """As models in torch do it: logits in bf16 and their softmax in fp32, or all in fp32 with sigmoid."""
        routing, (x, weight) = self.routing, (self.x, self.weight)
        if self.correction is None:
            chosen, ids = functional.linear(x, weight).softmax(-1, dtype=torch.float32).topk(routing.top_k)
            return ids, (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
        scores = functional.linear(x.float(), weight.float()).sigmoid()
        grouped = (scores + self.correction).unflatten(1, (routing.groups, -1))
        kept = grouped.topk(2).values.sum(-1).topk(routing.kept_groups).indices
        left = torch.ones_like(grouped[..., 0]).scatter_(1, kept, 0.0).bool()
        ids = grouped.masked_fill(left[..., None], -torch.inf).flatten(1).topk(routing.top_k).indices
        chosen = scores.gather(1, ids)
        return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * routing.scale


def is_wanted(shape: MoeShape, rows: list[dict[str, Any]]) -> bool:
    """Whether the router of a shape is known, and not among the rows that have been measured."""
    return shape.model.name in ROUTINGS and shape.name not in [row["name"] for row in rows]


def measure(bench: Bench, shape: MoeShape, weights: MoeWeights) -> dict[str, Any]:
    """Checks and times both routers, alone and in front of the layer, each as one CUDA graph with a cold L2."""
    router = Router.of(shape, weights.gate_up.device)
    ways: dict[str, Callable[[], Routed]] = {"route": router.ours, "torch": router.by_torch}
    ours, theirs = (way()[1].sort(-1).values.float() for way in ways.values())
    error = relative_error(ours, theirs)
    if not error <= TOLERANCE:
        raise WrongOutput(f"router: relative error {error:.2e} of its weights, at most {TOLERANCE:g}")

    def layer(way: Callable[[], Routed]) -> torch.Tensor:
        ids, shares = way()
        return fused_moe(router.x, weights.gate_up, weights.down, shares, ids)

    row: dict[str, Any] = {"name": shape.name, "shape": {"model": asdict(shape.model), "tokens": shape.tokens}}
    for name, way in ways.items():
        row[f"{name}_us"] = time_graph_cold(way, bench.flush, bench.protocol).median_us
        row[f"{name}_layer_us"] = time_graph_cold(partial(layer, way), bench.flush, bench.protocol).median_us
    return row | {"error": error}


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row of a record."""
    return [
        f"router of {row['name']}: {row['route_us']:.1f} us, torch {row['torch_us']:.1f}; "
        f"with the layer {row['route_layer_us']:.1f}, torch {row['torch_layer_us']:.1f}"
        for row in rows
    ]
