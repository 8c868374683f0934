"""From configurations to compiled functions; the only module of this room that starts the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.arguments import compile_kernel
from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.experts import choice
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
from cute_kernels.gemm.experts.config import CombineConfig, GatherConfig, RoutingConfig
from cute_kernels.gemm.experts.ranges.config import EntryLimbs, RangeConfig
from cute_kernels.gemm.experts.wgmma.entry_config import EntryConfig, EntryWgmma
from cute_kernels.gemm.experts.wgmma.schedule import TABLE_WARPS, candidate_configs, entry_tiles
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.wgmma import compile as linear_wgmma
from cute_kernels.gemm.wgmma.config import LimbRowsConfig, WgmmaConfig
from cute_kernels.runtime.spec import KernelSpec

MODELS = ((8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048))  # experts, topk, hidden, intermediate
TOKENS = (1, 2, 4, 8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True, eq=False)
class GroupedSpec(KernelSpec):
    """One grouped weight-only GEMM kernel: takes what `arguments` has of it, on torch's current stream."""

    config: LinearConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:
        return f"grouped_{self.config.name}"

    def compile(self, arch: str) -> Any:
        return compile_grouped(self.config, arch)


@dataclass(frozen=True, eq=False)
class GroupedWgmmaSpec(KernelSpec):
    """One grouped GEMM kernel for many rows an expert: takes what `arguments` has of it."""

    config: WgmmaConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:
        return f"grouped_{self.config.name}"

    def compile(self, arch: str) -> Any:
        return compile_grouped_wgmma(self.config, arch)


@dataclass(frozen=True, eq=False)
class EntrySpec(KernelSpec):
    """One grouped GEMM kernel of few rows an expert, bit for bit that of tiles: takes what `arguments` has of it."""

    config: EntryConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:
        return f"grouped_{self.config.name}"

    def compile(self, arch: str) -> Any:
        return compile_entries(self.config, arch)


@dataclass(frozen=True, eq=False)
class RangeSpec(GroupedSpec):
    """One grouped GEMM kernel of few rows in limbs: takes what `arguments` has of it."""

    config: RangeConfig

    def compile(self, arch: str) -> Any:
        return compile_ranges(self.config, arch)


@dataclass(frozen=True, eq=False)
class GatherSpec(KernelSpec):
    """The kernel that lays rows in the order of their places: takes what `arguments` has of it."""

    config: GatherConfig
    family: ClassVar[str] = "moe"

    def compile(self, arch: str) -> Any:
        return compile_gather(self.config, arch)


@dataclass(frozen=True, eq=False)
class RoutingSpec(KernelSpec):
    """The kernel that sorts assignments: takes what `arguments` has of it; ids are int32 or int64.

    ``config`` says which.
    """

    config: RoutingConfig
    family: ClassVar[str] = "moe"

    def compile(self, arch: str) -> Any:
        return compile_routing(self.config, arch)


@dataclass(frozen=True, eq=False)
class CombineSpec(KernelSpec):
    """The kernel that adds up results: takes what `arguments` has of it."""

    config: CombineConfig
    family: ClassVar[str] = "moe"

    def compile(self, arch: str) -> Any:
        return compile_combine(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile: 4 bits in groups of 128, bf16; others compile on demand.

    Of these all tiles, whatever numbers of tokens the model takes them for.
    """
    specs: dict[KernelSpec, None] = {}
    for experts, topk, hidden, inner in MODELS:
        for tokens in TOKENS:
            count, products = tokens * topk, ((2 * inner, hidden), (hidden, inner))
            problems = [GroupedProblem(count, experts, n, k, k, integers(4), "bf16") for n, k in products]
            layouts = [choice.chosen(problem) for problem in problems]
            specs |= dict.fromkeys(layer_specs(count, problems, layouts))
            specs |= dict.fromkeys(entry_specs(tokens, problems))
        specs |= {GroupedWgmmaSpec(config): None for config in candidate_configs(problems[0])}
    small: list[KernelSpec] = [RoutingSpec(RoutingConfig(bits)) for bits in (32, 64)]
    small += [CombineSpec(CombineConfig(dtype)) for dtype in ("bf16", "fp16")]
    small += [CombineSpec(CombineConfig("bf16", "bf16")), CombineSpec(CombineConfig("fp16", "fp16"))]
    small += [CombineSpec(CombineConfig("bf16", id_bits=bits)) for bits in (32, 64)]
    small += [CombineSpec(CombineConfig("bf16", "bf16", id_bits=bits)) for bits in (32, 64)]
    by_bf16 = [(source, bits) for bits in (0, 32, 64) for source in ("fp32", "bf16")]
    small += [CombineSpec(CombineConfig("bf16", source, bits, shares="bf16")) for source, bits in by_bf16]
    return [*small, *(GatherSpec(GatherConfig(dtype)) for dtype in ("bf16", "fp16")), *specs]


def grouped_spec(problem: GroupedProblem) -> GroupedSpec | GroupedWgmmaSpec | EntrySpec:
    """The kernel that serves a product."""
    return spec_of(choice.chosen(problem).config)


def spec_of(config: LinearConfig | WgmmaConfig) -> GroupedSpec | GroupedWgmmaSpec | EntrySpec:
    """The kernel of a configuration."""
    if isinstance(config, WgmmaConfig):
        return EntrySpec(config) if isinstance(config.mainloop, EntryWgmma) else GroupedWgmmaSpec(config)
    return RangeSpec(config) if isinstance(config.activations, EntryLimbs) else GroupedSpec(config)


def specs_of(config: LinearConfig | WgmmaConfig) -> list[KernelSpec]:
    """All kernels that a product of a configuration launches, but for what brings rows in order."""
    makes_limbs = isinstance(config, WgmmaConfig) and config.limbs
    limbs = [linear_wgmma.LimbRowsSpec(LimbRowsConfig(config.dtype))] if makes_limbs else []
    return [*limbs, spec_of(config)]


def layer_specs(
    assignments: int, problems: Sequence[GroupedProblem], layouts: Sequence[choice.GroupedLayout]
) -> list[KernelSpec]:
    """All kernels of a layer's products, whose layouts these are: of sorted assignments, and of them as they are."""
    found = [spec for layout in layouts for spec in specs_of(layout.config)]
    return [*found, *(spec_of(layout.config) for layout in choice.assigned(assignments, problems, layouts) or ())]


def entry_specs(tokens: int, problems: Sequence[GroupedProblem]) -> list[EntrySpec]:
    """The kernels of a batch-invariant layer's products of so many tokens' assignments as they are; none where they are
    sorted."""
    found = [entry_tiles(problem, tokens) for problem in problems]
    return [EntrySpec(layout.config) for layout in found if layout is not None] if None not in found else []


def compile_grouped(config: LinearConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.experts.kernel import GroupedKernel

    return compile_kernel(GroupedKernel, config, GROUPED, arch, *options)


def compile_ranges(config: RangeConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.ranges.assigned import AssignedRangeKernel
    from cute_kernels.gemm.experts.ranges.kernel import RangeKernel

    if config.activations.lane_assignments:
        return compile_kernel(AssignedRangeKernel, config, ASSIGNED, arch, *options)
    return compile_kernel(RangeKernel, config, RANGES, arch, *options)


def compile_grouped_wgmma(config: WgmmaConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.wgmma.kernel import grouped_tiles_kernel

    if config.reduction.splits_k:
        raise ValueError(f"config: got parts of K, want none in a grouped product ({config})")
    if config.consumer_warps < TABLE_WARPS:
        raise ValueError(
            f"config: got {config.consumer_warps} consumer warps, want {TABLE_WARPS}, which write the table"
        )
    return compile_kernel(grouped_tiles_kernel, config, LIMB_TILES if config.limbs else TILES, arch, *options)


def compile_entries(config: EntryConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.wgmma.entry_kernel import EntryKernel

    return compile_kernel(EntryKernel, config, ENTRIES, arch, *options)


def compile_gather(config: GatherConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.gather import GatherKernel

    return compile_kernel(GatherKernel, config, GATHER, arch, *options)


def compile_routing(config: RoutingConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.routing import RoutingKernel

    any_place: dict[str, Any] = {"divisibility": 1, "assumed_align": config.id_bits // 8}
    return compile_kernel(RoutingKernel, config, ROUTING, arch, *options, dtype=f"int{config.id_bits}", **any_place)


def compile_combine(config: CombineConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    from cute_kernels.gemm.experts.combine import CombineKernel

    any_place: dict[str, Any] = {"divisibility": 1, "assumed_align": 4 if config.dtype == "fp32" else 2}
    return compile_kernel(CombineKernel, config, COMBINE, arch, *options, **any_place)
