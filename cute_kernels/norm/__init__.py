"""RMSNorm and LayerNorm of rows. The sum with a residual may be computed in the same launch.

Read on in `call` (a call and its checks), `reference` (the definition), `config`, `kernel`, `compile`, `ops`.
"""

from __future__ import annotations

from typing import overload

import torch

from cute_kernels.norm import ops
from cute_kernels.norm.call import NormCall

__all__ = ["layer_norm", "rms_norm"]


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    out: torch.Tensor | None = ...,
    residual_out: None = ...,
    order: torch.Tensor | None = ...,
    input_scale: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    out: torch.Tensor | None = ...,
    residual_out: torch.Tensor | None = ...,
    order: torch.Tensor | None = ...,
    input_scale: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the RMSNorm of each row (Zhang and Sennrich 2019), optionally of its sum with a residual, in one launch.

    s = x + residual, rounded to x's dtype as a separate addition would; y = s * (mean(s^2) + eps)^-0.5 * (weight +
    weight_offset), computed in fp32 and rounded once.

    Args:
        x: bf16 or fp16 [..., n]; n a multiple of 8 up to 16384. The distance between rows may be any multiple of 16
            bytes, as in a slice of a wider tensor.
        weight: [n], in x's dtype or fp32.
        residual: as x, or None.
        eps: the number that is added to the mean square; at least 0.
        weight_offset: the number that is added to the weight; 1 for Gemma, whose checkpoints hold weight - 1.
        out: the tensor for y: contiguous, with x's shape and dtype. It may be x itself.
        residual_out: the tensor for s, with a residual: contiguous, with x's shape and dtype. It may be ``residual`` or
            x.
        order: int32 [n], a permutation of 0 to n - 1: y[..., i] is y[..., order[i]] of a call without ``order``. If the
            next layer is in act-order, pass its `PackedWeight.perm`; the layer then need not reorder y. The values are
            checked for CPU tensors; for GPU tensors only with CUTE_KERNELS_DEBUG=1 in the environment at import.
            Unchecked wrong values make a GPU read outside the row.
        input_scale: [n] in x's dtype: the rounded y is multiplied by it and rounded again. Pass the next layer's
            `PackedWeight.input_scale`; the layer then need not multiply. If the norm applies the layer's perm and its
            input_scale, as far as the layer has them, call the layer with ``replace(weight, perm=None,
            input_scale=None)``.

    The kernel reads weight, order and input_scale while the previous kernel may still run. So a kernel of this library
    that is launched right before must not write them.

    Returns:
        y [..., n] in x's dtype; with a residual (y, s). Equal inputs give bitwise equal outputs, and the result of a
        row does not depend on other rows.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    return ops.norm(
        NormCall("rms", x, weight, None, residual, eps, weight_offset, out, residual_out, order, input_scale)
    )


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    out: torch.Tensor | None = ...,
    residual_out: None = ...,
    order: torch.Tensor | None = ...,
    input_scale: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    residual: torch.Tensor,
    eps: float = ...,
    out: torch.Tensor | None = ...,
    residual_out: torch.Tensor | None = ...,
    order: torch.Tensor | None = ...,
    input_scale: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the LayerNorm of each row (Ba et al. 2016), optionally of its sum with a residual, in one launch.

    s = x + residual, rounded to x's dtype; y = (s - mean(s)) * (var(s) + eps)^-0.5 * weight + bias, computed in fp32
    and rounded once. The variance is computed from differences from the mean, so large means cost no accuracy.

    Args:
        x, residual, eps, out, residual_out, order, input_scale: as for :func:`rms_norm`.
        weight: [n], in x's dtype or fp32.
        bias: [n], in weight's dtype, or None.

    Returns:
        y [..., n] in x's dtype; with a residual (y, s).

    Raises: as :func:`rms_norm`.
    """
    return ops.norm(NormCall("layer", x, weight, bias, residual, eps, 0.0, out, residual_out, order, input_scale))
