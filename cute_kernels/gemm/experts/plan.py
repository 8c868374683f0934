"""What of the launches of a product, or of a layer, stays the same from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_kernels.gemm.experts.arguments import (
    ASSIGNED,
    COMBINE,
    ENTRIES,
    GATHER,
    GROUPED,
    LIMB_TILES,
    RANGES,
    ROUTING,
    TILES,
)
from cute_kernels.gemm.experts.compile import (
    CombineSpec,
    EntrySpec,
    GatherSpec,
    GroupedSpec,
    GroupedWgmmaSpec,
    RangeSpec,
    RoutingSpec,
)
from cute_kernels.gemm.experts.config import CombineConfig, GatherConfig, RoutingConfig
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, row_factor
from cute_kernels.gemm.experts.schedule import GroupedProblem, GroupedSchedule
from cute_kernels.gemm.experts.tuned import GroupedLayout, chosen
from cute_kernels.gemm.experts.wgmma.entry_config import EntryTiles
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.plan import DTYPES
from cute_kernels.gemm.wgmma.limb_launch import LimbRows, limb_rows
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU, per_gpu

FEW_PLACES = 256  # results of a layer that are stored in fp32 before they are added up: more are worth half the bytes


@dataclass(frozen=True)
class GroupedPlan:
    """A product of few rows an expert: everything that does not change between calls of the same shapes and formats.

    Attributes:
        num_words: of workspace.
        launches: each launch, by arguments' names.
        waits: whether offsets and rows may be those of the launch before. If not, that launch has waited for them
            before it lets another begin, and weights are asked for while it ends.
        gathers: whether rows of x are taken by index.
        stores_fp32: whether what a layer adds up is best stored in fp32: few results.
    """

    schedule: GroupedSchedule
    device_index: int
    num_words: int
    launches: tuple[Callable[..., Any], ...]
    waits: bool = True
    gathers: bool = True
    stores_fp32: bool = True

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], routing: tuple[int, int], numbers: tuple[int, ...]):
        """Launches on the current stream of the plan's device, which is the current one.

        x: [.., k], 16-byte aligned, k a multiple of 8. addresses: codes, scales, zeros, bias, out. routing: addresses
        of offsets and rows. numbers: n, activation, kind of the output.
        """
        index = self.device_index
        workspace = GPU.workspace(index, GPU.stream(index), self.num_words)
        codes, scales, zeros, bias, out = addresses
        n, activation, out_kind = numbers
        for send in self.launches:
            send(
                x=x, codes=codes, scales=scales, zeros=zeros, bias=bias, out=out, workspace=workspace,
                offsets=routing[0], rows=routing[1], n=n, waits=self.waits, activation=activation, out_kind=out_kind,
            )  # fmt: skip


@dataclass(frozen=True)
class RangePlan:
    """A product of few rows an expert in limbs that its CTAs make.

    Attributes:
        send: the launch, by arguments' names.
        waits: as of `GroupedPlan`.
    """

    send: Callable[..., Any]
    layout: RangeLayout
    waits: bool = True
    gathers: bool = True
    stores_fp32: bool = True

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], routing: tuple[int, int], numbers: tuple[int, ...]):
        """As :meth:`GroupedPlan.run`."""
        codes, scales, _, bias, out = addresses
        n, activation, out_kind = numbers
        self.send(
            x=x, codes=codes, scales=scales, bias=bias, out=out, offsets=routing[0], rows=routing[1], n=n,
            waits=self.waits, activation=activation, out_kind=out_kind,
        )  # fmt: skip


class AssignedIds(NamedTuple):
    """The ids of a few assignments' experts, as a product is given them.

    count: of all; id_words: of 32 bits, of an id; row_assignments: neighbours that have a row of x together; waits: as
    of `GroupedPlan`.
    """

    count: int
    id_words: int
    row_assignments: int
    waits: bool


@dataclass(frozen=True)
class AssignedPlan:
    """A product of a few assignments as a router leaves them, in limbs that its CTAs make: no launch sorts them.

    Attributes:
        send: the launch, by arguments' names.
        waits: as of `GroupedPlan`, of the ids.
    """

    send: Callable[..., Any]
    layout: RangeLayout
    waits: bool
    gathers: bool = True
    stores_fp32: bool = True

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], ids: int, numbers: tuple[int, ...]):
        """As :meth:`GroupedPlan.run`; ids: address of the assignments' experts."""
        codes, scales, _, bias, out = addresses
        n, activation, out_kind = numbers
        self.send(
            x=x, codes=codes, scales=scales, bias=bias, out=out, ids=ids, n=n, waits=self.waits,
            activation=activation, out_kind=out_kind,
        )  # fmt: skip


@dataclass(frozen=True)
class EntryPlan:
    """A batch-invariant product of a few assignments as a router leaves them: no launch sorts them.

    Attributes:
        send: the launch, by arguments' names.
        waits: as of `GroupedPlan`, of the ids.
    """

    send: Callable[..., Any]
    layout: EntryTiles
    waits: bool
    gathers: bool = True
    stores_fp32: bool = False  # as tiles, whose bits these are

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], ids: int, numbers: tuple[int, ...]):
        """As :meth:`AssignedPlan.run`; without biases."""
        codes, scales, zeros, _, out = addresses
        n, activation, out_kind = numbers
        self.send(
            x=x, codes=codes, scales=scales, zeros=zeros, out=out, ids=ids, n=n, waits=self.waits,
            activation=activation, out_kind=out_kind,
        )  # fmt: skip


@dataclass(frozen=True)
class TilesPlan:
    """A product of many rows an expert, which takes the rows of x in the order of the places. send: the launch, by
    arguments' names."""

    send: Callable[..., Any]
    tiles: GroupedTiles
    gathers: bool = False
    stores_fp32: bool = False

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], routing: tuple[int, int], numbers: tuple[int, ...]):
        """As :meth:`GroupedPlan.run`; the address of rows is not looked at."""
        codes, scales, zeros, bias, out = addresses
        n, activation, out_kind = numbers
        self.send(
            x=x, codes=codes, scales=scales, zeros=zeros, bias=bias, out=out, offsets=routing[0], n=n,
            activation=activation, out_kind=out_kind,
        )  # fmt: skip


@dataclass(frozen=True)
class LimbsPlan:
    """A product of activations in limbs, of which it has a launch before it make those of all places.

    Attributes:
        send: the product's launch, by arguments' names.
        rows: that launch.
    """

    send: Callable[..., Any]
    rows: LimbRows
    tiles: GroupedTiles
    num_experts: int
    gathers: bool = True
    stores_fp32: bool = False

    def run(self, x: torch.Tensor, addresses: tuple[int, ...], routing: tuple[int, int], numbers: tuple[int, ...]):
        """As :meth:`GroupedPlan.run`; without an address of rows they are the places' own."""
        codes, scales, _, bias, out = addresses
        offsets, rows = routing
        n, activation, out_kind = numbers
        limbs, x_scales = self.rows.make(x, offsets + 4 * self.num_experts, rows)
        self.send(
            x=limbs, codes=codes, scales=scales, x_scales=x_scales.data_ptr(), bias=bias, out=out, offsets=offsets, n=n,
            activation=activation, out_kind=out_kind,
        )  # fmt: skip


ProductPlan = GroupedPlan | RangePlan | TilesPlan | LimbsPlan


@per_gpu
@lru_cache(maxsize=4096)
def layout_of(places: int, form: ExpertsForm, batch_invariant: bool = False) -> GroupedLayout:
    """How a grouped product on a CUDA device is laid out."""
    return chosen(problem_of(places, form, batch_invariant), GPU.name(form.device_index))


@per_gpu
@lru_cache(maxsize=4096)
def problem_of(places: int, form: ExpertsForm, batch_invariant: bool = False) -> GroupedProblem:
    """A grouped product on a CUDA device, as layouts are chosen for it."""
    return GroupedProblem(
        places=places,
        num_experts=form.num_experts,
        n=form.n,
        k=form.k,
        k_pad=form.k_pad,
        format=form.format,
        dtype=DTYPES[form.dtype],
        num_sms=GPU.num_sms(form.device_index),
        batch_invariant=batch_invariant,
    )


@per_gpu
@lru_cache(maxsize=4096)
def plan_of(places: int, form: ExpertsForm, batch_invariant: bool = False) -> ProductPlan:
    """The plan of a grouped product on a CUDA device."""
    return make_product_plan(layout_of(places, form, batch_invariant), places, form.num_experts, form.device_index)


def make_product_plan(layout: GroupedLayout, places: int, num_experts: int, device_index: int) -> ProductPlan:
    """The plan of a given layout, of few rows an expert or of many."""
    if isinstance(layout, GroupedTiles):
        make = make_limbs_plan if layout.config.limbs else make_tiles_plan
        return make(layout, places, num_experts, device_index)
    if isinstance(layout, RangeLayout):
        return make_range_plan(layout, places, num_experts, device_index)
    return make_plan(layout, num_experts, device_index)


def make_plan(schedule: GroupedSchedule, num_experts: int, device_index: int) -> GroupedPlan:
    """The plan of a given schedule of few rows an expert."""

    function = load(GroupedSpec(schedule.config), arch_of(device_index))

    def launch(number: int) -> Callable[..., Any]:
        return GROUPED.bound(
            function,
            {
                "num_tiles": schedule.num_tiles,
                "k_blocks": schedule.k_blocks,
                "num_slices": schedule.num_slices,
                "num_groups": schedule.num_groups,
                "num_experts": num_experts,
                "entry_shift": schedule.entry_rows.bit_length() - 1,
                "x_slots": schedule.x_slots,
                "first_entry": number * schedule.max_entries,
                "max_entries": schedule.max_entries,
                "max_parts": schedule.max_parts,
                "slack": schedule.slack,
            },
        )

    launches = tuple(map(launch, range(schedule.num_launches)))
    return GroupedPlan(schedule, device_index, schedule.workspace_words, launches)


def make_range_plan(layout: RangeLayout, places: int, num_experts: int, device_index: int) -> RangePlan:
    """The plan of given runs of blocks."""
    function = load(RangeSpec(layout.config), arch_of(device_index))
    send = RANGES.bound(function, range_sizes(layout, num_experts) | {"places": places})
    return RangePlan(send, layout, stores_fp32=places <= FEW_PLACES)


def make_assigned_plan(layout: RangeLayout, ids: AssignedIds, num_experts: int, device_index: int) -> AssignedPlan:
    """The plan of given runs of blocks among assignments; layout: of `among_assignments`."""
    sizes = range_sizes(layout, num_experts) | id_sizes(ids) | {"part_bits": layout.part_bits}
    send = ASSIGNED.bound(load(RangeSpec(layout.config), arch_of(device_index)), sizes)
    return AssignedPlan(send, layout, ids.waits)


def make_entry_plan(layout: EntryTiles, ids: AssignedIds, num_experts: int, device_index: int) -> EntryPlan:
    """The plan of given tiles of entries among assignments."""
    sizes = tile_sizes(layout, num_experts) | id_sizes(ids)
    return EntryPlan(ENTRIES.bound(load(EntrySpec(layout.config), arch_of(device_index)), sizes), layout, ids.waits)


def id_sizes(ids: AssignedIds) -> dict[str, int]:
    """What products among assignments are told of them."""
    return {"count": ids.count, "id_words": ids.id_words, "row_factor": row_factor(ids.row_assignments)}


def range_sizes(layout: RangeLayout, num_experts: int) -> dict[str, int]:
    """What products by work ranges are told whatever their routing."""
    return {
        "num_tiles": layout.num_tiles,
        "k_blocks": layout.k_blocks,
        "num_ctas": layout.num_ctas,
        "num_experts": num_experts,
        "x_slots": layout.x_slots,
    }


def make_tiles_plan(tiles: GroupedTiles, _places: int, num_experts: int, device_index: int) -> TilesPlan:
    """The plan of given tiles of many rows an expert."""
    function = load(GroupedWgmmaSpec(tiles.config), arch_of(device_index))
    return TilesPlan(TILES.bound(function, tile_sizes(tiles, num_experts)), tiles)


def tile_sizes(tiles: GroupedTiles | EntryTiles, num_experts: int) -> dict[str, int]:
    """What products by tiles are told whatever their routing."""
    return {
        "num_tiles": tiles.num_tiles,
        "k_blocks": tiles.k_blocks,
        "num_experts": num_experts,
        "num_ctas": tiles.num_ctas,
    }


def make_limbs_plan(tiles: GroupedTiles, places: int, num_experts: int, device_index: int) -> LimbsPlan:
    """The plan of given tiles whose activations come in limbs."""
    arch = arch_of(device_index)
    rows = limb_rows(tiles.config.dtype, places, tiles.k_blocks, arch)
    sizes = tile_sizes(tiles, num_experts) | {"x_scale_pitch": rows.pitch}
    send = LIMB_TILES.bound(load(GroupedWgmmaSpec(tiles.config), arch), sizes)
    return LimbsPlan(send, rows, tiles, num_experts)


@per_gpu
@lru_cache(maxsize=64)
def routing_function(id_bits: int, device_index: int) -> Callable[..., Any]:
    """The kernel that sorts assignments, by arguments' names."""
    return ROUTING.bound(load(RoutingSpec(RoutingConfig(id_bits)), arch_of(device_index)), {})


@per_gpu
@lru_cache(maxsize=64)
def combine_function(
    dtype: str, source: str, id_bits: int, device_index: int, shares: str = "fp32"
) -> Callable[..., Any]:
    """The kernel that adds up results, by arguments' names; id_bits, shares: as of `CombineConfig`."""
    spec = CombineSpec(CombineConfig(dtype, source, id_bits, shares=shares))
    return COMBINE.bound(load(spec, arch_of(device_index)), {})


@per_gpu
@lru_cache(maxsize=64)
def gather_function(dtype: str, device_index: int) -> Callable[..., Any]:
    """The kernel that lays rows in the order of their places, by arguments' names."""
    return GATHER.bound(load(GatherSpec(GatherConfig(dtype)), arch_of(device_index)), {})
