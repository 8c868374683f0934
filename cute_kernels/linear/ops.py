"""Calling a weight-only linear layer, and its registered operator."""

from __future__ import annotations

import torch

from cute_kernels.arguments import needs_dispatch
from cute_kernels.linear import checks
from cute_kernels.linear.launch import launch
from cute_kernels.linear.reference import linear_reference, out_features, prepare_input
from cute_kernels.linear.weight import PackedWeight


def apply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    bits: int,
    group_size: int | None,
    shape: tuple[int, int],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cute_kernels.linear.linear` on the fields of a `PackedWeight`, which are taken to be those of one."""
    dispatch = needs_dispatch(x=x, codes=codes)
    n, k = shape
    checks.check_input(x, k, scales.dtype, codes.device)
    checks.check_activation(activation, n)
    if out_dtype is None:
        out_dtype = x.dtype if out is None else out.dtype
    checks.check_out_dtype(out_dtype)
    checks.check_flag("batch_invariant", batch_invariant)
    if bias is not None:
        checks.check_bias(bias, x, n)
    columns = out_features(n, activation)
    if residual is not None:
        checks.check_result("residual", residual, x, n, activation, out_dtype)
        residual = _rows(residual, columns)
    if out is not None:
        checks.check_result("out", out, x, n, activation, out_dtype)
        checks.check_out(out)
    if torch.is_grad_enabled():  # there is no way back, so nothing may look as if there were
        x = x.detach() if x.requires_grad else x
        bias, residual = (t.detach() if t is not None and t.requires_grad else t for t in (bias, residual))
    rows = _rows(x if perm is input_scale is None else prepare_input(x, perm, input_scale), k)
    size = group_size or 0
    if dispatch:
        result = torch.ops.cute_kernels.weight_only_linear(
            rows, codes, scales, zeros, bias, residual, bits, size, n, k, activation, out_dtype, batch_invariant
        )
    else:
        work = _on_cuda if rows.is_cuda else _on_cpu
        target = out if out is None or out.dim() == 2 else out.view(-1, columns)
        given = (codes, scales, zeros, bias, residual, bits, size, n, k, activation, out_dtype, batch_invariant)
        result = work(rows, *given, target)
        if out is not None:
            return out
    if x.dim() != 2:
        result = result.view(*x.shape[:-1], columns)
    return result if out is None else out.copy_(result)


def _rows(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The tensor [..., columns] as a contiguous [rows, columns]; itself if it is one."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, columns)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "weight_only_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? residual, "
    "int bits, int group_size, int n, int k, str? activation, ScalarType out_dtype, "
    "bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _on_cpu(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    bits,
    group_size,
    n,
    k,
    activation,
    out_dtype,
    batch_invariant=False,
    out=None,
) -> torch.Tensor:
    weight = PackedWeight(codes, scales, zeros, bits=bits, group_size=group_size or None, shape=(n, k))
    result = linear_reference(x, weight, bias, residual=residual, activation=activation, out_dtype=out_dtype)
    return result if out is None else out.copy_(result)


def _on_cuda(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    bits,
    group_size,
    n,
    k,
    activation,
    out_dtype,
    batch_invariant=False,
    out=None,
) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_empty((0, out_features(n, activation)), dtype=out_dtype) if out is None else out
    return launch(
        x, codes, scales, zeros, bias, residual, bits, group_size, n, k, activation, out_dtype, batch_invariant, out
    )  # fmt: skip


def _on_meta(
    x,
    codes,
    scales,
    zeros,
    bias,
    residual,
    bits,
    group_size,
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
