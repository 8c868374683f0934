"""compressed-tensors checkpoints (llm-compressor): "pack-quantized", codes packed along the inputs, and "int-quantized"
or "naive-quantized", one code per byte."""

from __future__ import annotations

import torch

from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints import fields


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of a layer in "pack-quantized": W[n, k] = (q - z) * s.

    q and z are signed, but stored with 8 added (128 for 8 bits).

    Args:
        weight_packed: int32 [N, K * bits / 32]; the last word of a row may be padded.
        weight_scale: floating [N, G], or [1] for one scale of the whole weight.
        weight_zero_point: int32 [N * bits / 32, G], packed along N; or int8 [N, G], not packed; or [1] if there is one
            scale. None for a symmetric weight.
        weight_shape: int64 [2]: (N, K).
        weight_g_idx: int [K], the group of each input, or None for groups in order.
        bits: 4 or 8; default found from weight_shape, or 4 without it.
        group_size, dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    fields.check_tensor("weight_packed", weight_packed, (torch.int32,), 2, "[N, K * bits / 32]")
    n = weight_packed.shape[0]
    scales = _by_row("weight_scale", weight_scale, fields.FLOATING, n)
    bits, k = _bits_and_k(weight_packed, weight_shape, bits)
    groups = scales.shape[1]
    size = fields.group_size_of(k, groups, group_size)
    zeros = None if weight_zero_point is None else _zeros(weight_zero_point, n, groups, bits)
    return pack_codes(
        lambda start, stop: fields.unpack_words(weight_packed[start:stop], bits)[:, :k],
        fields.to_scales("weight_scale", scales, dtype),
        zeros,
        bits=bits,
        group_size=size,
        shape=(n, k),
        perm=fields.perm_of("weight_g_idx", weight_g_idx, k, groups, size),
        device=device,
    )


def from_int_quantized(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of a layer in "int-quantized" or "naive-quantized": W[n, k] = (q - z) * s, q and z signed.

    Args:
        weight: int8 [N, K]; 4-bit values are -8 to 7.
        weight_scale: floating [N, G], [N], or [1] for one scale of the whole weight.
        weight_zero_point: int8, as many numbers as scales; None for a symmetric weight.
        weight_g_idx: int [K], the group of each input, or None for groups in order.
        bits: 4 or 8.
        group_size, dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    fields.check_bits(bits)
    fields.check_tensor("weight", weight, (torch.int8,), 2, "[N, K]")
    n, k = weight.shape
    low = -symmetric_zero(bits)
    if bits < 8 and bool(((weight < low) | (weight >= -low)).any()):
        raise ValueError(f"weight: got values outside {low} to {-low - 1}, want {bits}-bit ones")
    scales = _by_row("weight_scale", weight_scale, fields.FLOATING, n)
    groups = scales.shape[1]
    size = fields.group_size_of(k, groups, group_size)
    zeros = None if weight_zero_point is None else _as_codes(weight_zero_point, n, groups, bits)
    return pack_codes(
        lambda start, stop: (weight[start:stop].to(torch.int16) - low).to(torch.uint8),
        fields.to_scales("weight_scale", scales, dtype),
        zeros,
        bits=bits,
        group_size=size,
        shape=(n, k),
        perm=fields.perm_of("weight_g_idx", weight_g_idx, k, groups, size),
        device=device,
    )


def _by_row(
    name: str, values: torch.Tensor, dtypes: tuple[torch.dtype, ...], n: int, groups: int | None = None
) -> torch.Tensor:
    """Converts values [N, G], [N] or a single number to [N, G]. A single number becomes one group of N equal values."""
    fields.check_tensor(name, values, dtypes, getattr(values, "ndim", 0), "[N, groups]")
    found = values.reshape(1, 1).expand(n, 1) if values.numel() == 1 else values
    rows = found.shape[0] if found.dim() in (1, 2) else 0
    if rows != n or groups not in (None, found.numel() // max(1, n)):
        raise ValueError(
            f"{name}: got shape {list(values.shape)}, want [{n}, {groups or 'groups'}], a row for each of W"
        )
    return found.reshape(n, -1)


def _bits_and_k(weight_packed: torch.Tensor, weight_shape: torch.Tensor | None, bits: int | None) -> tuple[int, int]:
    n, words = weight_packed.shape
    if weight_shape is None:
        bits = 4 if bits is None else bits
        return bits, words * fields.check_bits(bits)
    fields.check_tensor("weight_shape", weight_shape, (torch.int64, torch.int32), 1, "[2]")
    fields.check_shape("weight_shape", weight_shape, (2,), "(N, K)")
    rows, k = weight_shape.tolist()
    fitting = [each for each in (4, 8) if -(-k // fields.check_bits(each)) == words and bits in (None, each)]
    if rows != n or not fitting:
        per_word = "8 or 4" if bits is None else fields.check_bits(bits)
        raise ValueError(
            f"weight_packed: got shape {[n, words]}, want {per_word} codes a word for weight_shape {[rows, k]}"
        )
    return fitting[0], k


def _zeros(weight_zero_point: torch.Tensor, n: int, groups: int, bits: int) -> torch.Tensor:
    """Returns uint8 zero points [N, G] as codes, from words packed along N or from signed numbers."""
    if getattr(weight_zero_point, "dtype", None) != torch.int32:
        return _as_codes(weight_zero_point, n, groups, bits)
    per_word = fields.check_bits(bits)
    fields.check_tensor("weight_zero_point", weight_zero_point, (torch.int32,), 2, "[N * bits / 32, groups]")
    fields.check_shape("weight_zero_point", weight_zero_point, (-(-n // per_word), groups), f"{per_word} codes a word")
    return fields.unpack_words(weight_zero_point.T, bits)[:, :n].T


def _as_codes(weight_zero_point: torch.Tensor, n: int, groups: int, bits: int) -> torch.Tensor:
    """Converts signed zero points to uint8 codes [N, G]."""
    given = _by_row("weight_zero_point", weight_zero_point, (torch.int8, torch.int32, torch.int64), n, groups)
    codes = given.int() + symmetric_zero(bits)
    if bool(((codes < 0) | (codes >= 1 << bits)).any()):
        low = -symmetric_zero(bits)
        raise ValueError(f"weight_zero_point: got values outside {low} to {-low - 1}, want {bits}-bit ones")
    return codes.to(torch.uint8)
