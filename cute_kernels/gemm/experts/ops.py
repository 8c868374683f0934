"""Calling layers of experts, and their registered operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import needs_dispatch
from cute_kernels.deprecated import warn
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import checks as linear_checks
from cute_kernels.gemm.experts import checks
from cute_kernels.gemm.experts.launch import GroupedLaunch, Weights, grouped_launch_of
from cute_kernels.gemm.experts.layer import MoePlan, moe_plan_of
from cute_kernels.gemm.experts.reference import fused_moe_reference, grouped_linear_reference
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.reference import out_features
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.plans import identity, keep


def apply_grouped(
    x: torch.Tensor,
    weight: PackedExperts,
    expert_offsets: torch.Tensor,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    batch_invariant: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `cute_kernels.gemm.experts.grouped_linear`.

    A launch is kept for calls that differ from one that has been checked in the contents of memory alone.
    """
    key = None
    if is_direct(x, (weight,), (expert_offsets,), (rows, bias, out)) and isinstance(batch_invariant, bool):
        try:
            key = (
                x.shape,
                x.dtype,
                x.layout,
                x.get_device(),
                weight.form,
                identity(expert_offsets),
                None if rows is None else identity(rows),
                None if bias is None else identity(bias),
                activation,
                out_dtype,
                batch_invariant,
                None if out is None else (*identity(out), out.data_ptr() == x.data_ptr()),
            )
            launch = _launches.get(key)
        except (TypeError, RuntimeError):  # an option that is not hashable, a tensor without strides: the checks say so
            key = launch = None
        if launch is not None and not arguments.DEBUG:
            return launch.run(x, weight, expert_offsets, rows, bias, out)
    checks.check_experts("weight", weight)
    n, k = weight.shape
    checks.check_rows_of(x, k, weight.dtype, weight.device)
    dispatch = needs_dispatch(x=x, codes=weight.codes)
    int32 = (torch.int32,)
    checks.check_tensor("expert_offsets", expert_offsets, int32, (len(weight) + 1,), x.device, contiguous=True)
    if rows is not None:
        checks.check_tensor("rows", rows, int32, (None,), x.device, contiguous=True)
    if bias is not None:
        checks.check_tensor("bias", bias, (x.dtype,), (len(weight), n), x.device, contiguous=True)
    linear_checks.check_activation(activation, n)
    out_dtype = linear_checks.result_dtype(out_dtype, x, out)
    arguments.check_flag("batch_invariant", batch_invariant)
    places = x.shape[0] if rows is None else rows.shape[0]
    if out is not None:
        columns = out_features(n, activation)
        checks.check_tensor("out", out, (out_dtype,), (places, columns), x.device, contiguous=True)
        if not dispatch:
            linear_checks.check_apart(out, x)
    if key is not None and places:
        if arguments.DEBUG:
            checks.check_routing(expert_offsets, rows, x.shape[0])
        with GPU.guard(x.device):
            made = _launch_of(places, rows, weight, activation, out_dtype, batch_invariant)
            launch = keep(_launches, key, made)
        return launch.run(x, weight, expert_offsets, rows, bias, out)
    tensors: list[Any] = [x.detach().contiguous(), weight.codes, weight.scales, weight.zeros]
    tensors += [expert_offsets, rows, bias]
    numbers: list[Any] = [weight.format.key, n, k, activation, out_dtype, batch_invariant]
    if not dispatch:
        work: Any = _grouped_on_cuda if x.is_cuda or GPU.takes_cpu else _grouped_on_cpu
        return work(*tensors, *numbers, out)
    with torch.no_grad():  # there is no way back, so nothing may look as if there were
        result = torch.ops.cute_kernels.grouped_linear(*tensors, *numbers)
    return result if out is None else out.copy_(result)


def apply_moe(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    out_dtype: torch.dtype | None,
    batch_invariant: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `cute_kernels.gemm.experts.fused_moe`.

    A plan is kept for calls that differ from one that has been checked in the contents of memory alone.
    """
    key = None
    if is_direct(x, (gate_up, down), (topk_ids, topk_weights), (out,)) and isinstance(batch_invariant, bool):
        try:
            key = (
                x.shape,
                x.dtype,
                x.layout,
                x.get_device(),
                gate_up.form,
                down.form,
                topk_ids.shape,
                topk_ids.dtype,
                topk_ids.layout,
                topk_ids.get_device(),
                topk_weights.shape,
                topk_weights.dtype,
                topk_weights.layout,
                topk_weights.get_device(),
                activation,
                out_dtype,
                batch_invariant,
                None if out is None else identity(out),
            )
            plan = _plans.get(key)
        except (TypeError, RuntimeError):  # an option that is not hashable, a tensor without strides: the checks say so
            key = plan = None
        if plan is not None:
            return plan.run(x, gate_up, down, topk_ids, topk_weights, out)
    if _are_swapped(topk_ids, topk_weights):
        warn("fused_moe: topk_weights come before topk_ids now", stacklevel=4)
        options = activation, out_dtype, batch_invariant, out
        return apply_moe(x, gate_up, down, topk_weights, topk_ids, *options)
    checks.check_experts("gate_up", gate_up)
    checks.check_experts("down", down)
    checks.check_pair(gate_up, down)
    checks.check_rows_of(x, gate_up.in_features, gate_up.dtype, gate_up.device)
    if not is_compiling():  # or an exported program would be for no more tokens, wherever it runs
        checks.check_tokens(x)
    dispatch = needs_dispatch(x=x, codes=gate_up.codes)
    checks.check_tensor("topk_ids", topk_ids, checks.ID_DTYPES, (x.shape[0], None), x.device)
    checks.check_tensor("topk_weights", topk_weights, checks.WEIGHT_DTYPES, tuple(topk_ids.shape), x.device)
    if activation == "silu":
        warn("fused_moe: the activation 'silu' is called 'swiglu' now", stacklevel=4)
    elif activation != "swiglu":
        raise ValueError(f"activation: got {activation!r}, want 'swiglu': silu(gate) * up")
    out_dtype = linear_checks.result_dtype(out_dtype, x, out)
    arguments.check_flag("batch_invariant", batch_invariant)
    if out is not None:
        shape = (x.shape[0], down.out_features)
        checks.check_tensor("out", out, (out_dtype,), shape, x.device, contiguous=True)
    tensors: list[Any] = [x.detach().contiguous()]
    for weight in (gate_up, down):
        tensors += [weight.codes, weight.scales, weight.zeros]
    tensors += [topk_ids.contiguous(), topk_weights.detach().float().contiguous()]
    numbers: list[Any] = [value for w in (gate_up, down) for value in (w.format.key, *w.shape)]
    if key is not None and topk_ids.numel():
        with GPU.guard(x.device):
            sizes = *topk_ids.shape, 8 * topk_ids.element_size()
            made = moe_plan_of(*sizes, gate_up.form, down.form, out_dtype, batch_invariant)
            plan = keep(_plans, key, made)
        return plan.run(x, gate_up, down, topk_ids, topk_weights, out)
    if not dispatch:
        work: Any = _moe_on_cuda if x.is_cuda or GPU.takes_cpu else _moe_on_cpu
        return work(*tensors, *numbers, out_dtype, batch_invariant, out)
    with torch.no_grad():
        result = torch.ops.cute_kernels.fused_moe(*tensors, *numbers, out_dtype, batch_invariant)
    return result if out is None else out.copy_(result)


def _are_swapped(topk_ids: object, topk_weights: object) -> bool:
    """Whether the two came in the order that they had before 0.2; their dtypes tell."""
    if not isinstance(topk_ids, torch.Tensor) or not isinstance(topk_weights, torch.Tensor):
        return False
    return topk_ids.is_floating_point() and topk_weights.dtype in checks.ID_DTYPES


_plans: dict[tuple[Any, ...], MoePlan] = {}
_launches: dict[tuple[Any, ...], GroupedLaunch] = {}
forgotten(_plans.clear)
forgotten(_launches.clear)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_direct(x: torch.Tensor, weights: Iterable[object], tensors: Iterable[object], options: Iterable[object]) -> bool:
    """Whether kernels may be launched without the operator: in eager mode, on plain tensors on a GPU.

    options: tensors that may be None.
    """
    if is_compiling() or type(x) not in _PLAIN or not (x.is_cuda or GPU.takes_cpu):
        return False
    for weight in weights:
        if type(weight) is not PackedExperts or type(weight.codes) is not torch.Tensor:
            return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    for tensor in options:
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    return True


def _launch_of(
    places: int,
    rows: torch.Tensor | None,
    weight: PackedExperts | Weights,
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> GroupedLaunch:
    return grouped_launch_of(places, rows is not None, weight.form, activation, out_dtype, batch_invariant)


# -- the operators ----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "grouped_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor expert_offsets, Tensor? rows, "
    "Tensor? bias, str format, int n, int k, str? activation, ScalarType out_dtype, "
    "bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "fused_moe(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor down_codes, Tensor down_scales, "
    "Tensor? down_zeros, Tensor topk_ids, Tensor topk_weights, str format, int n, int k, str down_format, "
    "int down_n, int down_k, ScalarType out_dtype, bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.no_grad()
def _grouped_on_cpu(
    x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, activation, out_dtype,
    batch_invariant=False, out=None,
) -> torch.Tensor:  # fmt: skip
    checks.check_routing(expert_offsets, rows, x.shape[0])
    weight = PackedExperts(codes, scales, zeros, weight_format(format), (n, k), check_values=False)
    options = {"rows": rows, "bias": bias, "activation": activation, "out_dtype": out_dtype}
    options["batch_invariant"] = batch_invariant
    result = grouped_linear_reference(x, weight, expert_offsets, **options)
    return result if out is None else out.copy_(result)


def _grouped_on_cuda(
    x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, activation, out_dtype,
    batch_invariant=False, out=None,
) -> torch.Tensor:  # fmt: skip
    if arguments.DEBUG:
        checks.check_routing(expert_offsets, rows, x.shape[0])
    places = x.shape[0] if rows is None else rows.shape[0]
    if not places:
        return x.new_empty((0, out_features(n, activation)), dtype=out_dtype) if out is None else out
    weights = Weights(codes, scales, zeros, weight_format(format), n, k)
    with GPU.guard(x.device):
        launch = _launch_of(places, rows, weights, activation, out_dtype, batch_invariant)
        return launch.run(x, weights, expert_offsets, rows, bias, out)


def _grouped_on_meta(
    x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, activation, out_dtype,
    batch_invariant=False,
) -> torch.Tensor:  # fmt: skip
    places = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty((places, out_features(n, activation)), dtype=out_dtype)


@torch.no_grad()
def _moe_on_cpu(
    x, codes, scales, zeros, down_codes, down_scales, down_zeros, topk_ids, topk_weights,
    format, n, k, down_format, down_n, down_k, out_dtype, batch_invariant=False, out=None,
) -> torch.Tensor:  # fmt: skip
    shapes = ((codes, scales, zeros, weight_format(format), (n, k)),
              (down_codes, down_scales, down_zeros, weight_format(down_format), (down_n, down_k)))  # fmt: skip
    gate_up, down = (PackedExperts(*fields, check_values=False) for fields in shapes)
    numbers = {"out_dtype": out_dtype, "batch_invariant": batch_invariant}
    result = fused_moe_reference(x, gate_up, down, topk_weights, topk_ids, **numbers)
    return result if out is None else out.copy_(result)


def _moe_on_cuda(
    x, codes, scales, zeros, down_codes, down_scales, down_zeros, topk_ids, topk_weights,
    format, n, k, down_format, down_n, down_k, out_dtype, batch_invariant=False, out=None,
) -> torch.Tensor:  # fmt: skip
    checks.check_tokens(x)
    if topk_ids.numel() == 0:
        return x.new_zeros((x.shape[0], down_n), dtype=out_dtype) if out is None else out.zero_()
    gate_up = Weights(codes, scales, zeros, weight_format(format), n, k)
    down = Weights(down_codes, down_scales, down_zeros, weight_format(down_format), down_n, down_k)
    with GPU.guard(x.device):
        sizes = *topk_ids.shape, 8 * topk_ids.element_size()
        plan = moe_plan_of(*sizes, gate_up.form, down.form, out_dtype, batch_invariant)
        return plan.run(x, gate_up, down, topk_ids, topk_weights, out)


def _moe_on_meta(
    x, codes, scales, zeros, down_codes, down_scales, down_zeros, topk_ids, topk_weights,
    format, n, k, down_format, down_n, down_k, out_dtype, batch_invariant=False,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], down_n), dtype=out_dtype)


_library.impl("grouped_linear", _grouped_on_cpu, "CPU")
_library.impl("grouped_linear", _grouped_on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::grouped_linear", _grouped_on_meta, lib=_library)
_library.impl("fused_moe", _moe_on_cpu, "CPU")
_library.impl("fused_moe", _moe_on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::fused_moe", _moe_on_meta, lib=_library)
