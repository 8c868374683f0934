"""Launching the products of experts and what is around them. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.experts.plan import ProductPlan, gather_function, plan_of, routing_function
from cute_kernels.gemm.inputs.launch import contiguous
from cute_kernels.gemm.launch import VECTOR_BYTES, _address, _aligned
from cute_kernels.gemm.packed_experts import ExpertsForm, PackedExperts
from cute_kernels.gemm.plan import ACTIVATIONS, OUT_KINDS
from cute_kernels.gemm.reference import out_features
from cute_kernels.gemm.weight import check_presence
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.plans import MAX_PLANS
from layouts.weights.hopper import tile_k

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Weights:
    """The tensors and the format of `PackedExperts`."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat
    n: int
    k: int

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def k_pad(self) -> int:
        """K as packed."""
        return self.codes.shape[2] * tile_k(self.format.bits)

    @property
    def form(self) -> ExpertsForm:
        """As of `PackedExperts`."""
        check_presence(self.zeros, self.format)
        dtype = self.format.activation_dtype(self.scales.dtype)
        return ExpertsForm(
            self.num_experts, self.n, self.k, self.k_pad, self.format, dtype, self.codes.get_device()
        )  # fmt: skip


def addresses_of(weight: Weights | PackedExperts) -> tuple[int, int, int]:
    """Of codes, scales and zeros, 0 for none."""
    return weight.codes.data_ptr(), weight.scales.data_ptr(), _address(weight.zeros)


@dataclass(frozen=True)
class Routing:
    """Where assignments are, int32: offsets [experts + 1], rows [places] or None, places [tokens, topk] or None."""

    offsets: torch.Tensor
    rows: torch.Tensor | None
    places: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedLaunch:
    """What of calls of the same shapes and formats stays the same from one to the next.

    Attributes:
        gather: what lays rows of x in the order of the places, or None where the product takes them by index, or all
            rows as they are.
        new_gathered, new_out: what those rows, and a result, are made of.
        numbers: n, activation, kind of the output.
        pads: whether rows of x must be made whole vectors.
    """

    device_index: int
    places: int
    num_experts: int
    plan: ProductPlan
    gather: Callable[..., Any] | None
    new_gathered: Blank
    new_out: Blank
    numbers: tuple[int, int, int]
    pads: bool

    def run(
        self,
        x: torch.Tensor,
        weight: Weights | PackedExperts,
        expert_offsets: torch.Tensor,
        rows: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes the product at every place that an expert has to ``out`` [places, columns], contiguous, or a new one.

        x: [tokens, K], any strides; the others contiguous. On the current stream of the plan's device.
        """
        index = self.device_index
        if index != GPU.current():
            with GPU.guard(index):
                return self.run(x, weight, expert_offsets, rows, bias, out)
        if x.requires_grad:
            x = x.detach()
        x = contiguous(x)
        if self.pads or x.data_ptr() % VECTOR_BYTES:
            x = _aligned(x)
        if out is None:
            out = GPU.empty(*self.new_out)
        if expert_offsets.data_ptr() % VECTOR_BYTES:  # runs read those of four experts at a time
            expert_offsets = expert_offsets.clone()
        offsets, row_index = expert_offsets.data_ptr(), _address(rows)
        if self.gather is not None:
            source, x = x, GPU.empty(*self.new_gathered)
            end = offsets + 4 * self.num_experts
            self.gather(x=source, end=end, rows=row_index, out=x.data_ptr(), places=self.places)
        addresses = *addresses_of(weight), _address(bias), out.data_ptr()
        self.plan.run(x, addresses, (offsets, row_index), self.numbers)
        return out


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def grouped_launch_of(
    places: int,
    by_rows: bool,
    form: ExpertsForm,
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> GroupedLaunch:
    """The launch of calls with at least one place; by_rows: whether rows of x are named; batch_invariant: whether no
    result may depend on what other places there are."""
    index, vector = form.device_index, VECTOR_BYTES // form.dtype.itemsize
    plan = plan_of(places, form, batch_invariant)
    return GroupedLaunch(
        device_index=index,
        places=places,
        num_experts=form.num_experts,
        plan=plan,
        gather=gather_function(DTYPE_NAMES[form.dtype], index) if by_rows and not plan.gathers else None,
        new_gathered=blank((places, -(-form.k // vector) * vector), form.dtype),
        new_out=blank((places, out_features(form.n, activation)), out_dtype),
        numbers=(form.n, ACTIVATIONS[activation], OUT_KINDS[out_dtype]),
        pads=bool(form.k % vector),
    )


def launch_routing(topk_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts assignments, int32 or int64 [tokens, topk] with at least one, by expert."""
    count = topk_ids.numel()
    words = torch.empty(num_experts + 1 + 2 * count, dtype=torch.int32, device=topk_ids.device)
    offsets, rows, places = words.split((num_experts + 1, count, count))
    sort = routing_function(8 * topk_ids.element_size(), topk_ids.get_device())
    addresses = {"offsets": offsets.data_ptr(), "rows": rows.data_ptr(), "places": places.data_ptr()}
    sort(topk_ids=topk_ids, **addresses, num_experts=num_experts)
    return Routing(offsets, rows, places.view(topk_ids.shape))


def launch_gather(x: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], for places below offsets[-1]. x: [.., k] of 16-bit elements, k a multiple of 8, on 16 bytes."""
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    gather = gather_function(DTYPE_NAMES[x.dtype], x.get_device())
    end = offsets.data_ptr() + 4 * (offsets.shape[0] - 1)
    gather(x=x, end=end, rows=rows.data_ptr(), out=out.data_ptr(), places=rows.shape[0])
    return out
