"""Launching the products of experts and what is around them. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.linear.experts import ExpertsForm, PackedExperts
from cute_kernels.linear.launch import _address, _aligned
from cute_kernels.linear.plan import ACTIVATIONS, OUT_KINDS
from cute_kernels.moe.plan import combine_function, gather_function, plan_of, routing_function
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

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def k_pad(self) -> int:
        """K as packed."""
        return self.codes.shape[2] * tile_k(self.bits)

    @property
    def form(self) -> ExpertsForm:
        """As of `PackedExperts`."""
        sizes = self.num_experts, self.n, self.k, self.k_pad, self.bits, self.group_size
        return ExpertsForm(*sizes, self.zeros is not None, self.scales.dtype, self.codes.get_device())


def addresses_of(weight: Weights | PackedExperts) -> tuple[int, int, int]:
    """Of codes, scales and zeros, 0 for none."""
    return weight.codes.data_ptr(), weight.scales.data_ptr(), _address(weight.zeros)


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
    plan = plan_of(
        out.shape[0], weights.num_experts, weights.n, weights.k, weights.k_pad, weights.bits, x.dtype,
        weights.group_size, weights.zeros is not None, x.get_device(),
    )  # fmt: skip
    x = _aligned(x)
    if routing.rows is not None and not plan.gathers:
        x = launch_gather(x, routing.offsets, routing.rows)
    plan.run(
        x,
        (*addresses_of(weights), _address(bias), out.data_ptr()),
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


def launch_gather(x: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], for places below offsets[-1]. x: [.., k] of 16-bit elements, k a multiple of 8, on 16 bytes."""
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    function = gather_function(DTYPE_NAMES[x.dtype], x.get_device())
    end = offsets.data_ptr() + 4 * (offsets.shape[0] - 1)
    function(x, end, rows.data_ptr(), out.data_ptr(), rows.shape[0])
    return out


def launch_combine(results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Adds up results [places, n] of each token, with fp32 weights [tokens, topk], in ``out`` [tokens, n]."""
    function = combine_function(DTYPE_NAMES[out.dtype], DTYPE_NAMES[results.dtype], results.get_device())
    function(out, results.data_ptr(), places.data_ptr(), weights.data_ptr(), places.shape[1])
