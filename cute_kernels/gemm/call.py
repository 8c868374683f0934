"""A call of a weight-only linear layer as one object: what decides its plan, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import (
    check_apart,
    check_contiguous,
    check_dtype,
    check_flag,
    check_number,
    check_shape,
    check_tensor,
    check_tensors,
)
from cute_kernels.formats.weights.integers import SCALE_DTYPES
from cute_kernels.gemm.activations import ActivationFunction, activation_named, out_features
from cute_kernels.gemm.weight import PackedWeight, WeightTensors, check_place, check_start
from cute_kernels.runtime.plans import ALIGNMENT, identity

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LinearCall(NamedTuple):
    """The arguments of `cute_kernels.quantized_linear`."""

    x: Any  # a tensor, or `NormedRows`
    weight: PackedWeight | WeightTensors
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str | ActivationFunction | None = None
    out_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0

    @property
    def size(self) -> tuple[int, int, int]:
        """(rows of x, N, K)."""
        n, k = self.weight.shape
        return self.x.numel() // k, n, k

    @property
    def result_shape(self) -> tuple[int, ...]:
        return *self.x.shape[:-1], out_features(self.weight.shape[0], self.activation)


def key_of(call: LinearCall) -> tuple[Any, ...]:
    """Returns what identifies a plan. Raises TypeError or RuntimeError for arguments that the checks refuse."""
    x, weight, bias, residual, activation, out_dtype, batch_invariant, out, norm, eps, offset = call
    if batch_invariant.__class__ is not bool:  # a 1 would be found as True
        raise TypeError("batch_invariant")
    return (
        x.shape,
        x.dtype,
        x.get_device(),
        x.is_contiguous() or x.stride(),
        x.data_ptr() % ALIGNMENT,
        weight.form,
        activation,
        out_dtype,
        batch_invariant,
        None if bias is None else identity(bias),
        None if residual is None else identity(residual),
        None if out is None else (*identity(out), out.data_ptr() == x.data_ptr()),
        None if norm is None else (*identity(norm), eps, offset),
    )


def check(call: LinearCall, *, addresses: bool = True) -> LinearCall:
    """Raises TypeError or ValueError, which name the argument, unless a call can be computed.

    addresses: whether tensors have addresses to check.
    """
    x, weight = call.x, call.weight
    n, k = weight.shape
    check_input(x, k, weight.dtype, weight.device)
    if call.norm is not None:
        check_norm(call.norm, call.eps, call.offset, x)
    check_flag("batch_invariant", call.batch_invariant)
    check_options(
        x, n, bias=call.bias, residual=call.residual, activation=call.activation, out_dtype=call.out_dtype, out=call.out
    )
    if call.out is not None and addresses:
        check_out_apart(call, x=x, norm=call.norm)
    return call


def check_input(x: torch.Tensor, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises TypeError or ValueError unless x is ``dtype`` [..., k] where the weight is."""
    if dtype not in SCALE_DTYPES:  # of a module whose dtype was changed
        raise TypeError(f"scales: got dtype {dtype}, want torch.bfloat16 or torch.float16")
    check_tensors(x=x)
    check_dtype("x", x, dtype, why=", that of the weight's scales")
    check_shape("x", x, "...", k)
    check_place("x", x, device, "the weight")


def check_activation(activation: object, n: int) -> None:
    """Raises ValueError unless a weight of ``n`` rows can have the activation, and that its numbers."""
    found = activation_named(activation)
    if found is None:
        return
    odd = found.gated and n % 2
    if wanted := found.wanted_numbers() or ("an even number: gate and up in turn" if odd else ""):
        raise ValueError(f"activation: got {found.name!r} for a weight of {n} rows, want {wanted}")


def check_options(
    x: torch.Tensor,
    n: int,
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: object,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    """The dtype of the result. Raises TypeError or ValueError unless a product of x with a weight of ``n`` rows can
    have these options."""
    check_activation(activation, n)
    out_dtype = result_dtype(out_dtype, x, out)
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,), x.device, contiguous=True)
    if residual is not None:
        check_result("residual", residual, x, n, activation, out_dtype)
    if out is not None:
        check_result("out", out, x, n, activation, out_dtype)
        check_contiguous("out", out)
    return out_dtype


def check_norm(norm: torch.Tensor, eps: object, offset: object, x: torch.Tensor, name: str = "norm") -> None:
    """Raises TypeError or ValueError unless ``norm`` is a norm's weight for rows of x, and its numbers are numbers.

    name: of the argument."""
    check_tensor(name, norm, (x.dtype, torch.float32), (x.shape[-1],), x.device, contiguous=True)
    check_start(name, norm)
    check_number("norm_eps", eps, least=0)
    check_number("norm_offset", offset)


def result_dtype(out_dtype: torch.dtype | None, x: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """The dtype of the result: ``out_dtype``, or else that of ``out``, or else that of x."""
    if out_dtype is None and out is not None:
        check_tensors(out=out)
        check_dtype("out", out, *OUT_DTYPES)
        return out.dtype
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype!r}, want None or one of {', '.join(map(str, OUT_DTYPES))}")
    return x.dtype if out_dtype is None else out_dtype


def check_result(
    name: str, tensor: torch.Tensor, x: torch.Tensor, n: int, activation: object, out_dtype: torch.dtype
) -> None:
    """Raises TypeError or ValueError unless ``tensor`` (residual or out) has dtype, shape and device of the result."""
    check_tensor(name, tensor, (out_dtype,), (*x.shape[:-1], out_features(n, activation)), x.device)


def check_out_apart(call: LinearCall, **read: torch.Tensor | None) -> None:
    """Raises ValueError if ``out`` shares memory with what kernels read meanwhile; it may be the residual itself."""
    assert call.out is not None
    read |= {"bias": call.bias, "residual": call.residual}
    check_apart("out", call.out, read, in_place=("residual",))
