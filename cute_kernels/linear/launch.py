"""Launching the CUDA kernels of the family."""

from __future__ import annotations

import torch


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
    out: torch.Tensor | None,
) -> torch.Tensor:
    """activation(x W^T + bias) + residual, [M, N] or [M, N / 2], on the current stream.

    Args:
        x: contiguous [M, K] in the scales' dtype, M >= 1, scaled and in packed order already.
        codes, scales, zeros: as in `cute_kernels.linear.PackedWeight`; n and k its shape.
        bias: [N] in x's dtype. residual: contiguous [M, columns of the result] in out_dtype.
        group_size: 0 for one scale per row.
        out: contiguous, in out_dtype, or None.
    """
    raise NotImplementedError("weight-only linear layers run on CPU tensors only")
