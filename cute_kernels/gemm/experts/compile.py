"""The kernels of experts: those that ship, and those that a product or a layer launches."""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts import choice
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import candidate_configs, entry_tiles
from cute_kernels.gemm.operands.fp8_config import LIMBS, RowsConfig
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.runtime.spec import KernelSpec

MODELS = ((8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048))  # experts, topk, hidden, intermediate
TOKENS = (1, 2, 4, 8, 32, 128, 512, 2048, 8192)


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles: 4 bits in groups of 128, bf16; others compile on demand.

    All tile configurations are among them, so the tile that the time model chooses never lacks a kernel.
    """
    specs: dict[KernelSpec, None] = {}
    for experts, topk, hidden, inner in MODELS:
        for tokens in TOKENS:
            count, products = tokens * topk, ((2 * inner, hidden), (hidden, inner))
            problems = [GroupedProblem(count, experts, n, k, k, integers(4), "bf16") for n, k in products]
            layouts = [choice.chosen(problem) for problem in problems]
            specs |= dict.fromkeys(layer_specs(count, problems, layouts))
            specs |= dict.fromkeys(entry_specs(tokens, problems))
        specs |= {ExpertSpec(config): None for config in candidate_configs(problems[0])}
    small: list[KernelSpec] = [ExpertSpec(CombineConfig(dtype)) for dtype in ("bf16", "fp16")]
    small += [ExpertSpec(CombineConfig("bf16", "bf16")), ExpertSpec(CombineConfig("fp16", "fp16"))]
    small += [ExpertSpec(CombineConfig("bf16", id_bits=bits)) for bits in (32, 64)]
    small += [ExpertSpec(CombineConfig("bf16", "bf16", id_bits=bits)) for bits in (32, 64)]
    by_bf16 = [(source, bits) for bits in (0, 32, 64) for source in ("fp32", "bf16")]
    small += [ExpertSpec(CombineConfig("bf16", source, bits, shares="bf16")) for source, bits in by_bf16]
    return [*small, *specs]


def specs_of(config: StreamConfig | WgmmaConfig) -> list[KernelSpec]:
    """Returns the specs of all kernels that a product of a configuration launches, except those that gather or round
    rows."""
    makes_limbs = isinstance(config, WgmmaConfig) and config.limbs
    limbs = [GemmSpec(RowsConfig(config.dtype, makes=LIMBS))] if makes_limbs else []
    return [*limbs, ExpertSpec(config)]


def layer_specs(
    assignments: int, problems: Sequence[GroupedProblem], layouts: Sequence[choice.GroupedLayout]
) -> list[KernelSpec]:
    """Returns the specs of all kernels of a layer's products with these layouts, over sorted and over unsorted
    assignments."""
    found = [spec for layout in layouts for spec in specs_of(layout.config)]
    return [*found, *(ExpertSpec(layout.config) for layout in choice.assigned(assignments, problems, layouts) or ())]


def entry_specs(tokens: int, problems: Sequence[GroupedProblem]) -> list[ExpertSpec]:
    """Returns the specs of the kernels of a batch-invariant layer's products over the unsorted assignments of
    ``tokens`` tokens. There are none if the layer sorts assignments."""
    found = [entry_tiles(problem, tokens) for problem in problems]
    return [ExpertSpec(layout.config) for layout in found if layout is not None] if None not in found else []
