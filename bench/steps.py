"""Decode steps of whole models as bare loops over this library's calls: the layers that `bench.e2e_steps` times.

A step is one token of each request through all layers, captured in a CUDA graph: norms, products, RoPE and append,
attention, gated units or experts. There is no LM head, no sampling, and, of a shard, no all-reduce. Weights and cache
rows are random. Of the layers `DISTINCT` have memory of their own and are gone through again and again: between two
uses of a layer far more is read than L2 holds, so all comes from memory as in a model that has each layer once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import moe
from bench.random_weights import Format, Weights
from bench.workloads import MoeModel
from cute_kernels import (
    NormedRows,
    append_and_decode,
    append_kv,
    quantize_kv,
    quantized_layer,
    quantized_linear,
    quantized_linear_norm,
    rms_norm,
)
from cute_kernels.formats.kv import format_of
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import deferred
from cute_kernels.gemm.experts import Routing, fused_moe, route
from cute_kernels.gemm.layer.call import serves_rows
from cute_kernels.gemm.layer.config import LayerProductsConfig, config_for
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES
from cute_kernels.kv_cache import Rope
from cute_kernels.kv_cache.calibration import scale_shape
from cute_kernels.names import KvFormatName, MlaFormatName
from cute_kernels.runtime import KernelSpec

DISTINCT = 4
PAGE_SIZE = 64
FILLED_ROWS = 1 << 20
EPS = 1e-5
ROPE_THETA = 500000.0
SDPA_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
ENDS = ("o", "down")  # products that add to the residual stream: a norm follows
FORMATS = {"w4": Format(4), "w8": Format(8)}
Cached = KvFormatName | MlaFormatName


@dataclass(frozen=True)
class StepModel:
    """What of a model a decode step depends on. experts: of which topk are taken, each of ``intermediate``; 0: none."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128
    experts: int = 0
    topk: int = 0
    about: str = ""

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(N, K) by name; experts' products are not among them."""
        heads = self.num_q_heads * self.head_dim
        both = heads + 2 * self.num_kv_heads * self.head_dim
        found = {"qkv": (both, self.hidden), "o": (self.hidden, heads)}
        if self.experts:
            return found
        return found | {"gate_up": (2 * self.intermediate, self.hidden), "down": (self.hidden, self.intermediate)}

    def weight_bytes(self, weights: str, batch: int) -> float:
        """Of a layer's weights that a step must read; of experts, those that ``batch`` tokens take on average."""
        dense = sum(n * k for n, k in self.products.values()) * element_bytes(weights)
        if not self.experts:
            return dense
        active = self.experts * (1 - (1 - self.topk / self.experts) ** batch)
        # Experts are in 4 bits wherever anything is quantised.
        element = element_bytes("bf16" if weights == "bf16" else "w4")
        return dense + active * 3 * self.hidden * self.intermediate * element + 2 * self.hidden * self.experts

    def cache_bytes(self, kv: Cached, tokens: int, v: Cached | None = None) -> int:
        """Of a layer's K and V of so many tokens."""
        return tokens * self.num_kv_heads * sum(format_of(name).row_bytes(self.head_dim) for name in (kv, v or kv))

    @property
    def cases(self) -> tuple[StepCase, ...]:
        """Ways to compute a step that are measured; the first is the baseline."""
        return (*CASES, ROUTED) if self.experts else CASES

    def step(self, case: StepCase, shape: Shape, device: str = "cuda", layers: int | None = None) -> Step:
        return Step(self, case, shape, device, layers)


MODELS = {
    "llama3-8b": StepModel("Llama-3-8B", 32, 4096, 14336, 32, 8),
    "llama2-70b-shard8": StepModel("Llama-2-70B, one of 8 GPUs", 80, 8192, 3584, 8, 1, about="without all-reduce"),
    "qwen3-30b-a3b": StepModel("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, experts=128, topk=8),
}


@dataclass(frozen=True)
class StepCase:
    """A way to compute the step. weights: "bf16", "w4" or "w8"; kv: a cache format; v: of V, if it has another;
    sdpa: whether torch attends; routes: whether experts are chosen by `route`, not torch."""

    weights: str
    kv: Cached
    sdpa: bool = False
    routes: bool = False
    v: KvFormatName | None = None

    @property
    def formats(self) -> tuple[Cached, Cached]:
        """Of K and of V."""
        return self.kv, self.v or self.kv

    @property
    def name(self) -> str:
        cache = "bf16 SDPA" if self.sdpa else " + ".join(dict.fromkeys(self.formats))
        return f"{self.weights}, {cache}{', route' if self.routes else ''}"


CASES = (
    StepCase("bf16", "bf16", sdpa=True),
    StepCase("w4", "bf16", sdpa=True),
    StepCase("bf16", "int4_g4"),
    StepCase("w4", "int4_g4"),
    StepCase("w4", "int8_token_head"),
    StepCase("w4", "bf16"),
    StepCase("w8", "int8_token_head"),
    StepCase("w4", "e4m3_tensor"),
    StepCase("w4", "int8_token_head", v="int4_g4"),
)
BASELINE = CASES[0]
ROUTED = StepCase("w4", "int4_g4", routes=True)  # of models with experts


def element_bytes(weights: str) -> float:
    """Of a weight, with its share of a group's scale."""
    return 2.0 if weights == "bf16" else int(weights[1:]) / 8 + 2 / 128


@dataclass(frozen=True)
class Shape:
    """What is stepped: requests, and tokens that each has in the cache, the new one among them."""

    batch: int
    context: int


def packed(n: int, k: int, weights: str, device: str) -> PackedWeight:
    """A random weight."""
    return Weights(device).of(FORMATS[weights].problem(1, n, k))


def launch_of_a_layer(model: StepModel, case: StepCase, batch: int) -> LayerProductsConfig | None:
    """The kernel of `quantized_layer` that a step takes; None where its products are launches of their own."""
    if case.weights != "w4" or model.experts or not serves_rows(batch):
        return None
    return config_for(max(k for _, k in model.products.values()))


def specs(model: StepModel, case: StepCase, batch: int) -> list[KernelSpec]:
    """The kernels of the products of a step."""
    if case.weights == "bf16":
        return []
    found: dict[KernelSpec, None] = {}
    for name, (n, k) in model.products.items():
        schedule = chosen(FORMATS[case.weights].problem(batch, n, k))
        found |= {GemmSpec(schedule.config): None}
        around = deferred(schedule, GIVES if name in ENDS else TAKES)
        if around is not None:
            found[GemmSpec(around)] = None
    whole = launch_of_a_layer(model, case, batch)
    if whole is not None:
        found[GemmSpec(whole)] = None
    if model.experts:
        sizes = MoeModel(model.name, model.experts, model.topk, model.hidden, model.intermediate)
        found |= dict.fromkeys(moe.specs([sizes], [batch]))
    return list(found)


@dataclass(frozen=True)
class Summed:
    """Rows, and their norm by the launch that added them up: of products that do not add to the residual stream."""

    rows: torch.Tensor
    values: torch.Tensor

    def normed(self) -> torch.Tensor:
        return self.values


Rows = NormedRows | Summed


def summed(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> Summed:
    """A sum and its norm in one launch."""
    values, rows = rms_norm(x, norm, residual=residual, eps=EPS)
    return Summed(rows, values)


class Step:
    """All layers of a model for one shape, as a call that can be captured.

    Args:
        model, case, shape: what is computed, and how.
        device: of all tensors.
        layers: how many are gone through; default the model's.
        one_launch: whether the products from one attention to the next are `quantized_layer`; default where a
            kernel was measured to be faster (`launch_of_a_layer`).
    """

    def __init__(
        self,
        model: StepModel,
        case: StepCase,
        shape: Shape,
        device: str = "cuda",
        layers: int | None = None,
        one_launch: bool | None = None,
    ):
        self.model, self.case, self.shape, self.device = model, case, shape, device
        self.layers = layers or model.layers
        has_kernel = launch_of_a_layer(model, case, shape.batch) is not None
        self.one_launch = has_kernel if one_launch is None else one_launch
        self.rope = Rope(model.head_dim, theta=ROPE_THETA)
        self.hidden = torch.randn(shape.batch, model.hidden, device=device).bfloat16()
        self.seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        self.parts = [self.make_layer() for _ in range(min(DISTINCT, self.layers))]

    def __call__(self) -> torch.Tensor:
        first = NormedRows(self.hidden, self.parts[0]["norm"], EPS)
        if self.one_launch:
            return self.in_one_launch(first)
        rows: Rows = first
        for number in range(self.layers):
            following = self.parts[(number + 1) % len(self.parts)]
            rows = self.layer(self.parts[number % len(self.parts)], rows, following)
        return rows.rows

    # -- what a layer has ---------------------------------------------------------------------------------------------

    def make_layer(self) -> dict[str, Any]:
        model = self.model
        parts: dict[str, Any] = {name: self.make_product(n, k) for name, (n, k) in model.products.items()}
        ones = torch.ones(model.hidden, dtype=torch.bfloat16, device=self.device)
        parts |= {"norm": ones, "mlp_norm": ones.clone(), "cache": self.make_cache()}
        if model.experts:
            parts["router"] = self.random(model.experts, model.hidden)
            parts["experts"] = self.make_experts()
        return parts

    def random(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(std=size[-1] ** -0.5)

    def make_product(self, n: int, k: int) -> Callable[..., torch.Tensor]:
        """x W^T, with options of `quantized_linear`."""
        if self.case.weights == "bf16":
            return partial(dense_product, weight=self.random(n, k))
        return partial(quantized_linear, weight=packed(n, k, self.case.weights, self.device))

    def make_experts(self) -> Callable[..., torch.Tensor]:
        sizes = MoeModel("", self.model.experts, self.model.topk, self.model.hidden, self.model.intermediate)
        if self.case.weights == "bf16":
            gate_up, down = (self.random(self.model.experts, n, k) for n, k in sizes.products)
            return partial(dense_experts, gate_up, down)
        gate_up, down = (moe.make_experts(sizes.experts, n, k, 0, self.device) for n, k in sizes.products)
        return lambda x, weights, ids: fused_moe(x, gate_up, down, weights, ids)

    def make_cache(self) -> dict[str, Any]:
        """Arguments of append and attention, head by head: pages in random order; of torch's attention, [batch, heads,
        tokens, d]."""
        model, shape = self.model, self.shape
        pages = -(-shape.context // PAGE_SIZE)
        given: dict[str, Any] = {"kv_format": self.case.formats, "seq_lens": self.seq_lens, "rope": self.rope}
        given["cache_layout"] = "HND"
        size: tuple[int, ...] = (shape.batch, model.num_kv_heads, pages * PAGE_SIZE)
        if not self.case.sdpa:
            size = (shape.batch * pages, model.num_kv_heads, PAGE_SIZE)
            table = torch.randperm(shape.batch * pages, device=self.device).to(torch.int32)
            given["block_table"] = table.view(shape.batch, pages)
        for operand, form in zip("kv", map(format_of, self.case.formats), strict=True):
            row = form.row_elements(model.head_dim)
            cache = given[f"{operand}_cache"] = torch.empty((*size, row), dtype=form.cache_dtype, device=self.device)
            if form.given_scale is not None:
                ones = torch.ones(scale_shape(form.given_scale, model.num_kv_heads, model.head_dim), device=self.device)
                given[f"{operand}_scale"] = ones
            self.fill_rows(cache, cast("KvFormatName", form.name), given.get(f"{operand}_scale"))
        return given

    def fill_rows(self, cache: torch.Tensor, kv_format: KvFormatName, scale: torch.Tensor | None = None) -> None:
        """Puts rows of random numbers into a contiguous cache, the same `FILLED_ROWS` again and again."""
        rows = cache.view(-1, 1, cache.shape[-1])
        numbers = torch.randn(min(FILLED_ROWS, len(rows)), 1, self.model.head_dim, device=self.device)
        fill_rows(rows, quantize_kv(numbers.bfloat16(), kv_format=kv_format, scale=scale))

    # -- what a layer does --------------------------------------------------------------------------------------------

    def in_one_launch(self, rows: NormedRows) -> torch.Tensor:
        """The residual stream behind all layers: the first one's qkv, then attention and a launch for each layer."""
        qkv: torch.Tensor | None = self.normed(self.parts[0]["qkv"], rows)
        for number in range(self.layers):
            assert qkv is not None
            own, following = (self.parts[i % len(self.parts)] for i in (number, number + 1))
            last = number + 1 == self.layers
            rows, qkv = quantized_layer(
                self.attended(qkv, own["cache"]),
                weight_of(own["o"]),
                weight_of(own["gate_up"]),
                weight_of(own["down"]),
                None if last else weight_of(following["qkv"]),
                residual=rows.rows,
                norm=own["mlp_norm"],
                following_norm=following["norm"],
                norm_eps=EPS,
            )
        return rows.rows

    def attended(self, qkv: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        """What attention gives o, [batch, heads * head_dim]."""
        model, batch = self.model, self.shape.batch
        heads = qkv.view(batch, 1, -1, model.head_dim)
        q, k, v = heads.split((model.num_q_heads, model.num_kv_heads, model.num_kv_heads), dim=2)
        return self.attend(q, k, v, cache).view(batch, -1)

    def layer(self, parts: dict[str, Any], rows: Rows, following: dict[str, Any]) -> Rows:
        """The residual stream behind a layer. following: what the next layer has."""
        model = self.model
        attended = self.attended(self.normed(parts["qkv"], rows), parts["cache"])
        rows = self.added(parts["o"], attended, rows.rows, parts["mlp_norm"], parts.get("gate_up"))
        if model.experts:
            x = rows.normed()
            if self.case.routes:
                ids, weights = route(x, parts["router"], Routing(model.topk))
                return summed(parts["experts"](x, weights, ids), rows.rows, following["norm"])
            weights, ids = torch.topk(functional.linear(x, parts["router"]).float().softmax(-1), model.topk, dim=-1)
            return NormedRows(rows.rows + parts["experts"](x, weights, ids), following["norm"], EPS)
        gated = self.normed(parts["gate_up"], rows, activation="swiglu")
        return self.added(parts["down"], gated, rows.rows, following["norm"], following["qkv"])

    def normed(self, product: Callable[..., torch.Tensor], rows: Rows, **options: Any) -> torch.Tensor:
        """A product of normed rows. In a graph a launch for the norm is faster than `quantized_linear(norm=)`, which
        spares the host one: 0.7 us of a layer with one row."""
        if isinstance(rows, Summed) or self.case.weights == "bf16":
            return product(rows.normed(), **options)
        return product(rows, **options)

    def added(
        self,
        product: Callable[..., torch.Tensor],
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        following: Callable[..., torch.Tensor] | None,
    ) -> NormedRows:
        """Rows with a product added to them, and the norm that the product ``following`` takes; experts take rows as
        they are."""
        if following is None or self.case.weights == "bf16":
            return NormedRows(product(x, residual=residual), norm, EPS)
        own, its = weight_of(product), weight_of(following)
        return quantized_linear_norm(x, own, residual=residual, norm=norm, norm_eps=EPS, following=its)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        if not self.case.sdpa:
            return append_and_decode(q, k, v, **cache)
        rotated = append_kv(k[:, 0], v[:, 0], q=q[:, 0], **cache)
        assert rotated is not None
        keys, values = (cache[name][:, :, : self.shape.context] for name in ("k_cache", "v_cache"))
        with sdpa_kernel(list(SDPA_BACKENDS), set_priority=True):
            return functional.scaled_dot_product_attention(rotated[:, :, None], keys, values, enable_gqa=True)

    @property
    def bytes(self) -> float:
        """That a step must read: weights and cache."""
        tokens = self.shape.batch * self.shape.context
        weights = self.model.weight_bytes(self.case.weights, self.shape.batch)
        return self.layers * (weights + self.model.cache_bytes(self.case.kv, tokens, self.case.v))


def weight_of(product: Callable[..., torch.Tensor]) -> PackedWeight:
    """The weight of `Step.make_product`'s call."""
    return product.keywords["weight"]  # pyright: ignore[reportFunctionMemberAccess]


def dense_product(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """What `quantized_linear` computes, by cuBLAS: the residual in its epilogue, the gate as torch has it."""
    if residual is not None:
        return torch.addmm(residual, x, weight.T)
    y = functional.linear(x, weight)
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return y


def dense_experts(
    gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """A layer of experts by torch's grouped products, [tokens, hidden]."""
    count, topk = gate_up.shape[0], ids.shape[1]
    order = ids.flatten().argsort()
    numbers = torch.arange(count, device=x.device)
    ends = (ids.flatten()[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)  # bincount would wait for the GPU
    both = torch._grouped_mm(x[order // topk], gate_up.transpose(-2, -1), offs=ends, out_dtype=torch.bfloat16)
    gate, up = both.chunk(2, dim=-1)
    results = torch._grouped_mm(functional.silu(gate) * up, down.transpose(-2, -1), offs=ends, out_dtype=torch.bfloat16)
    scaled = (results * weights.flatten()[order, None]).to(torch.bfloat16)
    return torch.zeros_like(x).index_add_(0, order // topk, scaled)


def fill_rows(rows: torch.Tensor, some: torch.Tensor) -> None:
    """Writes ``some`` rows again and again, until all have numbers."""
    for first in range(0, len(rows), len(some)):
        rows[first : first + len(some)] = some[: len(rows) - first]


def resident_bytes(model: StepModel, case: StepCase, shape: Shape) -> float:
    """Memory of a model's weights, every layer and expert, and its cache."""
    whole = replace(model, topk=model.experts) if model.experts else model
    tokens = shape.batch * shape.context
    return model.layers * (whole.weight_bytes(case.weights, 1) + model.cache_bytes(case.kv, tokens, case.v))
