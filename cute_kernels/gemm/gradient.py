"""Gradients of quantised layers with respect to their inputs. Training needs them for adapters on such layers, and for
the layers before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm.weight import PackedWeight


@torch.library.custom_op("cute_kernels::dense_weight", mutates_args=())
def dense_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    form: str,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes `PackedWeight.dequantize`, W [N, K], as an operator that torch.compile traces."""
    n, k = shape
    weight = PackedWeight(
        codes, scales, zeros=zeros, perm=perm, format=weight_format(form), shape=(n, k), check_values=False
    )
    return weight.dequantize(dtype)


@dense_weight.register_fake
def _(codes: torch.Tensor, *others: object) -> torch.Tensor:
    *_, shape, dtype = others
    return codes.new_empty(cast("tuple[int, int]", shape), dtype=cast(torch.dtype, dtype))


def differentiable(
    forward: Callable[..., torch.Tensor],
    gradients: Callable[[torch.Tensor], Sequence[torch.Tensor | None]],
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """Computes forward(*tensors) without grad mode, and gives the result a backward pass. gradients: a function that
    takes the result's gradient, and returns a gradient for each tensor.
    """
    return cast(torch.Tensor, _Function.apply(forward, gradients, *tensors))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, gradients, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return forward(*tensors)

    @staticmethod
    def backward(ctx, *given: torch.Tensor) -> Any:
        return None, None, *ctx.gradients(*given)
