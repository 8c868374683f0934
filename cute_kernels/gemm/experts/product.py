"""Makes products of experts: compiled kernels, bound to the arguments that do not change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_kernels.gemm.activations import config_of
from cute_kernels.gemm.experts.arguments import COMBINE, ROUTING
from cute_kernels.gemm.experts.choice import GroupedLayout, chosen
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.ranges.config import ROWS
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, row_factor
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from cute_kernels.gemm.experts.schedule import usual_rows
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles, make_fp8_tiles
from cute_kernels.gemm.operands.fp8_config import BY_GROUP, FOR_PRODUCTS, LIMBS, X_GROUP, x_group
from cute_kernels.gemm.operands.fp8_launch import ScaledRows, rounded_rows, rows_for_products, scales_of
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.product import Bind, Product, of_kernel
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU, per_gpu

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
TENSORS = ("codes", "scales", "zeros", "bias", "x_scales")
"""Names of the tensors, besides x, that callers pass to a bound product. Callers also pass addresses: of out, and of
offsets and rows (sorted assignments) or of ids (unsorted assignments)."""
# Rows of an expert up to which products are in 16 bits where x has scales by group. 1024 tokens of DeepSeek-V3 take
# 3.03 ms so, and 3.37 ms in FP8 (`moe_fp8_rows_study.json`).
MOST_GROUPED_ROWS = 48
FEW_PLACES = 256  # up to so many places, results that a layer adds up are stored in fp32; more take half the bytes


@dataclass(frozen=True)
class GroupedProduct(Product):
    """A product of experts.

    Attributes:
        gathers: whether the product loads rows of x by index.
        stores_fp32: whether the results that a layer adds up are stored in fp32: only if there are few of them.
        waits: whether the product waits for the previous launch before it reads the routing (offsets and rows, or ids).
            If not, it loads weights while the previous launch ends. None: the kernel cannot choose.
        finds_ids: whether the product takes unsorted assignments, as ids of experts.
    """

    gathers: bool = True
    stores_fp32: bool = True
    waits: bool | None = None
    finds_ids: bool = False

    def bound(self, n: int, activation: object, out_dtype: torch.dtype, **added: object) -> Callable[..., Any]:
        """Binds arguments as `Product` does, with the tensors and addresses that `TENSORS` names."""
        waits = {} if self.waits is None else {"waits": self.waits}
        return super().bound(n, activation, out_dtype, **waits, **added)


@per_gpu
@lru_cache(maxsize=4096)
def layout_of(
    places: int, form: ExpertsForm, batch_invariant: bool = False, activation: object = None
) -> GroupedLayout:
    """Returns the layout of a grouped product on a CUDA device."""
    problem = problem_of(places, form, batch_invariant, activation)
    return make_fp8_tiles(problem) if takes_codes(form, problem) else chosen(problem)


def takes_codes(form: ExpertsForm, problem: GroupedProblem) -> bool:
    """Returns whether a product takes x as E4M3 codes. If bf16 experts usually have few rows, a product in FP8 is
    instead a 16-bit product of the rows that `rounding` has rounded, since loading the weights takes as long. Few means
    at most `ROWS`, or `MOST_GROUPED_ROWS` if x has a scale for each group. Batch-invariant products always take codes.
    For linear layers, `cute_kernels.gemm.fp8.has_few_rows` is the corresponding rule."""
    most = MOST_GROUPED_ROWS if x_group(problem.format) else ROWS
    few = problem.dtype == "bf16" and usual_rows(problem) <= most
    return form.activations is not None and (problem.batch_invariant or not few)


def rounding(rows: int, places: int, form: ExpertsForm, batch_invariant: bool = False) -> ScaledRows | None:
    """Returns the launch that rounds ``rows`` rows of x to E4M3 before a 16-bit product of ``places`` rows. Returns
    None if the product is not in FP8, or takes codes.

    The product's launch may begin before the rounding has ended, but not before the rounding has waited for all earlier
    launches. So the results of earlier launches, such as the routing, are complete even if the product does not wait
    for them.
    """
    if form.activations is None or takes_codes(form, problem_of(places, form, batch_invariant)):
        return None
    return rounded_rows(rows, form.k, form.dtype, scales_of(x_group(form.format), None), form.device_index)


@per_gpu
@lru_cache(maxsize=4096)
def problem_of(
    places: int, form: ExpertsForm, batch_invariant: bool = False, activation: object = None
) -> GroupedProblem:
    """Returns the problem of a grouped product on a CUDA device. activation: a name or an `ActivationFunction`."""
    dtype, num_sms = DTYPES[form.dtype], GPU.num_sms(form.device_index)
    return GroupedProblem(places, *form[:5], dtype, num_sms, batch_invariant, config_of(activation))


@per_gpu
@lru_cache(maxsize=4096)
def product_of(
    places: int, form: ExpertsForm, batch_invariant: bool = False, activation: object = None
) -> GroupedProduct:
    """Returns the product of sorted assignments on a CUDA device."""
    layout = layout_of(places, form, batch_invariant, activation)
    return make_product(layout, places, form.num_experts, form.device_index)


def bind_of(config: StreamConfig | WgmmaConfig, sizes: Mapping[str, int], device_index: int) -> Bind:
    """Loads or compiles a configuration's kernel, and returns its `Bind`."""
    spec = ExpertSpec(config)
    return of_kernel(load(spec, arch_of(device_index)), spec.kernel.arguments, sizes, TENSORS, device_index)


def make_product(layout: GroupedLayout, places: int, num_experts: int, device_index: int) -> GroupedProduct:
    """Makes the product of a layout, by work ranges for few rows an expert or by tiles."""
    sizes = {**layout.sizes, "num_experts": num_experts}
    if isinstance(layout, RangeLayout):
        bind = bind_of(layout.config, sizes | {"places": places}, device_index)
        return GroupedProduct(layout, device_index, bind, stores_fp32=places <= FEW_PLACES, waits=True)
    if not layout.config.mainloop.scaled_rows:
        bind = bind_of(layout.config, sizes, device_index)
        return GroupedProduct(layout, device_index, bind, gathers=False, stores_fp32=False)
    config = layout.config
    made = (BY_GROUP, LIMBS) if config.limbs else (scales_of(x_group(config.format), None), FOR_PRODUCTS)
    k_pad = layout.k_blocks * X_GROUP - (X_GROUP // 2 if config.mainloop.half_last else 0)
    rows = rows_for_products(places, k_pad, TORCH_DTYPES[config.dtype], made[0], device_index, made[1])
    multiply = bind_of(config, sizes | {"x_scale_pitch": rows.pitch}, device_index)
    return GroupedProduct(layout, device_index, _of_made_rows(multiply, rows, num_experts), stores_fp32=False)


def _of_made_rows(multiply: Bind, prepared: ScaledRows, num_experts: int) -> Bind:
    """Returns the product of two launches: the first makes limbs or E4M3 codes of the rows of all places, and
    ``multiply`` computes the product.
    """

    def bind(numbers: Mapping[str, Any]) -> Callable[..., Any]:
        send_product = multiply(numbers)

        def send(x, out, offsets, rows, **tensors: torch.Tensor | None) -> None:
            made, x_scales = prepared.make(x, end=offsets + 4 * num_experts, rows=rows)
            send_product(x=made, x_scales=x_scales, **tensors, out=out, offsets=offsets)

        return send

    return bind


# -- few assignments as a router leaves them ---------------------------------------------------------------------------


class AssignedIds(NamedTuple):
    """The ids of experts that a product of unsorted assignments takes.

    Attributes:
        count: number of ids.
        id_words: number of 32-bit words of an id.
        row_assignments: number of neighbouring assignments that share a row of x.
        waits: as in `GroupedProduct`.
    """

    count: int
    id_words: int
    row_assignments: int
    waits: bool

    @property
    def sizes(self) -> dict[str, int]:
        return {"count": self.count, "id_words": self.id_words, "row_factor": row_factor(self.row_assignments)}


def assigned_product(
    layout: RangeLayout | GroupedTiles, ids: AssignedIds, num_experts: int, device_index: int
) -> GroupedProduct:
    """Makes the product over unsorted assignments. layout: the result of `among_assignments`, or batch-invariant tiles
    of entries."""
    sizes = {**layout.sizes, **ids.sizes, "num_experts": num_experts}
    if isinstance(layout, GroupedTiles):
        bind = bind_of(layout.config, sizes, device_index)
        return GroupedProduct(layout, device_index, bind, stores_fp32=False, waits=ids.waits, finds_ids=True)
    bind = bind_of(layout.config, sizes | {"part_bits": layout.part_bits}, device_index)
    return GroupedProduct(layout, device_index, bind, waits=ids.waits, finds_ids=True)


# -- what is around products -------------------------------------------------------------------------------------------


@per_gpu
@lru_cache(maxsize=64)
def routing_function(id_bits: int, device_index: int) -> Callable[..., Any]:
    """Returns the kernel that sorts assignments; it takes its arguments by name."""
    return ROUTING.bound(load(RouterSpec(RouterConfig(f"int{id_bits}", IDS)), arch_of(device_index)), {})


@per_gpu
@lru_cache(maxsize=64)
def combine_function(
    dtype: str, source: str, id_bits: int, device_index: int, shares: str = "fp32"
) -> Callable[..., Any]:
    """Returns the kernel that adds up results; it takes its arguments by name. id_bits, shares: as in
    `CombineConfig`."""
    spec = ExpertSpec(CombineConfig(dtype, source, id_bits, shares=shares))
    return COMBINE.bound(load(spec, arch_of(device_index)), {})
