"""Which layers are made for the fusion of small operations into products (`fusion`), and the norms that it takes.

The epilogue "swiglu" of a product wants interleaved rows of gate and up. A layer whose rows are put so sorts its
results again after the product; the pass over the graph takes that away together with the gate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none

from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import config_beside_a_norm
from cute_kernels.gemm.layer.call import kernel_of, serves_rows
from cute_kernels.gemm.layer.operator import may_serve
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.integrations.vllm import plugin, prepare
from cute_kernels.norm.call import DTYPES
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import MAX_COLUMNS, VECTOR, NormConfig, launch_shape
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.native import compiler_version
from cute_kernels.runtime.spec import KernelSpec

SpecT = TypeVar("SpecT", bound=KernelSpec)
VLLM_COMPILE = 3  # CompilationMode.VLLM_COMPILE, the mode in which passes run
GATED = "gate_up_proj"
"""What models call the layer of gate and up together."""
LAST = "down_proj"
"""The last layer of an MLP, with the most inputs of a model's layers."""
NORMED = ("qkv_proj", GATED)
"""Layers whose input is a norm."""
SILU = ("silu", "swish")


@dataclass(frozen=True)
class Fused:
    """The fusions of the engine that is being made.

    gates: whether its layers of gate and up feed a SwiGLU. sums: whether residuals and norms after products are fused.
    """

    gates: bool = False
    sums: bool = False


def wanted() -> Fused:
    """Returns the fusions that the engine's configuration asks for; call it while the model is made."""
    config = get_current_vllm_config_or_none()
    if config is None or not plugin.is_replaced("fusion") or envs.VLLM_BATCH_INVARIANT:
        return Fused()
    compilation = config.compilation_config
    if int(compilation.mode or 0) != VLLM_COMPILE or compilation.backend not in ("", "inductor"):
        return Fused()
    # An adapter's product lies between a layer and its gate: the layer's rows would be sorted for nothing.
    gates = getattr(config, "lora_config", None) is None
    return Fused(gates=gates and getattr(config.model_config.hf_text_config, "hidden_act", None) in SILU, sums=True)


def is_gated(layer: object) -> bool:
    """Whether a layer is gate and up together, without a bias."""
    parts = getattr(layer, "output_partition_sizes", ())
    is_pair = len(parts) == 2 and parts[0] == parts[1]
    return is_pair and _name_of(layer) == GATED and getattr(layer, "bias", None) is None


def _name_of(layer: object) -> str:
    return str(getattr(layer, "prefix", "")).rpartition(".")[2]


def ends_block(layer: object) -> bool:
    """Whether a layer's results are added to the residual stream."""
    return type(layer).__name__ == "RowParallelLinear"


def reads_norm(layer: object) -> bool:
    """Whether a layer's input is a norm."""
    return _name_of(layer) in NORMED


def side_of_norm(layer: object) -> DeferredKind | None:
    """The side of a norm that a layer's product is on: GIVES before a norm, TAKES behind one.

    None for neither, and for layers that GPUs share: their results are added up before they are normed.
    """
    if getattr(layer, "tp_size", 1) > 1:
        return None
    if ends_block(layer):
        return GIVES
    return TAKES if reads_norm(layer) else None


def in_order(out: torch.Tensor) -> torch.Tensor:
    """Sorts results [rows, 2 columns], in which gate and up alternate, as the model wants them: all of gate first."""
    return out.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)


def norm_specs(columns: int, dtype: torch.dtype) -> list[NormSpec]:
    """The norms that may follow a layer with so many output features."""
    if columns % VECTOR or columns > MAX_COLUMNS or dtype not in DTYPES:
        return []
    return [
        NormSpec(NormConfig("rms", DTYPES[dtype], *launch_shape(columns), has_residual=with_residual))
        for with_residual in (False, True)
    ]


def _load_those_there(specs: Iterable[SpecT]) -> list[SpecT]:
    """Loads kernels that are compiled, or compiles them where there is a compiler. Returns those that are loaded
    then."""
    index = torch.cuda.current_device()
    arch, can_compile = arch_of(index), compiler_version() is not None
    there = [spec for spec in specs if can_compile or default_cache().has(spec, arch)]
    prepare.load(torch.device("cuda", index), there)
    return there


@functools.cache
def settle_norms(columns: int, dtype: torch.dtype) -> None:
    """Loads the norms of rows with so many columns, with a residual and without: those compiled or in a bundle.

    vLLM keeps its compiled graphs, and what they call depends on the norms that were there.
    """
    _norms[columns, dtype] = frozenset(
        spec.config.has_residual for spec in _load_those_there(norm_specs(columns, dtype))
    )
    plugin.note_served(f"norm {columns} {dtype} {sorted(_norms[columns, dtype])}")


def is_norm_ready(columns: int, dtype: torch.dtype, with_residual: bool) -> bool:
    """Whether a norm of rows of a number of columns was compiled when the layers around it were loaded."""
    return with_residual in _norms.get((columns, dtype), ())


_norms: dict[tuple[int, torch.dtype], frozenset[bool]] = {}


@functools.cache
def make_ready(problem: LinearProblem, rows: prepare.RowCounts, kind: DeferredKind) -> None:
    """Loads the kernels of a layer's products on a side of a norm, or compiles them now. Where they are in no bundle
    and cannot be compiled, and for numbers of rows that have none, the norm is a launch.

    problem: the layer, of one row. rows: numbers of rows that the engine runs.
    """
    problems = [replace(problem, m=m) for m in rows.all()]
    found = (config_beside_a_norm(one, chosen(one), kind) for one in problems)
    _load_those_there(dict.fromkeys(GemmSpec(config) for config in found if config is not None))


@functools.cache
def make_whole_ready(problem: LinearProblem, rows: prepare.RowCounts) -> None:
    """Loads the kernels of all products from one attention to the next, or compiles them now, as `make_ready`.

    problem: the last layer of an MLP, of one row. A model whose o has more inputs than any layer asks for another
    kernel, which is not there: it goes product by product.
    """
    n, k = problem.n, problem.k
    if not may_serve([(problem.format.key, n, k)]):
        return
    index = torch.cuda.current_device()
    if any(map(serves_rows, rows.all())):
        kernel_of(max(n, k), index)


def ends_layer(layer: object) -> bool:
    """Whether a layer is the last one before the next attention."""
    return _name_of(layer) == LAST
