"""What the arguments of a linear layer may look like; errors name the argument, what came and what is wanted."""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_number, check_tensors, share_memory
from cute_kernels.formats.weights.integers import SCALE_DTYPES
from cute_kernels.gemm.reference import ACTIVATIONS, out_features
from cute_kernels.gemm.weight import check_place

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_input(x: torch.Tensor, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises TypeError or ValueError unless x is ``dtype`` [..., k] where the weight is."""
    if dtype not in SCALE_DTYPES:  # of a module whose dtype was changed
        raise TypeError(f"scales: got dtype {dtype}, want torch.bfloat16 or torch.float16")
    check_tensors(x=x)
    if x.dtype != dtype:
        raise TypeError(f"x: got dtype {x.dtype}, want {dtype}, that of the weight's scales")
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: got shape {list(x.shape)}, want [..., {k}]")
    if x.device != device:
        raise ValueError(f"x: got a tensor on {x.device}, want it on {device}, where the weight is")


def check_activation(activation: object, n: int) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, want None, {', '.join(map(repr, ACTIVATIONS))}")
    if activation == "swiglu" and n % 2:
        raise ValueError(f"activation: got 'swiglu' for a weight of {n} rows, want an even number: gate and up in turn")


def check_options(
    x: torch.Tensor,
    n: int,
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    """What the result is in; raises TypeError or ValueError unless a product of x with a weight of ``n`` rows has these
    options."""
    check_activation(activation, n)
    out_dtype = result_dtype(out_dtype, x, out)
    if bias is not None:
        check_bias(bias, x, n)
    if residual is not None:
        check_result("residual", residual, x, n, activation, out_dtype)
    if out is not None:
        check_result("out", out, x, n, activation, out_dtype)
        check_out(out)
    return out_dtype


def check_bias(bias: torch.Tensor, x: torch.Tensor, n: int) -> None:
    check_tensors(bias=bias)
    _check("bias", bias, x.dtype, (n,), x.device)
    if not bias.is_contiguous():
        raise ValueError(f"bias: got strides {bias.stride()}, want a contiguous tensor")


def check_norm(norm: torch.Tensor, eps: object, offset: object, x: torch.Tensor, name: str = "norm") -> None:
    """Raises TypeError or ValueError unless ``norm`` is a norm's weight for rows of x, and its numbers are numbers.

    name: of the argument."""
    check_tensors(**{name: norm})
    if norm.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{name}: got dtype {norm.dtype}, want {x.dtype} or torch.float32")
    _check(name, norm, norm.dtype, (x.shape[-1],), x.device)
    if not norm.is_contiguous():
        raise ValueError(f"{name}: got strides {norm.stride()}, want a contiguous tensor")
    check_place(name, norm)
    check_number("norm_eps", eps, least=0)
    check_number("norm_offset", offset)


def result_dtype(out_dtype: torch.dtype | None, x: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """What the result is in: ``out_dtype``, or else what ``out`` is in, or else what x is in."""
    wanted = ", ".join(map(str, OUT_DTYPES))
    if out_dtype is None and out is not None:
        check_tensors(out=out)
        if out.dtype not in OUT_DTYPES:
            raise TypeError(f"out: got dtype {out.dtype}, want one of {wanted}")
        return out.dtype
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype!r}, want None or one of {wanted}")
    return x.dtype if out_dtype is None else out_dtype


def check_result(
    name: str, tensor: torch.Tensor, x: torch.Tensor, n: int, activation: str | None, out_dtype: torch.dtype
) -> None:
    """Raises TypeError or ValueError unless ``tensor`` (residual or out) has dtype, shape and place of the result."""
    check_tensors(**{name: tensor})
    _check(name, tensor, out_dtype, (*x.shape[:-1], out_features(n, activation)), x.device)


def check_out(out: torch.Tensor) -> None:
    if not out.is_contiguous():
        raise ValueError(f"out: got strides {out.stride()} for shape {list(out.shape)}, want a contiguous tensor")


def check_apart(out: torch.Tensor, x: torch.Tensor) -> None:
    """Raises ValueError if ``out`` shares memory with x: kernels read x while they write results."""
    if share_memory(out, x):
        raise ValueError("out: got the memory of x, want other memory: x is read while out is written")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want it on {device}, where x is")
