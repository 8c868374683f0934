"""The layers that take part in the fusion of small operations into products (`fusion`), and the norms of the fusion.

A product's "swiglu" epilogue needs weights whose rows of gate and up alternate. A layer with such rows sorts its
results after the product. The pass over the graph removes this sorting together with the gate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none

from cute_kernels.gemm.layer.call import kernel_of, serves_rows
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.integrations.ready import specs_beside_norm, whole_specs
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
"""The name of the layer with gate and up in models."""
LAST = "down_proj"
"""The last layer of an MLP, with the most inputs of a model's layers."""
NORMED = ("qkv_proj", GATED)
"""The names of layers whose input is a norm."""
SILU = ("silu", "swish")


@dataclass(frozen=True)
class Fused:
    """The fusions of the engine that is being made.

    Attributes:
        gates: whether a SwiGLU follows the model's layers of gate and up.
        sums: whether residuals and norms after products are fused.
    """

    gates: bool = False
    sums: bool = False


def wanted() -> Fused:
    """Returns the fusions that the engine's configuration asks for. It must be called while the model is made."""
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
    """Returns whether a layer has gate and up together, without a bias."""
    parts = getattr(layer, "output_partition_sizes", ())
    is_pair = len(parts) == 2 and parts[0] == parts[1]
    return is_pair and _name_of(layer) == GATED and getattr(layer, "bias", None) is None


def _name_of(layer: object) -> str:
    return str(getattr(layer, "prefix", "")).rpartition(".")[2]


def ends_block(layer: object) -> bool:
    """Returns whether a layer's results are added to the residual stream."""
    return type(layer).__name__ == "RowParallelLinear"


def reads_norm(layer: object) -> bool:
    """Returns whether a layer's input is a norm."""
    return _name_of(layer) in NORMED


def side_of_norm(layer: object) -> DeferredKind | None:
    """Returns on which side of a norm a layer's product is: GIVES before a norm, TAKES after one, None if it is on
    neither side.

    Returns None also for layers that are split among GPUs, since their results are summed before the norm. Returns None
    also if every layer of the model has experts: one norm is then read by the experts and by their router, and no
    product precedes the other norm.
    """
    if getattr(layer, "tp_size", 1) > 1 or _has_experts_everywhere():
        return None
    if ends_block(layer):
        return GIVES
    return TAKES if reads_norm(layer) else None


def _has_experts_everywhere() -> bool:
    """Returns whether each layer of the model that is being made has experts."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    count = getattr(config.model_config.hf_text_config, "num_hidden_layers", 0)  # which not every configuration has
    return 0 < count <= len(config.compilation_config.static_all_moe_layers)


def in_order(out: torch.Tensor) -> torch.Tensor:
    """Sorts results [rows, 2 * columns], in which columns of gate and up alternate, into the model's order: the columns
    of gate, then the columns of up.
    """
    return out.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)


def norm_specs(columns: int, dtype: torch.dtype) -> list[NormSpec]:
    """Returns the kernels of the RMSNorms, with and without a residual, that may follow a layer with ``columns`` output
    features."""
    if columns % VECTOR or columns > MAX_COLUMNS or dtype not in DTYPES:
        return []
    return [
        NormSpec(NormConfig("rms", DTYPES[dtype], *launch_shape(columns), has_residual=with_residual))
        for with_residual in (False, True)
    ]


def _load_those_there(specs: Iterable[SpecT]) -> list[SpecT]:
    """Loads kernels that are compiled already, and compiles the remaining ones if a compiler is installed. Returns the
    kernels that can be launched.
    """
    index = torch.cuda.current_device()
    arch, can_compile = arch_of(index), compiler_version() is not None
    there = [spec for spec in specs if can_compile or default_cache().has(spec, arch)]
    prepare.load(torch.device("cuda", index), there)
    return there


@functools.cache
def settle_norms(columns: int, dtype: torch.dtype) -> None:
    """Loads the kernels of norms of ``columns`` columns, with a residual and without, if they are compiled already or
    can be compiled here.

    vLLM keeps compiled graphs, whose calls depend on the norms that were loaded.
    """
    _norms[columns, dtype] = frozenset(
        spec.config.has_residual for spec in _load_those_there(norm_specs(columns, dtype))
    )
    plugin.note_served(f"norm {columns} {dtype} {sorted(_norms[columns, dtype])}")


def is_norm_ready(columns: int, dtype: torch.dtype, with_residual: bool) -> bool:
    """Returns whether `settle_norms` has loaded the norm of rows with ``columns`` columns."""
    return with_residual in _norms.get((columns, dtype), ())


_norms: dict[tuple[int, torch.dtype], frozenset[bool]] = {}


@functools.cache
def make_ready(problem: LinearProblem, rows: prepare.RowCounts, kind: DeferredKind) -> None:
    """Loads or compiles the kernels with which a layer's product produces or consumes a deferred norm, as ``kind``
    says.

    If there is no such kernel for a number of rows, or it can be neither loaded nor compiled, the norm gets its own
    launch.

    problem: the layer, for one row. rows: the numbers of rows that the engine may run.
    """
    _load_those_there(specs_beside_norm(problem, rows.all(), kind))


@functools.cache
def make_whole_ready(problem: LinearProblem, rows: prepare.RowCounts) -> None:
    """Loads or compiles the kernel of all products from one attention to the next.

    problem: the last layer of an MLP, for one row. A model whose o projection has more inputs than any other layer
    needs another kernel, which is not loaded. The products of such a model run one by one.
    """
    specs = whole_specs(problem)
    if specs and any(map(serves_rows, rows.all())):
        _load_those_there(specs)  # by compilers that wait
        kernel_of(max(problem.n, problem.k), torch.cuda.current_device())


def ends_layer(layer: object) -> bool:
    """Returns whether a layer is the last one before the next attention."""
    return _name_of(layer) == LAST
