"""A layer of experts on a GPU: what is decided once for calls of a kind, and the launches of each of them.

Routing, the rows in the order of their places where the products want them so, two products, the sum over a token's
experts. What lies between them is one piece of memory: hidden activations first, for they are the one tensor that a
kernel takes as such; the compiled functions look at its columns only, so all else may lie behind its last row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.linear.config import NO_ACTIVATION, SWIGLU
from cute_kernels.linear.experts import PackedExperts
from cute_kernels.linear.launch import _aligned
from cute_kernels.linear.plan import OUT_KINDS
from cute_kernels.moe.launch import DTYPE_NAMES, Weights, addresses_of
from cute_kernels.moe.plan import (
    ProductPlan,
    combine_function,
    gather_function,
    plan_of,
    routing_function,
)

PART_BYTES = 128  # where each part of the scratch memory starts


@dataclass(frozen=True)
class Scratch:
    """Where things lie in the memory of a layer: a tensor [rows, columns] of x's dtype; the rest in bytes from it.

    Attributes:
        rows, columns: of the tensor, whose first rows are the hidden activations of all places.
        offsets, token_rows, places: int32 [experts + 1], [places], [tokens, topk], as `routing` has them.
        results: of the second product.
    """

    rows: int
    columns: int
    offsets: int
    token_rows: int
    places: int
    results: int

    @staticmethod
    def of(num_places: int, num_experts: int, columns: int, result_bytes: int) -> Scratch:
        starts, place = [], 2 * num_places * columns
        for size in (4 * (num_experts + 1), 4 * num_places, 4 * num_places, result_bytes):
            place = -(-place // PART_BYTES) * PART_BYTES
            starts.append(place)
            place += size
        return Scratch(-(-place // (2 * columns)), columns, *starts)


@dataclass(frozen=True)
class MoePlan:
    """A layer's launches, for calls of the same shapes and formats.

    Attributes:
        gather: what lays rows of x in the order of the places, or None where the first product takes them by index.
        first, second: the numbers of each product: n, activation, kind of the output.
    """

    num_places: int
    num_experts: int
    topk: int
    out_dtype: torch.dtype
    routing: Callable[..., Any]
    gather: Callable[..., Any] | None
    gate_up: ProductPlan
    down: ProductPlan
    combine: Callable[..., Any]
    first: tuple[int, int, int]
    second: tuple[int, int, int]
    scratch: Scratch

    def run(
        self,
        x: torch.Tensor,
        gate_up: Weights | PackedExperts,
        down: Weights | PackedExperts,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launches on the current stream of the plan's device, which is the current one.

        x: [tokens, K]; topk_ids: contiguous; topk_weights: fp32, contiguous; out: contiguous.
        """
        scratch = self.scratch
        hidden = torch.empty((scratch.rows, scratch.columns), dtype=x.dtype, device=x.device)
        base = hidden.data_ptr()
        offsets, rows, places = base + scratch.offsets, base + scratch.token_rows, base + scratch.places
        self.routing(topk_ids, offsets, rows, places, self.num_experts)
        x = _aligned(x)
        if self.gather is not None:
            source, x = x, torch.empty((self.num_places, x.shape[1]), dtype=x.dtype, device=x.device)
            self.gather(source, offsets + 4 * self.num_experts, rows, x.data_ptr(), self.num_places)
        self.gate_up.run(x, (*addresses_of(gate_up), 0, base), (offsets, rows), self.first)
        results = base + scratch.results
        self.down.run(_aligned(hidden), (*addresses_of(down), 0, results), (offsets, 0), self.second)
        self.combine(out, results, places, topk_weights.data_ptr(), self.topk)


def make_moe_plan(
    x: torch.Tensor, gate_up: Weights, down: Weights, topk_ids: torch.Tensor, out_dtype: torch.dtype
) -> MoePlan:
    """The plan of calls like this one, with at least one assignment."""
    index = x.get_device()
    num_places, num_experts = topk_ids.numel(), gate_up.num_experts
    plans = [
        plan_of(num_places, num_experts, w.n, w.k, w.k_pad, w.bits, x.dtype, w.group_size, w.zeros is not None, index)
        for w in (gate_up, down)
    ]
    # Few rows: sums stay in fp32 until all experts have been added. Many: half the traffic, as large as the weights'.
    between = torch.float32 if plans[1].stores_fp32 else x.dtype
    name = DTYPE_NAMES[x.dtype]
    return MoePlan(
        num_places=num_places,
        num_experts=num_experts,
        topk=topk_ids.shape[1],
        out_dtype=out_dtype,
        routing=routing_function(8 * topk_ids.element_size(), index),
        gather=None if plans[0].gathers else gather_function(name, index),
        gate_up=plans[0],
        down=plans[1],
        combine=combine_function(DTYPE_NAMES[out_dtype], DTYPE_NAMES[between], index),
        first=(gate_up.n, SWIGLU, OUT_KINDS[x.dtype]),
        second=(down.n, NO_ACTIVATION, OUT_KINDS[between]),
        scratch=Scratch.of(num_places, num_experts, down.k, num_places * down.n * between.itemsize),
    )


def launch_moe(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """A layer of at least one assignment on the current device; ``out`` [tokens, n] is written and returned."""
    plan = make_moe_plan(x, gate_up, down, topk_ids, out.dtype)
    plan.run(x, gate_up, down, topk_ids, topk_weights, out)
    return out
