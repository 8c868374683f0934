"""Calling a weight-only linear layer, and its registered operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels.arguments import check_flag, needs_dispatch
from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm import checks
from cute_kernels.gemm.launch import VECTOR_BYTES, KeptLaunch, RowNorm, keep_launch, launch
from cute_kernels.gemm.reference import linear_reference, out_features, prepare_input
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.plans import identity, keep

_kept: dict[tuple[Any, ...], KeptLaunch] = {}
forgotten(_kept.clear)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def apply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    format: WeightFormat,
    shape: tuple[int, int],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> torch.Tensor:
    """`cute_kernels.quantized_linear` on the fields of a `PackedWeight`, which are taken to be those of one.

    What a call that passed the checks launches is kept for those that they could not tell from it.
    """
    key = None
    if is_direct(x, codes, bias, residual, out) and type(norm) in _PLAIN and isinstance(batch_invariant, bool):
        try:
            key = (
                x.shape,
                x.dtype,
                x.get_device(),
                x.is_contiguous() or x.stride(),
                x.data_ptr() % VECTOR_BYTES,
                None if perm is None else perm.data_ptr() % VECTOR_BYTES,
                None if input_scale is None else input_scale.data_ptr() % VECTOR_BYTES,
                codes.get_device(),
                scales.dtype,
                format.key,
                shape,
                activation,
                out_dtype,
                batch_invariant,
                None if bias is None else identity(bias),
                None if residual is None else identity(residual),
                None if out is None else (*identity(out), out.data_ptr() == x.data_ptr()),
                None if norm is None else (*identity(norm), norm_eps, norm_offset),
            )
            kept = _kept.get(key)
        except (TypeError, RuntimeError):  # an option that is not hashable, a tensor without strides: the checks say
            key = kept = None
        if kept is not None:
            return kept.run(x, codes, scales, zeros, bias, residual, out, perm, input_scale, norm)
    n, k = shape
    checks.check_input(x, k, format.activation_dtype(scales.dtype), codes.device)
    dispatch = needs_dispatch(x=x, codes=codes)
    if norm is not None:
        checks.check_norm(norm, norm_eps, norm_offset, x)
    check_flag("batch_invariant", batch_invariant)
    out_dtype = checks.check_options(
        x, n, bias=bias, residual=residual, activation=activation, out_dtype=out_dtype, out=out
    )
    columns = out_features(n, activation)
    if out is not None and not dispatch:
        checks.check_apart(out, x)
    row_norm = None if norm is None else RowNorm(norm, norm_eps, norm_offset)
    if key is not None and (residual is None or residual.is_contiguous()):
        kept = keep_launch(x, format, shape, activation, out_dtype, batch_invariant, perm, input_scale, row_norm)
        if kept is not None:
            return keep(_kept, key, kept).run(x, codes, scales, zeros, bias, residual, out, perm, input_scale, norm)
    if row_norm is not None:  # a launch of its own
        normed, *left = normed_inputs(x, row_norm, perm, input_scale)
        return apply(
            normed, codes, scales, zeros, *left, format=format, shape=shape, bias=bias, residual=residual,
            activation=activation, out_dtype=out_dtype, batch_invariant=batch_invariant, out=out,
        )  # fmt: skip
    if residual is not None:
        residual = _rows(residual, columns)
    rows = _rows(x if perm is input_scale is None else prepare_input(x, perm, input_scale), k)
    rows = rows.detach() if rows.requires_grad else rows
    if dispatch:
        with torch.no_grad():  # there is no way back, so nothing may look as if there were
            result = torch.ops.cute_kernels.weight_only_linear(
                rows, codes, scales, zeros, bias, residual, format.key, n, k, activation, out_dtype, batch_invariant
            )
    else:
        work = _on_cuda if rows.is_cuda or GPU.takes_cpu else _on_cpu
        target = out if out is None or out.dim() == 2 else out.view(-1, columns)
        given = (codes, scales, zeros, bias, residual, format.key, n, k, activation, out_dtype, batch_invariant)
        result = work(rows, *given, target)
        if out is not None:
            return out
    if x.dim() != 2:
        result = result.view(*x.shape[:-1], columns)
    return result if out is None else out.copy_(result)


def normed_inputs(
    x: torch.Tensor, norm: RowNorm, perm: torch.Tensor | None, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(the norm of x, a layer's perm and input scale as far as they are left to do): on a GPU its launch does both."""
    if not is_direct(x, x, norm.weight, perm, input_scale) or not _fit_norm(x, perm, input_scale):
        return norm.of(x), perm, input_scale
    return norm.of(x, order=perm, input_scale=input_scale), None, None


def _fit_norm(x: torch.Tensor, perm: torch.Tensor | None, input_scale: torch.Tensor | None) -> bool:
    """Whether `rms_norm` takes a layer's order and factors as they are."""
    given = [(tensor, dtype) for tensor, dtype in ((perm, torch.int32), (input_scale, x.dtype)) if tensor is not None]
    return all(tensor.dtype == dtype and tensor.data_ptr() % VECTOR_BYTES == 0 for tensor, dtype in given)


def is_direct(x: torch.Tensor, codes: torch.Tensor, bias: object, residual: object, out: object) -> bool:
    """Whether a kernel may be launched without the operator: in eager mode, on plain tensors on a GPU."""
    if is_compiling() or type(x) is not torch.Tensor or type(codes) is not torch.Tensor:
        return False
    if not (x.is_cuda or GPU.takes_cpu):
        return False
    return type(bias) in _PLAIN and type(residual) in _PLAIN and type(out) in _PLAIN


def _rows(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The tensor [..., columns] as a contiguous [rows, columns]; itself if it is one."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, columns)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "weight_only_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? residual, "
    "str format, int n, int k, str? activation, ScalarType out_dtype, "
    "bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.no_grad()
def _on_cpu(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    format,
    n,
    k,
    activation,
    out_dtype,
    batch_invariant=False,
    out=None,
) -> torch.Tensor:
    weight = PackedWeight(codes, scales, zeros, weight_format(format), (n, k), check_values=False)
    options = {"activation": activation, "out_dtype": out_dtype, "batch_invariant": batch_invariant}
    result = linear_reference(x, weight, bias, residual=residual, **options)
    return result if out is None else out.copy_(result)


def _on_cuda(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    format,
    n,
    k,
    activation,
    out_dtype,
    batch_invariant=False,
    out=None,
) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_empty((0, out_features(n, activation)), dtype=out_dtype) if out is None else out
    form = weight_format(format)
    return launch(x, codes, scales, zeros, bias, residual, form, n, k, activation, out_dtype, batch_invariant, out)


def _on_meta(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    format,
    n,
    k,
    activation,
    out_dtype,
    batch_invariant=False,
    out=None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], out_features(n, activation)), dtype=out_dtype)


_library.impl("weight_only_linear", _on_cpu, "CPU")
_library.impl("weight_only_linear", _on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::weight_only_linear", _on_meta, lib=_library)
