"""`LinearCall`, a call of a quantised linear layer, with the key of its plan and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from cute_kernels.arguments import Wanted, check_apart, check_flag, check_number, check_wanted
from cute_kernels.formats.weights.integers import SCALE_DTYPES
from cute_kernels.gemm.activations import ActivationFunction, activation_named, out_features
from cute_kernels.gemm.operands.fp8 import check_scale
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.packed import Packed
from cute_kernels.gemm.weight import PackedWeight, WeightTensors
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.plans import ALIGNMENT, TENSOR, key_function

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT = f"{TENSOR}, {{0}}.data_ptr() == x.data_ptr()"  # what keys have of out, which may not lie over x


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
    activations: str | None = None
    activation_scale: torch.Tensor | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        """The sizes (rows of x, N, K)."""
        n, k = self.weight.shape
        return self.x.numel() // k, n, k

    @property
    def result_dtype(self) -> torch.dtype:
        return result_dtype(self.out_dtype, self.x, self.out)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return *self.x.shape[:-1], out_features(self.weight.shape[0], self.activation)


key_of = key_function(LinearCall, x=TENSOR, out=OUT, norm=f"{TENSOR}, eps, offset", eps="", offset="")
"""Returns the key of a call's plan, without checking the call. Raises TypeError or RuntimeError for some arguments that
`check` refuses."""


def check(call: LinearCall) -> LinearCall:
    """Raises TypeError or ValueError, which name the argument, unless a call can be computed."""
    check_activation(call.activation, call.weight.shape[0])
    check_out_dtype(call.out_dtype)
    wanted = _wanted(call)
    if call.norm is not None:
        check_norm_numbers(call.eps, call.offset)
    check_wanted(wanted)
    check_flag("batch_invariant", call.batch_invariant)
    check_activations(call.activations, call.activation_scale, call.weight.format, call.weight.shape[1])
    if call.activation_scale is not None:
        check_scale(call.activation_scale, call.x.device)
    if call.out is not None:
        read = {"x": call.x, "norm": call.norm, "bias": call.bias, "residual": call.residual}
        check_apart("out", call.out, read, in_place=("residual",))
    return call


def _wanted(call: LinearCall) -> Iterator[Wanted]:
    yield rows_wanted(call.x, call.weight, "...")
    if call.norm is not None:
        yield norm_wanted(call.norm, call.x)
    yield from results_wanted(call, call.x)


def rows_wanted(x: object, weight: Packed | WeightTensors, leading: str) -> Wanted:
    """Returns the requirement for x: [leading, K] in the weight's dtype, on its device. leading: how messages name the
    sizes before K.
    """
    dtype = weight.dtype
    if dtype not in SCALE_DTYPES:  # of a module whose dtype was changed
        raise TypeError(f"scales: got dtype {dtype}, want torch.bfloat16 or torch.float16")
    sizes, why = (leading, weight.shape[1]), ", that of the weight's scales"
    return Wanted("x", x, (dtype,), sizes, weight.device, "the weight", why)


def norm_wanted(norm: object, x: torch.Tensor, name: str = "norm") -> Wanted:
    """Returns the requirement for a norm's weight, for rows of x. name: the argument's name in messages."""
    has_address = not is_compiling() and type(norm) in (torch.Tensor, torch.nn.Parameter)
    unit = ALIGNMENT if has_address and (x.is_cuda or GPU.takes_cpu) else 1
    return Wanted(name, norm, (x.dtype, torch.float32), (x.shape[-1],), x.device, contiguous=True, unit=unit)


def results_wanted(call: LinearCall, x: torch.Tensor) -> Iterator[Wanted]:
    """Yields the requirements for a call's bias, residual and ``out``. The call's x has been checked."""
    n = call.weight.shape[0]
    sizes = (*x.shape[:-1], out_features(n, call.activation))
    if call.out is not None:
        yield out_wanted(call.out, call.out_dtype, sizes, x.device)
    if call.bias is not None:
        yield Wanted("bias", call.bias, (x.dtype,), (n,), x.device, contiguous=True)
    if call.residual is not None:
        yield Wanted("residual", call.residual, (result_dtype(call.out_dtype, x, call.out),), sizes, x.device)


def out_wanted(out: object, out_dtype: torch.dtype | None, sizes: tuple[int, ...], device: torch.device) -> Wanted:
    """Returns the requirement for ``out``, the caller's tensor for the result."""
    dtypes = OUT_DTYPES if out_dtype is None else (out_dtype,)
    return Wanted("out", out, dtypes, sizes, device, contiguous=True)


def check_activation(activation: object, n: int) -> None:
    """Raises ValueError unless the activation fits a weight of ``n`` rows and the activation's own numbers are
    valid."""
    found = activation_named(activation)
    if found is None:
        return
    odd = found.gated and n % 2
    if wanted := found.wanted_numbers() or ("an even number: gate and up in turn" if odd else ""):
        raise ValueError(f"activation: got {found.name!r} for a weight of {n} rows, want {wanted}")


def check_norm_numbers(eps: object, offset: object) -> None:
    """Raises TypeError or ValueError unless eps is a number of at least 0 and offset is a number."""
    check_number("norm_eps", eps, least=0)
    check_number("norm_offset", offset)


def check_out_dtype(out_dtype: object) -> None:
    """Raises TypeError unless ``out_dtype`` is None or a dtype that results can have."""
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype!r}, want None or one of {', '.join(map(str, OUT_DTYPES))}")


def result_dtype(out_dtype: torch.dtype | None, x: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """Returns the dtype of a result. It is ``out_dtype`` if given, else the dtype of ``out`` if given, else the dtype
    of x."""
    return (x if out is None else out).dtype if out_dtype is None else out_dtype
