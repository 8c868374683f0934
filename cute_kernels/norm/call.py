"""A call of a norm as one object, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import (
    check_apart,
    check_contiguous,
    check_dtype,
    check_number,
    check_permutation,
    check_shape,
    check_together,
    row_stride,
    shape_of,
)
from cute_kernels.norm.config import MAX_COLUMNS, VECTOR, NormKind

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
VECTOR_BYTES = 16
MAX_ROWS = 2**31 - 1  # CTAs of a grid


class NormCall(NamedTuple):
    """The arguments of a call, as :func:`cute_kernels.rms_norm` and :func:`cute_kernels.layer_norm` describe them."""

    kind: NormKind
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    eps: float
    weight_offset: float
    out: torch.Tensor | None
    residual_out: torch.Tensor | None
    order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """All tensors of the call that are given, by name."""
        names = ("x", "weight", "bias", "residual", "order", "input_scale", "out", "residual_out")
        return {name: value for name in names if (value := getattr(self, name)) is not None or name in names[:2]}


def check_call(call: NormCall) -> None:
    """Raises TypeError or ValueError unless the norm can be computed; the message names the argument."""
    check_together(**call.tensors)
    x = call.x
    check_dtype("x", x, *DTYPES)
    n = x.shape[-1] if x.dim() else 0
    if not n or n % VECTOR or n > MAX_COLUMNS:
        raise ValueError(f"x: got shape {shape_of(x)}, want [..., n] with n a multiple of {VECTOR} up to {MAX_COLUMNS}")
    if x.numel() // n > MAX_ROWS:
        raise ValueError(f"x: got {x.numel() // n} rows, want at most {MAX_ROWS}")
    check_number("eps", call.eps, least=0)
    check_number("weight_offset", call.weight_offset)
    _check_weight("weight", call.weight, n, (x.dtype, torch.float32))
    if call.bias is not None:
        _check_weight("bias", call.bias, n, (call.weight.dtype,))
    if call.order is not None:
        _check_weight("order", call.order, n, (torch.int32,))
    if call.input_scale is not None:
        _check_weight("input_scale", call.input_scale, n, (x.dtype,))
    if call.residual is None and call.residual_out is not None:
        raise ValueError("residual_out: got a tensor without a residual, want None")
    for name in ("residual", "out", "residual_out"):
        if (tensor := getattr(call, name)) is not None:
            check_dtype(name, tensor, x.dtype, why=", that of x")
            check_shape(name, tensor, *x.shape, why=", that of x")
            if name != "residual":
                check_contiguous(name, tensor)
    for name in ("x", "residual"):
        _check_rows(name, getattr(call, name))
    _check_places(call)


def check_device_values(call: NormCall) -> None:
    """Raises ValueError unless ``order`` has each index once. Waits for the device."""
    if call.order is not None:
        check_permutation("order", call.order)


def _check_weight(name: str, tensor: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    check_dtype(name, tensor, *dtypes)
    check_shape(name, tensor, n)
    check_contiguous(name, tensor)


def _check_rows(name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None or not tensor.numel():
        return
    stride = row_stride(tensor)
    if stride is None or stride * tensor.element_size() % VECTOR_BYTES or not 0 <= stride < 2**31:
        raise ValueError(
            f"{name}: got strides {tensor.stride()} for shape {shape_of(tensor)}, want columns side by side and rows "
            f"at one distance, a multiple of {VECTOR_BYTES} bytes"
        )


def _check_places(call: NormCall) -> None:
    """Raises ValueError if results overlap with each other or with an input. But a result may replace x or residual: it
    then has exactly the same memory.
    """
    outputs = {name: t for name, t in call.tensors.items() if name in ("out", "residual_out")}
    if len(outputs) == 2:
        check_apart("residual_out", outputs["residual_out"], {"out": outputs["out"]})
    for name, result in outputs.items():
        read = {other: given for other, given in call.tensors.items() if other not in outputs}
        check_apart(name, result, read, in_place=("x", "residual"))
