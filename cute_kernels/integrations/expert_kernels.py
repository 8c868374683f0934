"""The kernels that an engine's layer of experts needs, and the computation of the layer's result."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from cute_kernels import fused_moe
from cute_kernels.gemm.activations import ActivationFunction, Swiglu
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.experts.compile import specs_of
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.plan import DTYPE_NAMES, LayerForm, few_layouts
from cute_kernels.gemm.experts.product import layout_of
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.packed_experts import ExpertsForm, PackedExperts
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.gpu import forgotten
from cute_kernels.runtime.spec import KernelSpec

ID_BITS = 32  # of an expert's id: vLLM's router makes int32
EACH_TOKENS = 16  # up to so many, every number has kernels of its own; from then on neighbours share theirs
SWIGLU = Swiglu()


class Epilogues(NamedTuple):
    """The activation and the biases of a layer's products, as `fused_moe` takes them."""

    activation: ActivationFunction = SWIGLU
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


PLAIN = Epilogues()


def multiply(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    batch_invariant: bool,
    out: torch.Tensor,
    epilogues: Epilogues = PLAIN,
) -> torch.Tensor:
    """Computes `fused_moe` for any number of tokens into ``out``, and returns it.

    x, out: [tokens, K]. topk_weights, topk_ids: [tokens, topk].
    """
    for start in range(0, x.shape[0], MAX_TOKENS):
        rows = slice(start, start + MAX_TOKENS)
        fused_moe(
            x[rows],
            gate_up,
            down,
            topk_ids=topk_ids[rows],
            topk_weights=topk_weights[rows],
            batch_invariant=batch_invariant,
            out=out[rows],
            **epilogues._asdict(),
        )
    return out


def tokens_of(rows: Iterable[int], most: int) -> tuple[int, ...]:
    """Returns the numbers of tokens, up to ``most``, for which an engine's steps need kernels. rows: the possible
    numbers of tokens of a step.
    """
    return tuple(count for count in sorted({*range(1, EACH_TOKENS + 1), *rows}) if count <= most)


@functools.cache  # layers of a model are nearly always alike
def specs(
    gate_up: ExpertsForm,
    down: ExpertsForm,
    topk: int,
    tokens: tuple[int, ...],
    invariant: bool,
    activation: ActivationFunction = SWIGLU,
) -> tuple[KernelSpec, ...]:
    """Returns the kernels of steps with these numbers of tokens. invariant: whether a token's result must not depend on
    other tokens."""
    found = (spec for count in tokens for spec in _specs_of(gate_up, down, count, topk, invariant, activation))
    return tuple(dict.fromkeys(found))


forgotten(specs.cache_clear)


def _specs_of(
    gate_up: ExpertsForm, down: ExpertsForm, tokens: int, topk: int, invariant: bool, activation: ActivationFunction
) -> Iterator[KernelSpec]:
    form, name = LayerForm(tokens, topk, ID_BITS, gate_up, down, activation, invariant), DTYPE_NAMES[gate_up.dtype]
    few = few_layouts(form)
    if few is not None:
        yield from (ExpertSpec(layout.config) for layout in few)
        yield ExpertSpec(CombineConfig(name, "fp32" if isinstance(few[-1], RangeLayout) else name, ID_BITS))
        return
    yield from (spec for kind in form.kinds for spec in specs_of(layout_of(form.count, *kind).config))
    yield RouterSpec(RouterConfig(f"int{ID_BITS}", IDS))
    yield GemmSpec(RowsConfig(name, makes=INPUTS))
    yield from (ExpertSpec(CombineConfig(name, source, 0)) for source in ("fp32", name))
