"""Weights preprocessed for FasterTransformer's and TensorRT-LLM's mixed-input GEMM (`layouts.weights`)."""

from __future__ import annotations

import torch

from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints import fields
from layouts import transform
from layouts.weights.fastertransformer import ARCHITECTURES, restore


def from_fastertransformer(
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    arch: int,
    activation_bits: int = 16,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of a layer that was preprocessed for an architecture: W[n, k] = q * s, q signed.

    Args:
        weight: int8 [K, N], or packed int4 [K, N / 2]; one expert of a stack as [1, K, N] (from sm90 on, experts have
            another layout).
        scales: floating [N], or [G, N] with groups of K.
        bits: 4 or 8.
        arch: the compute capability that the weight was preprocessed for, as major * 10 + minor
            (`layouts.weights.fastertransformer.ARCHITECTURES`).
        activation_bits: 16, or 8 if the weight was preprocessed for FP8 activations.
        group_size, dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    fields.check_bits(bits)
    fields.check_tensor("weight", weight, (torch.int8,), getattr(weight, "ndim", 0), "[K, N]")
    if weight.dim() not in (2, 3) or (weight.dim() == 3 and weight.shape[0] != 1):
        raise ValueError(f"weight: got shape {list(weight.shape)}, want [K, N * bits / 8], or [1, K, N * bits / 8]")
    floating = (torch.bfloat16, torch.float16, torch.float32)
    fields.check_tensor("scales", scales, floating, getattr(scales, "ndim", 0), "[N] or [groups, N]")
    k, n = weight.shape[-2], weight.shape[-1] * 8 // bits
    if not weight.numel():
        raise ValueError(f"weight: got shape {list(weight.shape)}, want K and N of at least 1")
    groups = scales.numel() // n
    if scales.dim() not in (1, 2) or scales.shape[-1] != n or groups == 0:
        raise ValueError(
            f"scales: got shape {list(scales.shape)}, want [{n}] or [groups, {n}] for weight's {n} columns"
        )
    if arch not in tuple(ARCHITECTURES):  # compared, since what came may not be hashable
        raise ValueError(f"arch: got {arch!r}, want one of {', '.join(map(str, ARCHITECTURES))}")
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits: got {activation_bits!r}, want 16 or 8")
    try:
        stored = restore(weight, bits, arch, activation_bits).view(k, -1)
    except ValueError as error:
        raise ValueError(f"weight: {error}") from error

    def codes_of(start: int, stop: int) -> torch.Tensor:
        columns = stored[:, start * bits // 8 : stop * bits // 8].contiguous()
        return transform.unpack(columns, bits).T ^ symmetric_zero(bits)

    return pack_codes(
        codes_of,
        fields.to_scales("scales", scales.reshape(groups, n).T, dtype),
        None,
        bits=bits,
        group_size=fields.group_size_of(k, groups, group_size),
        shape=(n, k),
        device=device,
    )
