"""Makes the plan of a linear layer's call. A plan prepares x, launches the product, and returns its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from cute_kernels.arguments import row_stride
from cute_kernels.gemm.activations import name_of, out_features
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.inputs.launch import input_rows
from cute_kernels.gemm.normed import RowNorm
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import Product, problem_of, product_of
from cute_kernels.gemm.reference import prepare_input
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan
from cute_kernels.runtime.plans import ALIGNMENT

TensorOf = Callable[[LinearCall], torch.Tensor]


def make_plan(call: LinearCall) -> Plan[[LinearCall], torch.Tensor] | None:
    """Returns the plan of a checked call; None for a call without rows."""
    x, residual, (m, n, k) = call.x, call.residual, call.size
    if m == 0:
        return None
    index = x.get_device()
    problem = problem_of(m, n, k, call.weight.format, x.dtype, index, call.batch_invariant, call.activation)
    product, prepare = inputs_of(call, problem, index)
    send = product.bound(n, call.activation, call.result_dtype)
    new_out = blank(call.result_shape, call.result_dtype)
    matrix = None if x.dim() == 2 or prepare is not None else (m, k)
    copies_residual = residual is not None and not residual.is_contiguous()

    def launch(call: LinearCall) -> torch.Tensor:
        """Launches the product. It makes few nested calls, since its time is spent in each layer of each decoding
        step.
        """
        x, weight, bias, residual, _, _, _, out, _, _, _, _, _ = call
        if prepare is not None:
            x = prepare(call)
        if x.requires_grad:
            x = x.detach()
        if matrix is not None:
            x = x.view(matrix)
        if out is None:
            out = GPU.empty(*new_out)
        if copies_residual and residual is not None:
            residual = residual.contiguous()
        codes, scales, zeros = weight.codes, weight.scales, weight.zeros
        send(x=x, codes=codes, scales=scales, zeros=zeros, bias=bias, residual=residual, out=out)
        return out

    return Plan(index, launch, (product,))


def without_rows(call: LinearCall) -> torch.Tensor:
    """Returns the result of a checked call without rows: ``out``, or a new empty tensor."""
    if call.out is not None:
        return call.out
    return call.x.new_empty(call.result_shape, dtype=call.result_dtype)


@torch.no_grad()
def of_rows(call: LinearCall, work: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Computes a checked call by the function ``work``, which takes prepared rows [m, k] and the weight's fields."""
    x, weight, residual = call.x, call.weight, call.residual
    n, k = weight.shape
    rows = x if call.norm is None else RowNorm(call.norm, call.eps, call.offset).of(x)
    if not (weight.perm is weight.input_scale is None):
        rows = prepare_input(rows, weight.perm, weight.input_scale)
    rows = _rows(rows, k)
    rows = rows.detach() if rows.requires_grad else rows
    columns = out_features(n, call.activation)
    result = work(
        rows, weight.codes, weight.scales, weight.zeros, call.bias,
        None if residual is None else _rows(residual, columns), weight.format.key, n, k, name_of(call.activation),
        call.result_dtype, call.batch_invariant,
    )  # fmt: skip
    if x.dim() != 2:
        result = result.view(*x.shape[:-1], columns)
    return result if call.out is None else call.out.copy_(result)


def _rows(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Returns a tensor [..., columns] as a contiguous [rows, columns]. It is not copied if it is contiguous."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, columns)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def inputs_of(call: LinearCall, problem: LinearProblem, index: int) -> tuple[Product, TensorOf | None]:
    """Returns (product of a checked call, function that makes the rows [m, k] that the product reads). The function
    uses one launch or torch's operators. It is None if the product reads x itself."""
    x, perm, input_scale = call.x, call.weight.perm, call.weight.input_scale
    product = product_of(problem, index)
    if call.norm is not None:
        return product, _normed_of(call)
    stride = row_stride(x)
    if perm is input_scale is None and is_aligned(x) and (x.is_contiguous() or _takes_apart(product, x, stride)):
        return product, None
    rows = input_rows(x, stride, perm, input_scale)
    if rows is not None:
        return product, lambda call: rows.make(call.x, call.weight.perm, call.weight.input_scale)
    return product, lambda call: ready(call.x.detach(), call.weight.perm, call.weight.input_scale)


def _normed_of(call: LinearCall) -> TensorOf:
    """Returns a function that makes the call's normed rows as the product takes them, with perm and input_scale
    applied."""
    given = [tensor for tensor in (call.weight.perm, call.weight.input_scale) if tensor is not None]
    fits = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in given)

    def make(call: LinearCall) -> torch.Tensor:
        assert call.norm is not None
        norm, perm, input_scale = RowNorm(call.norm, call.eps, call.offset), call.weight.perm, call.weight.input_scale
        if not fits:
            return ready(norm.of(call.x), perm, input_scale)
        rows = norm.of(call.x, order=perm, input_scale=input_scale)
        return rows.view(-1, rows.shape[-1])

    return make


def ready(x: torch.Tensor, perm: torch.Tensor | None, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns x [..., k] times input_scale and permuted by perm, as contiguous rows [m, k]. Each row is padded to whole
    16-byte pieces, and the rows start on 16 bytes."""
    return aligned(prepare_input(x, perm, input_scale).reshape(-1, x.shape[-1]).contiguous())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns x [m, k] itself if its rows are whole 16-byte pieces that start on 16 bytes. Otherwise returns an aligned
    copy, padded with zeros to whole pieces."""
    missing = -x.shape[1] % (ALIGNMENT // x.element_size())
    if missing:
        return functional.pad(x, (0, missing))
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows [..., k] are whole 16-byte pieces and x starts on 16 bytes. Strides are not checked."""
    return not (x.shape[-1] * x.element_size() % ALIGNMENT or x.data_ptr() % ALIGNMENT)


def _takes_apart(product: Product, x: torch.Tensor, stride: int | None) -> bool:
    """Whether the product's kernel can read rows of x with gaps between them. Rows must not overlap, and ``stride``,
    the distance between rows, must be whole 16-byte pieces."""
    if stride is None or stride < x.shape[-1] or stride * x.element_size() % ALIGNMENT:
        return False
    return isinstance(product.schedule, TileSchedule) and product.schedule.config.mainloop.rows_apart
