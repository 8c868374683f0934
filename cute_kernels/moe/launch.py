"""Launching the CUDA kernels of the family. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.linear.launch import _address, _aligned
from cute_kernels.linear.plan import ACTIVATIONS, OUT_KINDS
from cute_kernels.moe.plan import combine_function, plan_of, routing_function
from layouts.weights.hopper import tile_k

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Weights:
    """The tensors of `PackedExperts`, with group_size 0 for one scale per row."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    n: int
    k: int


@dataclass(frozen=True)
class Routing:
    """Where assignments are, int32: offsets [experts + 1], rows [places] or None, places [tokens, topk] or None."""

    offsets: torch.Tensor
    rows: torch.Tensor | None
    places: torch.Tensor | None = None


def launch_grouped(
    x: torch.Tensor,
    weights: Weights,
    routing: Routing,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes the product at every place that an expert has to ``out`` [places, columns], contiguous, and returns it."""
    if out.shape[0] == 0:
        return out
    index = x.get_device()
    k_pad = weights.codes.shape[2] * tile_k(weights.bits)
    plan = plan_of(
        out.shape[0], weights.codes.shape[0], weights.n, weights.k, k_pad, weights.bits, x.dtype, weights.group_size,
        weights.zeros is not None, index,
    )  # fmt: skip
    tensors = weights.codes.data_ptr(), weights.scales.data_ptr(), _address(weights.zeros), _address(bias)
    plan.run(
        _aligned(x),
        (*tensors, out.data_ptr()),
        (routing.offsets.data_ptr(), _address(routing.rows)),
        (weights.n, ACTIVATIONS[activation], OUT_KINDS[out.dtype]),
    )
    return out


def launch_routing(topk_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts assignments, int32 or int64 [tokens, topk] with at least one, by expert."""
    count = topk_ids.numel()
    words = torch.empty(num_experts + 1 + 2 * count, dtype=torch.int32, device=topk_ids.device)
    offsets, rows, places = words.split((num_experts + 1, count, count))
    function = routing_function(8 * topk_ids.element_size(), topk_ids.get_device())
    function(topk_ids, offsets.data_ptr(), rows.data_ptr(), places.data_ptr(), num_experts)
    return Routing(offsets, rows, places.view(topk_ids.shape))


def launch_combine(results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Adds up fp32 results [places, n] of each token, with fp32 weights [tokens, topk], in ``out`` [tokens, n]."""
    function = combine_function(DTYPE_NAMES[out.dtype], results.get_device())
    function(results, places.data_ptr(), weights.data_ptr(), out.data_ptr(), *places.shape)


def launch_moe(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The four launches of a layer: routing, two products, sum. At least one token, one assignment each."""
    routing = launch_routing(topk_ids, gate_up.codes.shape[0])
    places = topk_ids.numel()
    hidden = torch.empty((places, gate_up.n // 2), dtype=x.dtype, device=x.device)
    launch_grouped(x, gate_up, routing, None, "swiglu", hidden)
    results = torch.empty((places, down.n), dtype=torch.float32, device=x.device)
    launch_grouped(hidden, down, Routing(routing.offsets, None), None, None, results)
    assert routing.places is not None
    launch_combine(results, routing.places, topk_weights, out)
    return out
