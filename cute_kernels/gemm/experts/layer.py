"""A layer of experts on a GPU: what is decided once for calls of a kind, and the launches of each of them.

Routing, the rows in the order of their places where the products want them so, two products, the sum over a token's
experts. What lies between them is one piece of memory: hidden activations first, for they are the one tensor that a
kernel takes as such; the compiled functions look at its columns only, so all else may lie behind its last row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.gemm.config import NO_ACTIVATION, SWIGLU
from cute_kernels.gemm.experts.launch import DTYPE_NAMES, Weights, addresses_of
from cute_kernels.gemm.experts.plan import (
    AssignedIds,
    AssignedPlan,
    EntryPlan,
    GroupedPlan,
    ProductPlan,
    RangePlan,
    combine_function,
    gather_function,
    layout_of,
    make_assigned_plan,
    make_entry_plan,
    plan_of,
    problem_of,
    routing_function,
)
from cute_kernels.gemm.experts.tuned import assigned
from cute_kernels.gemm.experts.wgmma.entry_config import entry_tiles
from cute_kernels.gemm.inputs.launch import contiguous
from cute_kernels.gemm.launch import VECTOR_BYTES, _aligned
from cute_kernels.gemm.packed_experts import ExpertsForm, PackedExperts
from cute_kernels.gemm.plan import OUT_KINDS
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.plans import MAX_PLANS

PART_BYTES = 128  # where each part of the scratch memory starts


@dataclass(frozen=True)
class Scratch:
    """Where things lie in the memory of a layer: a tensor [rows, columns] of x's dtype; the rest in bytes from it.

    Attributes:
        hidden: the tensor, whose first rows are the hidden activations of all places.
        offsets, token_rows, places: int32 [experts + 1], [places], [tokens, topk], as `routing` has them.
        results: of the second product.
    """

    hidden: Blank
    offsets: int
    token_rows: int
    places: int
    results: int

    @staticmethod
    def of(num_places: int, num_experts: int, columns: int, result_bytes: int, dtype: torch.dtype) -> Scratch:
        starts, place = [], 2 * num_places * columns
        for size in (4 * (num_experts + 1), 4 * num_places, 4 * num_places, result_bytes):
            place = -(-place // PART_BYTES) * PART_BYTES
            starts.append(place)
            place += size
        return Scratch(blank((-(-place // (2 * columns)), columns), dtype), *starts)


@dataclass(frozen=True)
class MoePlan:
    """A layer's launches, for calls of the same shapes and formats.

    Attributes:
        device_index: of the GPU.
        new_out: what a result is made of.
        part_bits: log2 of the parts of K that the second product has results of.
        combine: adds up results times weights in fp32; ``combined`` says which kernel, but for the dtype of weights.
        first, second: the numbers of each product: n, activation, kind of the output.
        pads: whether rows of x, and of hidden activations, must be made whole vectors.
    """

    device_index: int
    num_places: int
    num_experts: int
    topk: int
    part_bits: int
    new_out: Blank
    combine: Callable[..., Any]
    combined: tuple[str, str, int]
    gate_up: ProductPlan | AssignedPlan | EntryPlan
    down: ProductPlan | AssignedPlan | EntryPlan
    first: tuple[int, int, int]
    second: tuple[int, int, int]
    pads: tuple[bool, bool]
    scratch: Scratch

    def run(
        self,
        x: torch.Tensor,
        gate_up: Weights | PackedExperts,
        down: Weights | PackedExperts,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launches on the current stream of the plan's device: ``out`` [tokens, n], contiguous, or a new one.

        x: [tokens, K], topk_ids and topk_weights as of `cute_kernels.fused_moe`, any strides. Few and flat calls,
        as each layer of each decoding step of a model waits for it.
        """
        index = self.device_index
        if index != GPU.current():
            with GPU.guard(index):
                return self.run(x, gate_up, down, topk_ids, topk_weights, out)
        if x.requires_grad:
            x = x.detach()
        combine = self.combine
        if topk_weights.dtype != torch.float32:
            combine = combine_function(*self.combined, index, DTYPE_NAMES[topk_weights.dtype])
        if not topk_weights.is_contiguous():
            topk_weights = topk_weights.detach().contiguous()
        if not topk_ids.is_contiguous():
            topk_ids = topk_ids.contiguous()
        x = contiguous(x)
        if self.pads[0] or x.data_ptr() % VECTOR_BYTES:
            x = _aligned(x)
        if out is None:
            out = GPU.empty(*self.new_out)
        hidden = GPU.empty(*self.scratch.hidden)
        base = hidden.data_ptr()
        results = base + self.scratch.results
        x, of_first, of_second, places = self.route(x, topk_ids, base)
        self.gate_up.run(x, (*addresses_of(gate_up), 0, base), of_first, self.first)
        if self.pads[1]:
            hidden = _aligned(hidden)
        self.down.run(hidden, (*addresses_of(down), 0, results), of_second, self.second)
        combine(
            out=out, results=results, places=places, weights=topk_weights.data_ptr(), topk=self.topk,
            num_experts=self.num_experts, part_bits=self.part_bits,
        )  # fmt: skip
        return out

    def route(self, x: torch.Tensor, topk_ids: torch.Tensor, base: int) -> tuple[torch.Tensor, Any, Any, int]:
        """(x of the first product, the routing of each product, address of what results are found by to be added up).

        Launches what that takes. Tensors are contiguous; base: address of the scratch memory.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SortedMoePlan(MoePlan):
    """A layer whose assignments are sorted by expert first.

    Attributes:
        gather: what lays rows of x in the order of the places, or None where the first product takes them by index.
        new_gathered: what those rows are made of.
    """

    routing: Callable[..., Any]
    gather: Callable[..., Any] | None
    new_gathered: Blank

    def route(self, x: torch.Tensor, topk_ids: torch.Tensor, base: int) -> tuple[torch.Tensor, Any, Any, int]:
        scratch = self.scratch
        offsets, rows, places = base + scratch.offsets, base + scratch.token_rows, base + scratch.places
        self.routing(topk_ids=topk_ids, offsets=offsets, rows=rows, places=places, num_experts=self.num_experts)
        if self.gather is not None:
            source, x = x, GPU.empty(*self.new_gathered)
            end = offsets + 4 * self.num_experts
            self.gather(x=source, end=end, rows=rows, out=x.data_ptr(), places=self.num_places)
        return x, (offsets, rows), (offsets, 0), places


@dataclass(frozen=True)
class AssignedMoePlan(MoePlan):
    """A layer of so few assignments that the products find their rows among them as they are, and so does adding up."""

    def route(self, x: torch.Tensor, topk_ids: torch.Tensor, base: int) -> tuple[torch.Tensor, Any, Any, int]:
        ids = topk_ids.data_ptr()
        return x, ids, ids, ids


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def moe_plan_of(
    tokens: int,
    topk: int,
    id_bits: int,
    gate_up: ExpertsForm,
    down: ExpertsForm,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> MoePlan:
    """The plan of a layer's calls with at least one assignment; id_bits: of an expert's id, 32 or 64; batch_invariant:
    whether no token's result may depend on what other tokens there are."""
    few = (entry_plans if batch_invariant else assigned_plans)(tokens, topk, id_bits, gate_up, down)
    plans = few or sorted_plans(tokens * topk, gate_up, down, batch_invariant)
    return make_moe_plan(plans, tokens, topk, id_bits, gate_up, down, out_dtype)


def make_moe_plan(
    plans: tuple[AssignedPlan, AssignedPlan] | tuple[EntryPlan, EntryPlan] | tuple[ProductPlan, ProductPlan],
    tokens: int,
    topk: int,
    id_bits: int,
    gate_up: ExpertsForm,
    down: ExpertsForm,
    out_dtype: torch.dtype,
) -> MoePlan:
    """The plan of a layer whose products have given plans: of `assigned_plans`, `entry_plans` or `sorted_plans`."""
    num_places = tokens * topk
    few = isinstance(plans[0], AssignedPlan | EntryPlan)
    dtype, index = gate_up.dtype, gate_up.device_index
    # Few rows: accumulators stay in fp32 until all experts have been added. Many: half the traffic, as large as the
    # weights'.
    between = torch.float32 if plans[1].stores_fp32 else dtype
    name, vector = DTYPE_NAMES[dtype], VECTOR_BYTES // dtype.itemsize
    part_bits = plans[1].layout.part_bits if isinstance(plans[1], AssignedPlan) else 0
    result_bytes = (num_places << part_bits) * down.n * between.itemsize
    combined = DTYPE_NAMES[out_dtype], DTYPE_NAMES[between], id_bits if few else 0
    common = {
        "device_index": index,
        "num_places": num_places,
        "num_experts": gate_up.num_experts,
        "topk": topk,
        "part_bits": part_bits,
        "new_out": blank((tokens, down.n), out_dtype),
        "combine": combine_function(*combined, index),
        "combined": combined,
        "first": (gate_up.n, SWIGLU, OUT_KINDS[dtype]),
        "second": (down.n, NO_ACTIVATION, OUT_KINDS[between]),
        "pads": (bool(gate_up.k % vector), bool(down.k % vector)),
        "scratch": Scratch.of(num_places, gate_up.num_experts, down.k, result_bytes, dtype),
        "gate_up": plans[0],
        "down": plans[1],
    }
    if few:
        return AssignedMoePlan(**common)
    return SortedMoePlan(
        **common,
        routing=routing_function(id_bits, index),
        gather=None if plans[0].gathers else gather_function(name, index),
        new_gathered=blank((num_places, -(-gate_up.k // vector) * vector), dtype),
    )


def assigned_plans(
    tokens: int, topk: int, id_bits: int, gate_up: ExpertsForm, down: ExpertsForm
) -> tuple[AssignedPlan, AssignedPlan] | None:
    """The plans of both products where they find assignments as they are; None if there are too many, or one does not.

    No launch of the first lets another begin before it has waited for the ids, so the second need not.
    """
    count, forms = tokens * topk, (gate_up, down)
    problems = [problem_of(count, form) for form in forms]
    layouts = assigned(count, problems, [layout_of(count, form) for form in forms])
    if layouts is None:
        return None
    ids = ids_of_products(count, topk, id_bits)
    sizes = gate_up.num_experts, gate_up.device_index
    first, second = (make_assigned_plan(*of_product, *sizes) for of_product in zip(layouts, ids, strict=True))
    return first, second


def entry_plans(
    tokens: int, topk: int, id_bits: int, gate_up: ExpertsForm, down: ExpertsForm
) -> tuple[EntryPlan, EntryPlan] | None:
    """As `assigned_plans`, of batch-invariant products."""
    count = tokens * topk
    layouts = [entry_tiles(problem_of(count, form, True), tokens) for form in (gate_up, down)]
    sizes, ids = (gate_up.num_experts, gate_up.device_index), ids_of_products(count, topk, id_bits)
    if layouts[0] is None or layouts[1] is None:
        return None
    return make_entry_plan(layouts[0], ids[0], *sizes), make_entry_plan(layouts[1], ids[1], *sizes)


def ids_of_products(count: int, topk: int, id_bits: int) -> tuple[AssignedIds, AssignedIds]:
    """Of both: a token's assignments have a row of x together, and each a row of hidden activations."""
    words = id_bits // 32
    return AssignedIds(count, words, topk, True), AssignedIds(count, words, 1, False)


def sorted_plans(
    places: int, gate_up: ExpertsForm, down: ExpertsForm, batch_invariant: bool = False
) -> tuple[ProductPlan, ProductPlan]:
    """The plans of both products of sorted assignments."""
    return behind_each_other(*(plan_of(places, form, batch_invariant) for form in (gate_up, down)))


def behind_each_other(first: ProductPlan, second: ProductPlan) -> tuple[ProductPlan, ProductPlan]:
    """Plans whose launches follow each other, the first that of the routing."""
    if isinstance(first, GroupedPlan | RangePlan) and isinstance(second, GroupedPlan | RangePlan):
        # No launch of the first lets another begin before it has waited for the routing itself, or for one that has.
        second = replace(second, waits=False)
    return first, second
