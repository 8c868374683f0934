"""Launching the CUDA kernels of the family."""

from __future__ import annotations

import torch
from torch.nn import functional

from cute_kernels.linear.plan import ACTIVATIONS, OUT_KINDS, plan_of
from layouts.weights.hopper import tile_k

VECTOR_BYTES = 16  # what bulk copies of activations are aligned to


def launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    bits: int,
    group_size: int,
    n: int,
    k: int,
    activation: str | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    out: torch.Tensor | None,
    portable: bool = False,
) -> torch.Tensor:
    """activation(x W^T + bias) + residual, [M, N] or [M, N / 2], on the current stream.

    Args:
        x: contiguous [M, K] in the scales' dtype, M >= 1, scaled and in packed order already.
        codes, scales, zeros: as in `cute_kernels.linear.PackedWeight`; n and k its shape.
        bias: [N] in x's dtype. residual: contiguous [M, columns of the result] in out_dtype.
        group_size: 0 for one scale per row.
        batch_invariant: whether no row may depend on how many others there are.
        out: contiguous, in out_dtype, or None.
        portable: whether to take the kernel for other GPUs on a Hopper too.
    """
    index = x.get_device()
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return launch(
                x, codes, scales, zeros, bias, residual, bits, group_size, n, k, activation, out_dtype,
                batch_invariant, out, portable,
            )  # fmt: skip
    columns = n // 2 if activation == "swiglu" else n
    if out is None:
        out = torch.empty((x.shape[0], columns), dtype=out_dtype, device=x.device)
    x = _aligned(x)
    k_pad = codes.shape[1] * tile_k(bits)
    plan = plan_of(
        x.shape[0], n, k, k_pad, bits, x.dtype, group_size, zeros is not None, index, batch_invariant, portable
    )
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


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with rows of whole 16-byte pieces that start on 16 bytes: a copy if it is not so."""
    missing = -x.shape[1] % (VECTOR_BYTES // x.element_size())
    if missing:
        return functional.pad(x, (0, missing))
    return x.clone() if x.data_ptr() % VECTOR_BYTES else x
