"""The plans of calls of experts. A plan holds the decisions for calls of one kind, and launches each call.

A layer's launches are the routing, two products, and the sum over a token's experts. If the products need it, other
launches put rows in the order of their places, or round them. The launches exchange data in one allocation (`Scratch`).
The allocation begins with the hidden activations, which kernels get as a tensor; all other data are passed by address.
Compiled functions check only the number of columns of the tensor, so the other data may lie behind the tensor's last
row. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_kernels.gemm.activations import ActivationFunction, activation_named, out_features
from cute_kernels.gemm.experts.call import GroupedCall, MoeCall
from cute_kernels.gemm.experts.choice import assigned
from cute_kernels.gemm.experts.product import (
    AssignedIds,
    GroupedProduct,
    assigned_product,
    combine_function,
    layout_of,
    problem_of,
    product_of,
    rounding,
    routing_function,
    takes_codes,
)
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles, entry_tiles
from cute_kernels.gemm.inputs.launch import InputRows, contiguous, rows_of
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.plan import aligned
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.operator import Plan
from cute_kernels.runtime.plans import ALIGNMENT, MAX_PLANS

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


# -- a product by itself -----------------------------------------------------------------------------------------------


def grouped_plan(call: GroupedCall) -> Plan[[GroupedCall], torch.Tensor] | None:
    """Returns the plan of a checked call; None for a call without places."""
    places, activation, out_dtype = call.places, call.activation, call.result_dtype
    if not places:
        return None
    form = call.weight.form._replace(activations=call.activations)
    index, vector, num_experts = form.device_index, ALIGNMENT // form.dtype.itemsize, form.num_experts
    with GPU.guard(call.x.device):
        product = product_of(places, form, call.batch_invariant, activation)
        # A rounding of fewer rows than x has takes them by index, like the launch that lays them in the places' order.
        picks = call.rows is not None and places < len(call.x)
        round_x = rounding(places if picks else len(call.x), places, form, call.batch_invariant)
        picks &= round_x is not None
        gather = gathering(places, form) if call.rows is not None and not (product.gathers or picks) else None
        send = product.bound(form.n, activation, out_dtype)
    new_out = blank((places, out_features(form.n, activation)), out_dtype)
    pads = bool(form.k % vector)

    def launch(call: GroupedCall) -> torch.Tensor:
        x, weight, offsets = call.x, call.weight, call.expert_offsets
        if x.requires_grad:
            x = x.detach()
        x = contiguous(x)
        if pads or x.data_ptr() % ALIGNMENT:
            x = aligned(x)
        out = GPU.empty(*new_out) if call.out is None else call.out
        if offsets.data_ptr() % ALIGNMENT:  # work ranges read those of four experts at a time
            offsets = offsets.clone()
        first, rows = offsets.data_ptr(), 0 if call.rows is None else call.rows.data_ptr()
        end = first + 4 * num_experts
        if round_x is not None:
            x, _ = round_x.make(x, end=end, rows=rows) if picks else round_x.make(x)
            rows = 0 if picks else rows
        if gather is not None:
            x = gather.make(x, end=end, numbers=rows)
        send(
            x=x, codes=weight.codes, scales=weight.scales, zeros=weight.zeros, bias=call.bias, out=out.data_ptr(),
            offsets=first, rows=rows,
        )  # fmt: skip
        return out

    return Plan(index, launch, (product,))


def without_places(call: GroupedCall) -> torch.Tensor:
    """Returns the result of a checked call without places."""
    if call.out is not None:
        return call.out
    columns = out_features(call.weight.shape[0], call.activation)
    return call.x.new_empty((0, columns), dtype=call.result_dtype)


# -- a layer -----------------------------------------------------------------------------------------------------------

PART_BYTES = 128  # where each part of the scratch memory starts


@dataclass(frozen=True)
class Scratch:
    """The layout of a layer's memory: a tensor [rows, columns] of x's dtype, and offsets of other data in bytes from
    the tensor's beginning.

    Attributes:
        hidden: the tensor, whose first rows are the hidden activations of all places.
        offsets: byte offset of int32 [experts + 1], the first place of each expert.
        token_rows: byte offset of int32 [places], the token at each place.
        places: byte offset of int32 [tokens, topk], the place of each assignment.
        results: byte offset of the second product's results.
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


Products = tuple[GroupedProduct, GroupedProduct]


class LayerForm(NamedTuple):
    """The properties of a layer's calls that decide its plan. Each call has at least one assignment.

    Attributes:
        id_bits: number of bits of an expert's id, 32 or 64.
        batch_invariant: whether no token's result may depend on the other tokens.
    """

    tokens: int
    topk: int
    id_bits: int
    gate_up: ExpertsForm
    down: ExpertsForm
    activation: str | ActivationFunction = "swiglu"
    batch_invariant: bool = False

    @property
    def count(self) -> int:
        """The number of assignments."""
        return self.tokens * self.topk

    @property
    def kinds(self) -> tuple[tuple[Any, ...], ...]:
        """The arguments of `problem_of` for each of the two products, without the number of places."""
        return (self.gate_up, self.batch_invariant, self.activation), (self.down, self.batch_invariant)


def moe_plan(call: MoeCall) -> Plan[[MoeCall], torch.Tensor] | None:
    """Returns the plan of a checked call; None for a call without assignments."""
    ids, out_dtype = call.topk_ids, call.result_dtype
    if not ids.numel():
        return None
    (tokens, topk), id_bits = ids.shape, 8 * ids.element_size()
    first, second = (one.form._replace(activations=call.activations) for one in (call.gate_up, call.down))
    form = LayerForm(tokens, topk, id_bits, first, second, call.activation, call.batch_invariant)
    with GPU.guard(call.x.device):
        return moe_plan_of(form, out_dtype)


def without_assignments(call: MoeCall) -> torch.Tensor:
    """Returns the result of a checked call without assignments."""
    if call.out is not None:
        return call.out.zero_()
    shape = call.x.shape[0], call.down.shape[0]
    return call.x.new_zeros(shape, dtype=call.result_dtype)


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def moe_plan_of(form: LayerForm, out_dtype: torch.dtype) -> Plan[[MoeCall], torch.Tensor]:
    """Returns the plan of a layer's calls."""
    layouts = few_layouts(form)
    products = sorted_products(form) if layouts is None else as_they_are(layouts, form)
    return make_moe_plan(products, form, out_dtype)


def make_moe_plan(products: Products, form: LayerForm, out_dtype: torch.dtype) -> Plan[[MoeCall], torch.Tensor]:
    """Makes the plan of a layer. products: the result of `as_they_are` or `sorted_products`."""
    tokens, topk, id_bits, gate_up, down, activation, batch_invariant = form
    count, num_experts, (first, second) = form.count, gate_up.num_experts, products
    few = second.finds_ids
    dtype, index, vector = gate_up.dtype, gate_up.device_index, ALIGNMENT // gate_up.dtype.itemsize
    # Few rows: accumulators stay in fp32 until all experts have been added. Many: half the traffic, as large as the
    # weights'.
    between = torch.float32 if second.stores_fp32 else dtype
    part_bits = getattr(second.schedule, "part_bits", 0) if few else 0
    scratch = Scratch.of(count, num_experts, down.k, (count << part_bits) * down.n * between.itemsize, dtype)
    new_out = blank((tokens, down.n), out_dtype)
    combined = DTYPE_NAMES[out_dtype], DTYPE_NAMES[between], id_bits if few else 0, index
    combine_fp32 = combine_function(*combined)
    pads_x, pads_hidden = bool(gate_up.k % vector), bool(down.k % vector)
    send_first = first.bound(gate_up.n, activation, dtype)
    send_second = second.bound(down.n, None, between)
    route = None if few else sorting(gate_up, id_bits, count, not first.gathers, scratch)
    round_x = rounding(tokens, count, gate_up, batch_invariant)
    round_hidden = rounding(count, count, down, batch_invariant)

    def launch(call: MoeCall) -> torch.Tensor:
        """Launches the layer's kernels. It makes few nested calls, since its time is spent in each layer of each
        decoding step.
        """
        x, gate_up, down, shares, ids = call.x, call.gate_up, call.down, call.topk_weights, call.topk_ids
        if x.requires_grad:
            x = x.detach()
        combine = combine_fp32
        if shares.dtype != torch.float32:
            combine = combine_function(*combined, DTYPE_NAMES[shares.dtype])
        if not shares.is_contiguous():
            shares = shares.detach().contiguous()
        if not ids.is_contiguous():
            ids = ids.contiguous()
        x = contiguous(x)
        if pads_x or x.data_ptr() % ALIGNMENT:
            x = aligned(x)
        if round_x is not None:
            x, _ = round_x.make(x)
        weights = shares.data_ptr()  # raises before the first launch for tensors without an address
        out = GPU.empty(*new_out) if call.out is None else call.out
        hidden = GPU.empty(*scratch.hidden)
        base = hidden.data_ptr()
        results = base + scratch.results
        if route is None:
            places = ids.data_ptr()
            of_first = of_second = {"ids": places}
        else:
            x, of_first, of_second, places = route(x, ids, base)
        send_first(
            x=x, codes=gate_up.codes, scales=gate_up.scales, zeros=gate_up.zeros, bias=call.gate_up_bias, out=base,
            **of_first,
        )  # fmt: skip
        x = aligned(hidden) if pads_hidden else hidden
        if round_hidden is not None:
            x, _ = round_hidden.make(x)
        send_second(
            x=x, codes=down.codes, scales=down.scales, zeros=down.zeros, bias=call.down_bias, out=results,
            **of_second,
        )  # fmt: skip
        combine(
            out=out, results=results, places=places, weights=weights, topk=topk, num_experts=num_experts,
            part_bits=part_bits,
        )  # fmt: skip
        return out

    return Plan(index, launch, products)


def gathering(places: int, form: ExpertsForm) -> InputRows:
    """Returns the launch that copies rows of x into the order of the places. A row is whole pieces of 16 bytes."""
    vector = ALIGNMENT // form.dtype.itemsize
    columns = -(-form.k // vector) * vector
    return rows_of((places, columns), columns, form.dtype, index=form.device_index)


def sorting(form: ExpertsForm, id_bits: int, count: int, lays_out_rows: bool, scratch: Scratch) -> Callable[..., Any]:
    """Returns the function that sorts assignments by expert. With ``lays_out_rows`` the function also copies rows of x
    into this order, for a product that does not gather rows.

    The function takes x, ids and the address of the scratch memory. It returns three things: x for the first product,
    the routing arguments of each product, and the address of the places for the sum over experts.
    """
    num_experts, sort = form.num_experts, routing_function(id_bits, form.device_index)
    gather = gathering(count, form) if lays_out_rows else None

    def route(x: torch.Tensor, ids: torch.Tensor, base: int) -> tuple[torch.Tensor, Any, Any, int]:
        offsets, rows, places = base + scratch.offsets, base + scratch.token_rows, base + scratch.places
        sort(topk_ids=ids, offsets=offsets, rows=rows, places=places, num_experts=num_experts)
        if gather is not None:
            x = gather.make(x, end=offsets + 4 * num_experts, numbers=rows)
        return x, {"offsets": offsets, "rows": rows}, {"offsets": offsets, "rows": 0}, places

    return route


def few_layouts(form: LayerForm) -> Sequence[RangeLayout | GroupedTiles] | None:
    """Returns the layouts of both products over unsorted assignments: both by work ranges, or both by tiles of entries.
    Returns None if there are too many assignments, or if a product does not support unsorted assignments."""
    problems = [problem_of(form.count, *kind) for kind in form.kinds]
    if any(map(takes_codes, (form.gate_up, form.down), problems)):
        return None
    found = None
    if not form.batch_invariant:
        found = assigned(form.count, problems, [layout_of(form.count, *kind) for kind in form.kinds])
    return found or entry_layouts(form)


def entry_layouts(form: LayerForm) -> list[GroupedTiles] | None:
    """Returns the layouts of both products by tiles of entries. Returns None if there are too many assignments, or if a
    product does not support such tiles."""
    own = activation_named(form.activation)
    first, second = (problem_of(form.count, *kind) for kind in form._replace(batch_invariant=True).kinds)
    if own is not None and not own.gated:  # of those that are chosen by a number, entries' stores know the gated one
        first = replace(first, activation=own)
    found = [entry_tiles(problem, form.tokens) for problem in (first, second)]
    layouts = [layout for layout in found if layout is not None]
    return layouts if len(layouts) == len(found) else None


def as_they_are(layouts: Sequence[RangeLayout | GroupedTiles], form: LayerForm) -> Products:
    """Makes both products over unsorted assignments. In the first product, ``topk`` neighbouring assignments share a
    row of x. In the second product, each assignment has its own row of hidden activations.

    The layer's first launch waits for the ids before it lets the next launch begin, so no later launch has to wait for
    the ids. The first launch is the first product. In FP8 it is the launch that rounds x; the first product then loads
    weights while x is rounded.
    """
    words, where = form.id_bits // 32, (form.gate_up.num_experts, form.gate_up.device_index)
    leads = form.gate_up.activations is None
    ids = AssignedIds(form.count, words, form.topk, leads), AssignedIds(form.count, words, 1, False)
    first, second = (assigned_product(layout, one, *where) for layout, one in zip(layouts, ids, strict=True))
    return first, second


def sorted_products(form: LayerForm) -> Products:
    """Makes both products of sorted assignments."""
    return behind_each_other(*(product_of(form.count, *kind) for kind in form.kinds))


def behind_each_other(first: GroupedProduct, second: GroupedProduct) -> Products:
    """Returns two products that are launched one after the other, after the routing. If both kernels can skip the wait
    for the routing, only the first one waits.
    """
    if first.waits is not None and second.waits is not None:
        # No launch of the first lets another begin before it has waited for the routing itself, or for one that has.
        second = replace(second, waits=False)
    return first, second
