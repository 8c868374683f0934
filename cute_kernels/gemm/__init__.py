"""Quantised linear layers: 4- and 8-bit weights, activations in bf16, fp16 or FP8.

Read on in `weight` (the stored tensors), `quantize` (how they are made) and `reference` (what a layer computes). A call
goes through `call` (checks), `ops` (the operator), `plan` and `product` (the launch). `module` has the layer as an
nn.Module. `choice` chooses between the kernels: `stream` for few rows, `wgmma` for tiles and limbs. `layer` computes
several products in one launch. `cute_kernels.integrations.checkpoints` imports checkpoints of other projects.
"""

from __future__ import annotations

import torch

from cute_kernels.gemm import deferred, ops
from cute_kernels.gemm.activations import ActivationFunction
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.from_codes import pack_experts, pack_weight
from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.layer.call import LayerRows
from cute_kernels.gemm.module import QuantizedLinear
from cute_kernels.gemm.normed import NormedRows
from cute_kernels.gemm.operands.fp8 import quantize_activations
from cute_kernels.gemm.quantize import interleave_weights, quantize_weight
from cute_kernels.gemm.reference import linear_reference
from cute_kernels.gemm.slices import reorder_outputs, slice_inputs, slice_outputs
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.names import Activation, Activations
from cute_kernels.runtime.operator import new_call

__all__ = [
    "LayerRows",
    "NormedRows",
    "PackedWeight",
    "QuantizedLinear",
    "interleave_weights",
    "linear_reference",
    "pack_experts",
    "pack_weight",
    "quantize_activations",
    "quantize_weight",
    "quantized_layer",
    "quantized_linear",
    "quantized_linear_norm",
    "reorder_outputs",
    "slice_inputs",
    "slice_outputs",
]


def quantized_linear(
    x: torch.Tensor | NormedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: Activation | ActivationFunction | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    activations: Activations | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes activation((x * input_scale) W^T + bias) + residual, with a quantised W.

    Products are accumulated in fp32; bias, activation and residual are applied in fp32, too. The result is rounded
    once. Works under ``torch.compile(fullgraph=True)`` as the operator ``cute_kernels::weight_only_linear``, or
    ``fp8_linear`` for products in FP8. It has no gradient: the result never requires one.

    Args:
        x: bf16 or fp16 [..., K], in the weight's ``dtype`` and on its device; any strides, and any leading size may be
            0. The weight's `input_scale` and `perm` are applied to it first. x may also be the result of
            `quantized_linear_norm`, which stands for its normed rows.
        weight: [N, K], from `quantize_weight` or one of `PackedWeight.from_...`.
        bias: [N] in x's dtype.
        residual: added last, of the result's shape and dtype. It may be ``out``.
        activation: None, "silu", "gelu" (the exact one, with erf), or "swiglu": silu(gate) * up, where the weight's
            even rows make gate and its odd rows make up, so the result has N / 2 columns; or any of
            `cute_kernels.gemm.activations`.
        out_dtype: bf16, fp16 or fp32; default out's, else x's.
        batch_invariant: True: the last bits of a row's result do not depend on the number of rows. On CUDA the weight's
            shape and format and the number of SMs alone then decide how K is cut, which may cost time. With or without
            it, results do not depend on timing.
        out: contiguous, written and returned; not x's memory.
        norm: [K] in x's dtype or fp32: rows of x are normed first, as by `rms_norm` with this weight and ``norm_eps``.
            The norm is a launch before the product.
        activations: None, or "fp8": rows of x are rounded to E4M3 by `quantize_activations`; the weight is not rounded.
            Each row has a scale. If the weight has 8-bit codes in groups, each 128 inputs of a row have a scale.
            Weights are FP8, MXFP8, MXFP4 or 4-bit integers, without zero points and not in groups of 16. On an H200,
            FP8 products are faster with many rows, and slower with few (docs/design/fp8_gemm.md).
        activation_scale: with "fp8", the scale of all of x: fp32 of one element. None: x has scales of its own.

    Other Parameters:
        norm_offset: added to the norm's weight, the ``weight_offset`` of `rms_norm`.

    Returns:
        [..., N], or [..., N / 2] of a gated activation, in ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: got {type(weight).__name__}, want a PackedWeight")
    if isinstance(x, NormedRows):
        if norm is not None:
            raise ValueError("norm: got a tensor for x of NormedRows, want None: these rows are normed already")
        if activations is activation_scale is None:
            return deferred.take(LinearCall(x, weight, bias, residual, activation, out_dtype, batch_invariant, out))
        x = x.normed()
    values = (
        x, weight, bias, residual, activation, out_dtype, batch_invariant, out, norm, norm_eps, norm_offset,
        activations, activation_scale,
    )  # fmt: skip
    return ops.linear(new_call(LinearCall, values))


def quantized_linear_norm(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    norm: torch.Tensor,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    following: PackedWeight | None = None,
) -> NormedRows:
    """Computes x W^T + bias + residual, and the RMSNorm of these rows for the products that read them.

    `quantized_linear` takes the result as its x; there may be several such products. No launch lies between the
    products if both kernels support it: bf16, up to 64 or 128 rows of most layers, N a multiple of 256, a norm in
    x's dtype. The first then also stores its rows times the norm's weight, and sums of their squares; the second
    multiplies its accumulators by (mean square + eps)^-0.5. Otherwise `rms_norm` is launched before each product that
    reads the rows. Both variants round a normed row once, but at different steps: their results differ in the last
    bits.

    Args:
        x, weight, bias: as in `quantized_linear`.
        residual: added last, of the result's shape, in x's dtype.
        norm: [N] in x's dtype or fp32, the norm's weight, as `rms_norm` takes it.
        norm_eps: a number of at least 0.

    Other Parameters:
        norm_offset: added to the norm's weight.
        following: the weight of the product that reads the norm, if it is known. If that product launches `rms_norm`
            anyway, this one stores nothing extra.

    Returns:
        `NormedRows`; its ``rows`` [..., N] are those of `quantized_linear` with this residual, bit for bit.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: got {type(weight).__name__}, want a PackedWeight")
    values = x, weight, bias, residual, norm, norm_eps, norm_offset, following
    return deferred.give(new_call(deferred.GivingCall, values))


def quantized_layer(
    x: torch.Tensor,
    o: PackedWeight,
    gate_up: PackedWeight,
    down: PackedWeight,
    qkv: PackedWeight | None = None,
    *,
    residual: torch.Tensor,
    norm: torch.Tensor,
    following_norm: torch.Tensor,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> LayerRows:
    """Computes all products between the attentions of two layers: o, gate and up with SwiGLU, down, and the next
    layer's qkv.

    The result is that of the calls below. One launch computes it if a kernel supports all products::

        h = quantized_linear_norm(x, o, residual=residual, norm=norm, ...)
        rows = quantized_linear_norm(quantized_linear(h, gate_up, activation="swiglu"), down, residual=h.rows,
                                     norm=following_norm, ...)
        return LayerRows(rows, quantized_linear(rows, qkv))

    One launch is used for one row in bf16 on Hopper, if weights are 4-bit integers in groups of 128 without zero
    points, act order and input scales, N is a multiple of 64 and K of 256, and norms are in bf16. Otherwise, and when
    traced, the function makes the calls above. The launch and the calls add up in different orders, so their results
    differ in the last bits. Each is bitwise reproducible.

    Args:
        x: bf16 or fp16 [..., K of o], the output of attention.
        o, gate_up, down: weights [hidden, K], [2 * inner, hidden] (gate and up interleaved, as `interleave_weights` has
            them) and [hidden, inner].
        qkv: the next layer's [N, hidden], or None.
        residual: [..., hidden], the residual stream, in x's dtype.
        norm: [hidden], the weight of the norm before gate and up.
        following_norm: [hidden], the weight of the norm before the next qkv.
        norm_eps: as in `quantized_linear_norm`, of both norms.

    Other Parameters:
        norm_offset: as in `quantized_linear_norm`, of both norms.

    Returns:
        `LayerRows`: ``rows``, the residual stream after the layer as `NormedRows` with following_norm; ``qkv``
        [..., N], or None.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    return layer_call.layer(
        layer_call.LayerCall(x, o, gate_up, down, qkv, residual, norm, following_norm, norm_eps, norm_offset)
    )
