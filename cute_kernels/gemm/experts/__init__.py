"""Mixtures of experts with weights in 4- or 8-bit codes: grouped products, and layers of two grouped products.

Read on in `reference` (what the layers compute), `call`, `ops`, `plan`, `product`. `schedule` estimates how many rows
an expert has; `choice` selects the kernel and layout of a product. `wgmma` has the grouped products by tiles, and says
how they differ from `cute_kernels.gemm.wgmma`. `ranges` has the grouped products of few rows, by work ranges over the
active experts' weights. `routing` runs before the products and `combine` after them. `router` chooses experts, and
`module` has the layer as an nn.Module. Weights are `cute_kernels.gemm.packed_experts.PackedExperts`.
"""

from __future__ import annotations

import torch

from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu
from cute_kernels.gemm.experts import ops
from cute_kernels.gemm.experts.call import GroupedCall, MoeCall
from cute_kernels.gemm.experts.module import QuantizedInputScaledMoE, QuantizedMoE, QuantizedRoutedExperts
from cute_kernels.gemm.experts.reference import fused_moe_reference, grouped_linear_reference
from cute_kernels.gemm.experts.router import Routing, route
from cute_kernels.gemm.packed_experts import PackedExperts, interleave_experts, quantize_experts, stack_experts
from cute_kernels.names import Activation, Activations
from cute_kernels.runtime.operator import new_call

__all__ = [
    "ClampedSwiglu",
    "PackedExperts",
    "QuantizedInputScaledMoE",
    "QuantizedMoE",
    "QuantizedRoutedExperts",
    "Routing",
    "fused_moe",
    "fused_moe_reference",
    "grouped_linear",
    "grouped_linear_reference",
    "interleave_experts",
    "quantize_experts",
    "route",
    "stack_experts",
]


def grouped_linear(
    x: torch.Tensor,
    weight: PackedExperts,
    expert_offsets: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | ActivationFunction | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    activations: Activations | None = None,
) -> torch.Tensor:
    """Computes row p of the result as activation(x[rows[p]] W_e^T + bias_e) for each place p of each expert e. The
    places of expert e are expert_offsets[e] to expert_offsets[e + 1] - 1.

    The device reads the routing, and the host never waits for it. So calls can be captured in CUDA graphs and replayed
    with other offsets. Accumulators, bias and activation are fp32; the result is rounded once. Works under
    ``torch.compile(fullgraph=True)`` as the operator ``cute_kernels::grouped_linear``. It has no gradient.

    Args:
        x: bf16 or fp16 [T, K], in the dtype of the weight's scales and on its device; T may be 0.
        weight: [E, N, K], up to 512 experts.
        expert_offsets: int32 [E + 1], rising from 0 to at most the number of places.
        rows: int32 [places], the row of x for each place; default row p at place p, so there are T places.
        bias: [E, N] in x's dtype.
        activation: as in `cute_kernels.quantized_linear`.
        out_dtype: bf16, fp16 or fp32; default out's, else x's.
        batch_invariant: True: the last bits of a result do not depend on the other places. On CUDA this costs time if
            there are few places.
        out: contiguous, written and returned; not x's memory.
        activations: as in `cute_kernels.quantized_linear`: "fp8" rounds rows of x to E4M3.

    Values of expert_offsets and rows are checked on the CPU, and on a GPU if CUTE_KERNELS_DEBUG is set. Without the
    check, wrong values are undefined behaviour.

    Returns:
        [places, N], or [places, N / 2] of a gated activation, in ``out_dtype``. Places from expert_offsets[E] on have
        no expert. In a given ``out`` they stay as they are; in a new tensor they are 0 on the CPU, and hold anything on
        a GPU.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    options = activation, out_dtype, batch_invariant, out, activations
    return ops.grouped(GroupedCall(x, weight, expert_offsets, rows, bias, *options))


def fused_moe(
    x: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation | ActivationFunction = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    activations: Activations | None = None,
) -> torch.Tensor:
    """Computes the sum over j of topk_weights[t, j] * down_e(activation(gate_e(x[t]), up_e(x[t]))), e = topk_ids[t, j].

    Experts without a gate apply the activation to up_e(x[t]) alone.

    Hidden activations are rounded to x's dtype. Accumulators are in fp32 and added up in the order of j, so results are
    reproducible. The host never waits for the device. Works under ``torch.compile(fullgraph=True)`` as the operator
    ``cute_kernels::fused_moe``. It has no gradient.

    Args:
        x: bf16 or fp16 [T, K], in the dtype of the weights' scales and on their device; T is 0 to 65535.
        gate_up: [E, 2 I, K], interleaved rows of gate and up, as `interleave_experts` makes them; [E, I, K] without a
            gate.
        down: [E, N, I].
        topk_weights: floating [T, topk], used as fp32.
        topk_ids: int32 or int64 [T, topk]. Ids outside 0 to E - 1, such as -1, add nothing: such experts are on other
            ranks.
        activation: "swiglu": silu(gate) * up, or another gated activation, such as gpt-oss's `ClampedSwiglu`. For
            experts without a gate: "relu2" (Nemotron-H), or another activation of one operand.
        gate_up_bias, down_bias: in x's dtype, added in fp32: [E, 2 I] ([E, I] without a gate) in the order of gate_up's
            rows, and [E, N].
        out_dtype: bf16, fp16 or fp32; default out's, else x's.
        batch_invariant: True: the last bits of a token's result do not depend on the other tokens or their experts. On
            CUDA this costs time for few tokens.
        out: contiguous [T, N], written and returned; may be x, but must not overlap another argument.
        activations: as in `cute_kernels.quantized_linear`: "fp8" rounds rows of x and the hidden activations to E4M3.

    Returns:
        [T, N] in ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    values = (
        x, gate_up, down, topk_weights, topk_ids, activation, out_dtype, batch_invariant, out, gate_up_bias, down_bias,
        activations,
    )  # fmt: skip
    return ops.moe(new_call(MoeCall, values))
