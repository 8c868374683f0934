"""The reference of a quantised linear layer, in fp32 PyTorch. It also computes calls with CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels.gemm.activations import ActivationFunction, activation_named
from cute_kernels.gemm.weight import TILE_N, PackedWeight, row_blocks


def prepare_input(x: torch.Tensor, perm: torch.Tensor | None, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns x [..., K] times input_scale, rounded to x's dtype, in the packed order."""
    if input_scale is not None:
        x = x * input_scale
    return x if perm is None else x.index_select(-1, perm)


def linear_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | ActivationFunction | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Computes activation((x * input_scale) W^T + bias) + residual.

    W is rounded once to x's dtype, as the tensor cores read it. Products, sums, bias, activation and residual are in
    ``compute_dtype``. The result is rounded once to ``out_dtype`` (default x's).

    Args:
        x: [..., K]; weight: [N, K]; bias: [N]; residual: [..., N], or [..., N / 2] of a gated activation.
        batch_invariant: whether each row is computed by itself. Otherwise torch's order of sums depends on the number
            of rows, and an activation's last bits on a row's place in memory.
    """
    computed = _row_by_row if batch_invariant else _at_once
    inputs = prepare_input(x, None, weight.input_scale).to(compute_dtype)
    y = torch.empty(*x.shape[:-1], weight.out_features, dtype=compute_dtype, device=x.device)
    for first, last in row_blocks(weight.codes.shape[0], weight.in_features, weight.device):
        w = weight.dequantize_tiles(first, last).to(x.dtype).to(compute_dtype)
        with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):  # which would round what goes in and out
            y[..., first * TILE_N : first * TILE_N + w.shape[0]] = computed(lambda rows, w=w: rows @ w.T, inputs)
    if bias is not None:
        y += bias
    function = activation_named(activation)
    if function is not None:
        y = computed(function.of_rows, y)
    if residual is not None:
        y = y + residual
    return y.to(out_dtype or x.dtype)


def _at_once(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x)


def _row_by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies a function to each row of x [..., n]. Each row is copied first, since the last bits of results depend on
    alignment."""
    rows = [function(row.clone()) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.cat(rows).view(*x.shape[:-1], -1) if rows else function(x)
