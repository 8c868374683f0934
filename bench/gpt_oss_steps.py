"""Decode steps of gpt-oss for `bench.e2e_steps`: windows in every second layer, sinks, experts in MXFP4, the LM head.

A step ends with the logits in bf16. The router takes every token to its experts in one launch, and norms are in the
launch that adds a product to the residual stream. Projections of attention are cuBLAS's in bf16, as the checkpoint has
them, or this library's in 4 bits.

What a layer of gpt-oss-20b reads at one request of 8192 tokens, and what an H200 is expected to take (4.6 TB/s):

| part | launches | MB | us at that rate | us expected, bf16 | us expected, w4 |
|---|---|---|---|---|---|
| qkv, o with biases | 2 | 53.1, w4 13.7 | 11.5, w4 3.0 | 15.5 | 9.5 |
| attention, half of the layers with a window of 128 | 1 | 8.5 | 1.8 | 6 | 6 |
| norms with the sum before | 2 | 0 | 0 | 2.8 | 2.8 |
| router | 1 | 0.2 | 0 | 4 | 4 |
| four experts of 32 | 3 | 53.0 | 11.5 | 17.5 | 17.5 |

24 layers and the LM head of 1158 MB: 3.9 GB or 0.85 ms of reading; 1.4 ms expected, with projections in 4 bits 2.96 GB,
0.65 ms, and 1.25 ms. At 32 requests 31.6 experts are active: 17.9 GB, 3.9 ms, 5.2 ms expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.moe_fp8 import Fp8Layer, make_experts
from bench.steps import EPS, Rows, Shape, Step, StepCase, StepModel, element_bytes, packed, summed
from bench.workloads import MoeModel
from cute_kernels import NormedRows, YarnScaling, quantized_linear
from cute_kernels.gemm.experts import ClampedSwiglu, Routing, fused_moe, route
from cute_kernels.kv_cache import Rope

FORMAT = "mxfp4"
PACKED = "mxfp4+w4"  # experts in MXFP4, projections of attention in 4 bits
SCALING = YarnScaling(32.0, 4096, truncate=False)
BIAS_STD = 0.02
CASES = tuple(StepCase(weights, kv, routes=True) for weights in (FORMAT, PACKED) for kv in ("bf16", "int8_token_head"))


@dataclass(frozen=True)
class GptOss(StepModel):
    """Layers of gpt-oss. window: of every second layer's attention, the first among them."""

    head_dim: int = 64
    vocabulary: int = 201088
    window: int = 128

    @property
    def cases(self) -> tuple[StepCase, ...]:
        return CASES

    @property
    def sizes(self) -> MoeModel:
        """Of the layer of experts."""
        return MoeModel(self.name, self.experts, self.topk, self.hidden, self.intermediate)

    def weight_bytes(self, weights: str, batch: int) -> float:
        element = element_bytes("w4" if weights == PACKED else "bf16")
        dense = sum(n * k * element + 2 * n for n, k in self.products.values())
        active = self.experts * (1 - (1 - self.topk / self.experts) ** batch)
        expert = sum(n * k * (0.5 + 1 / 32) + 2 * n for n, k in self.sizes.products)
        return dense + active * expert + 2 * self.hidden * self.experts

    def step(self, case: StepCase, shape: Shape, device: str = "cuda", layers: int | None = None) -> Step:
        return GptOssStep(self, case, shape, device, layers)


class GptOssStep(Step):
    """`Step` of a `GptOss`."""

    model: GptOss

    def __init__(self, model: GptOss, case: StepCase, shape: Shape, device: str = "cuda", layers: int | None = None):
        super().__init__(model, case, shape, device, layers, one_launch=False)
        self.head = self.random(model.vocabulary, model.hidden)

    def __call__(self) -> torch.Tensor:
        """The logits, bf16 [batch, vocabulary]."""
        first = NormedRows(self.hidden, self.parts[0]["norm"], EPS)
        rows: Rows = first
        for number in range(self.layers):
            own, following = (self.parts[i % len(self.parts)] for i in (number, number + 1))
            rows = self.layer(own, rows, following)
        return functional.linear(rows.normed(), self.head)

    # -- what a layer has ---------------------------------------------------------------------------------------------

    def make_layer(self) -> dict[str, Any]:
        number = self.made = getattr(self, "made", -1) + 1
        parts = super().make_layer()
        parts["router_bias"] = self.bias(self.model.experts)
        parts["cache"] |= {"sinks": torch.randn(self.model.num_q_heads, device=self.device)}
        parts["cache"]["rope"] = Rope(self.model.head_dim, theta=150000.0, scaling=SCALING)
        if number % 2 == 0:
            parts["cache"]["window_size"] = self.model.window
        return parts

    def bias(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(std=BIAS_STD)

    def make_product(self, n: int, k: int) -> Callable[..., torch.Tensor]:
        if self.case.weights == PACKED:
            return partial(quantized_linear, weight=packed(n, k, "w4", self.device), bias=self.bias(n))
        return partial(functional.linear, weight=self.random(n, k), bias=self.bias(n))

    def make_experts(self) -> Callable[..., torch.Tensor]:
        sizes = self.model.sizes
        gate_up, down = make_experts(Fp8Layer(sizes, FORMAT, ()), self.device)
        biases = [self.bias(sizes.experts, n) for n, _ in sizes.products]
        given: dict[str, Any] = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
        given["activation"] = ClampedSwiglu()
        return lambda x, weights, ids: fused_moe(x, gate_up, down, weights, ids, **given)

    # -- what a layer does --------------------------------------------------------------------------------------------

    def layer(self, parts: dict[str, Any], rows: Rows, following: dict[str, Any]) -> Rows:
        attended = self.attended(parts["qkv"](rows.normed()), parts["cache"])
        between = summed(parts["o"](attended), rows.rows, parts["mlp_norm"])
        x = between.normed()
        ids, weights = route(x, parts["router"], Routing(self.model.topk, renormalize=True), bias=parts["router_bias"])
        return summed(parts["experts"](x, weights, ids), between.rows, following["norm"])

    @property
    def bytes(self) -> float:
        """Bytes that a step must read: weights with the LM head, and the cache within windows."""
        model, shape = self.model, self.shape
        weights = self.layers * model.weight_bytes(self.case.weights, shape.batch)
        seen = sum(shape.context if i % 2 else min(shape.context, model.window) for i in range(self.layers))
        head = 2 * model.vocabulary * model.hidden
        return weights + head + model.cache_bytes(self.case.kv, shape.batch * seen, self.case.v)


MODELS = {
    "gpt-oss-20b": GptOss(
        "gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, experts=32, topk=4, about="LM head included; experts in MXFP4"
    ),
}
