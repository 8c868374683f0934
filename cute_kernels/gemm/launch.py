"""Launching the CUDA kernels of the family."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import functional

from cute_kernels.arguments import row_stride
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.inputs.launch import InputRows, input_rows
from cute_kernels.gemm.plan import ACTIVATIONS, OUT_KINDS, LinearPlan, factored_plan_of, plan_of
from cute_kernels.gemm.reference import out_features
from cute_kernels.gemm.weight import check_presence
from cute_kernels.gemm.wgmma.mainloops import NORMED, ORDERED, SCALED
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from cute_kernels.norm import rms_norm
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import Blank, blank

VECTOR_BYTES = 16  # what bulk copies of activations are aligned to


@dataclass(frozen=True)
class KeptLaunch:
    """What of a checked call is kept for the next one that differs from it in the contents and places of memory alone.

    Attributes:
        matrix: [M, K], the shape that the kernel takes x in; None where x has it.
        inputs: what makes [M, K] of an x that the kernel cannot take as it is; None where it can.
        new_out: what the result is made of where the caller gives no tensor for it.
        send: the launch: takes x, addresses and the workspace by name.
        takes_factors: whether the product's own kernel applies the input scale or the norm.
        takes_order: whether it puts x in order.
    """

    plan: LinearPlan
    matrix: tuple[int, int] | None
    inputs: InputRows | None
    new_out: Blank
    send: Callable[..., Any]
    takes_factors: bool = False
    takes_order: bool = False

    def run(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        perm: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launches on the current stream of the plan's device; ``out`` or a new result, in the call's own shape.

        One flat function, as each layer of each decoding step of a model waits for it.
        """
        plan = self.plan
        index = plan.device_index
        if index != GPU.current():
            with GPU.guard(index):
                return self.run(x, codes, scales, zeros, bias, residual, out, perm, input_scale, norm)
        if self.inputs is not None:
            x = self.inputs.make(x, perm, input_scale)
        if x.requires_grad:
            x = x.detach()
        if out is None:
            out = GPU.empty(*self.new_out)
        x = x if self.matrix is None else x.view(self.matrix)
        zero_points = 0 if zeros is None else zeros.data_ptr()
        added = 0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr()
        workspace = plan.workspace() if plan.num_words else 0
        factors = (input_scale if norm is None else norm) if self.takes_factors else None
        if self.takes_order:
            factors = perm
        if factors is None:
            self.send(
                x=x, codes=codes.data_ptr(), scales=scales.data_ptr(), zeros=zero_points, bias=added[0],
                residual=added[1], out=out.data_ptr(), workspace=workspace,
            )  # fmt: skip
        else:
            self.send(
                x=x, codes=codes.data_ptr(), scales=scales.data_ptr(), zeros=zero_points, bias=added[0],
                residual=added[1], out=out.data_ptr(), workspace=workspace, factors=factors.data_ptr(),
            )  # fmt: skip
        return out


@dataclass(frozen=True)
class RowNorm:
    """An RMSNorm of x's rows before a product. weight: [k]; eps, offset: as of `cute_kernels.rms_norm`."""

    weight: torch.Tensor
    eps: float
    offset: float

    def of(
        self, x: torch.Tensor, order: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm of x's rows by a launch of its own, which copies them first where they lie as it takes none.

        order, input_scale: as of `cute_kernels.rms_norm`.
        """
        x = x.detach()
        if not _is_normable(x):
            x = x.clone(memory_format=torch.contiguous_format)
        with torch.no_grad():  # a weight may be a parameter
            return rms_norm(
                x, self.weight, eps=self.eps, weight_offset=self.offset, order=order, input_scale=input_scale
            )


def _is_normable(x: torch.Tensor) -> bool:
    """Whether the kernel of a norm takes rows as they lie: at one distance, each on 16 bytes."""
    if not x.numel():
        return True
    stride = row_stride(x)
    if stride is None or not 0 <= stride < 2**31 or stride * x.element_size() % VECTOR_BYTES:
        return False
    has_no_address = is_compiling() or type(x) is not torch.Tensor or x.is_meta
    return has_no_address or x.data_ptr() % VECTOR_BYTES == 0


def keep_launch(
    x: torch.Tensor,
    form: WeightFormat,
    shape: tuple[int, int],
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    perm: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    norm: RowNorm | None = None,
) -> KeptLaunch | None:
    """What to keep of a checked call; None for one that has no rows, or whose x torch must copy, or norm, first.

    x: [..., K] on a CUDA device; other arguments as of `cute_kernels.gemm.ops.apply`.
    """
    (n, k), m = shape, x.numel() // shape[1]
    if m == 0:
        return None
    factored = _factored_launch(x, m, form, shape, activation, out_dtype, batch_invariant, perm, input_scale, norm)
    if factored is not None or norm is not None:
        return factored
    plan = plan_of(m, n, k, form, x.dtype, x.get_device(), batch_invariant)
    as_it_is = perm is input_scale is None and _is_aligned(x) and (x.is_contiguous() or _takes_apart(plan, x))
    inputs = None if as_it_is else input_rows(x, perm, input_scale)
    if inputs is None and not as_it_is:
        return None
    return KeptLaunch(
        plan=plan,
        matrix=None if x.dim() == 2 or inputs is not None else (m, k),
        inputs=inputs,
        new_out=blank((*x.shape[:-1], out_features(n, activation)), out_dtype),
        send=plan.bound(n, ACTIVATIONS[activation], OUT_KINDS[out_dtype]),
    )


def _factored_launch(
    x: torch.Tensor,
    m: int,
    form: WeightFormat,
    shape: tuple[int, int],
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    perm: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    norm: RowNorm | None,
) -> KeptLaunch | None:
    """One launch with an input scale, a norm or another order; None where the product's kernel takes none, or there is
    more than one of them."""
    norm_weight = None if norm is None else norm.weight
    given = {SCALED: input_scale, NORMED: norm_weight, ORDERED: perm}
    found = [(kind, tensor) for kind, tensor in given.items() if tensor is not None]
    if len(found) != 1:
        return None
    ((kind, factors),), (n, k) = found, shape
    if factors.dtype != (torch.int32 if kind == ORDERED else x.dtype):
        return None
    if not (_is_aligned(x) and x.is_contiguous() and factors.data_ptr() % VECTOR_BYTES == 0):
        return None
    plan = factored_plan_of(m, n, k, form, x.dtype, x.get_device(), batch_invariant, kind)
    if plan is None:
        return None
    eps, offset = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
    return KeptLaunch(
        plan=plan,
        matrix=None if x.dim() == 2 else (m, k),
        inputs=None,
        new_out=blank((*x.shape[:-1], out_features(n, activation)), out_dtype),
        send=plan.bound(n, ACTIVATIONS[activation], OUT_KINDS[out_dtype], eps=_bits(eps), offset=_bits(offset)),
        takes_factors=kind != ORDERED,
        takes_order=kind == ORDERED,
    )


def _bits(value: float) -> int:
    """Those of an fp32, as an int32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    form: WeightFormat,
    n: int,
    k: int,
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """activation(x W^T + bias) + residual, [M, N] or [M, N / 2], on the current stream.

    Args:
        x: contiguous [M, K] in a dtype of the format, M >= 1, scaled and in packed order already.
        codes, scales, zeros: as in `cute_kernels.gemm.PackedWeight`; n and k its shape.
        bias: [N] in x's dtype. residual: contiguous [M, columns of the result] in out_dtype.
        form: of the weight, with zeros just where it has some.
        batch_invariant: whether no row may depend on how many others there are.
        out: contiguous, in out_dtype, or None.
    """
    index = x.get_device()
    if index != GPU.current():
        with GPU.guard(index):
            options = activation, out_dtype, batch_invariant, out
            return launch(x, codes, scales, zeros, bias, residual, form, n, k, *options)
    if out is None:
        out = torch.empty((x.shape[0], out_features(n, activation)), dtype=out_dtype, device=x.device)
    x = _aligned(x)
    check_presence(zeros, form)
    plan = plan_of(x.shape[0], n, k, form, x.dtype, index, batch_invariant)
    addresses = (
        codes.data_ptr(),
        scales.data_ptr(),
        _address(zeros),
        _address(bias),
        _address(residual),
        out.data_ptr(),
    )
    plan.run(x, addresses, n, ACTIVATIONS[activation], OUT_KINDS[out_dtype])
    return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether rows [..., K], one behind the other, are whole 16-byte pieces that start on 16 bytes."""
    return not (x.shape[-1] * x.element_size() % VECTOR_BYTES or x.data_ptr() % VECTOR_BYTES)


def _takes_apart(plan: LinearPlan, x: torch.Tensor) -> bool:
    """Whether the plan's kernel takes rows that lie apart: at one distance, whole 16-byte pieces, none in another."""
    stride = row_stride(x)
    if stride is None or stride < x.shape[-1] or stride * x.element_size() % VECTOR_BYTES:
        return False
    return isinstance(plan.schedule, TileSchedule) and plan.schedule.config.mainloop.rows_apart


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with rows of whole 16-byte pieces that start on 16 bytes: a copy if it is not so."""
    missing = -x.shape[1] % (VECTOR_BYTES // x.element_size())
    if missing:
        return functional.pad(x, (0, missing))
    return x.clone() if x.data_ptr() % VECTOR_BYTES else x
