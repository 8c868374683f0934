"""HQQ layers. High nibbles hold the codes of the first half of the groups; zero points are floating."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels.arguments import check_matrix_shape
from cute_kernels.gemm.quantize import CodesOf, pack_codes
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.integrations.checkpoints import fields


def from_hqq(
    W_q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *,
    shape: Sequence[int],
    bits: int = 4,
    group_size: int | None = None,
    axis: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of an HQQ layer: W = (q - z) * s.

    Zero points stay zero points if all of them are integer codes. Otherwise they become shifts in the dtype of the
    scales: W = (q - m) * s + shift, with the symmetric zero m and shift = (m - z) * s.

    Args:
        W_q: uint8, N * K * bits / 8 bytes. With 8 bits, byte i is code i in row-major [N, K]. With 4 bits, byte i has
            code i in the high nibble and code i + N * K / 2 in the low nibble.
        scale, zero: floating, N * G numbers in row-major [N, G].
        shape: (N, K), which HQQ keeps in its meta data.
        bits: 4 or 8 (HQQ's nbits).
        group_size: the meta data's group size (-1: one scale per row); None: found from K and G.
        axis: the meta data's axis; kernels support only 1, groups along K.
        dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    codes_of, groups = _codes(W_q, scale, zero, shape, bits, axis)
    n, k = shape
    scales = fields.to_scales("scale", scale.reshape(n, groups), dtype)
    points = {"zeros": None} | fields.split_zeros("zero", zero.float().reshape(n, groups), scales, bits)
    size = fields.group_size_of(k, groups, group_size)
    return pack_codes(codes_of, scales, **points, bits=bits, group_size=size, shape=(n, k), device=device)


def _codes(
    W_q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, shape: Sequence[int], bits: int, axis: int
) -> tuple[CodesOf, int]:
    """Returns (a function from a range of rows to the rows' codes, the number of groups of a row)."""
    fields.check_bits(bits)
    if axis != 1:
        raise ValueError(f"axis: got {axis}, want 1: groups along K")
    check_matrix_shape("shape", shape)
    n, k = shape
    fields.check_tensor("W_q", W_q, (torch.uint8,), getattr(W_q, "ndim", 0), "any")
    for name, tensor in (("scale", scale), ("zero", zero)):
        fields.check_tensor(name, tensor, fields.FLOATING, getattr(tensor, "ndim", 0), "any")
    if W_q.numel() * 8 != n * k * bits:
        raise ValueError(f"W_q: got {W_q.numel()} bytes, want {n * k * bits // 8}: {bits}-bit codes of {[n, k]}")
    if n > 1 and scale.dim() == 2 and scale.shape[0] == 1:
        raise ValueError(f"scale: got shape {list(scale.shape)}, that of axis 0, want [N * G, 1]: groups along K")
    if scale.numel() % n or scale.numel() == 0:
        raise ValueError(f"scale: got {scale.numel()} numbers, want a multiple of the {n} rows")
    if zero.numel() != scale.numel():
        raise ValueError(f"zero: got {zero.numel()} numbers, want {scale.numel()}, as many as scale")
    stored = W_q.reshape(-1)
    half = stored.numel()

    def codes_of(start: int, stop: int) -> torch.Tensor:
        first, last = start * k, stop * k
        if bits == 8:
            return stored[first:last].view(-1, k)
        high = stored[min(first, half) : min(last, half)] >> 4
        low = stored[max(first - half, 0) : max(last - half, 0)] & 0xF
        return torch.cat((high, low)).view(-1, k)

    return codes_of, scale.numel() // n
