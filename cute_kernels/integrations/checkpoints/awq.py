"""AWQ checkpoints (AutoAWQ's "gemm" version): codes packed along the output features."""

from __future__ import annotations

import torch

from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.integrations.checkpoints import fields

COLUMN_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each nibble of a word, the lowest nibble first."""
_PER_WORD = 8


def from_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int | None = None,
    input_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of an AWQ layer: W[n, k] = (q - z) * s, 4 bits.

    Args:
        qweight: int32 [K, N / 8].
        qzeros: int32 [G, N / 8], packed as qweight.
        scales: floating [G, N].
        group_size: the configuration's group size (-1: one scale per channel); None: found from K and G.
        input_scale: [K], the factors of the inputs, if the checkpoint stores AWQ's scales in a separate tensor.
        dtype: dtype of the scales and the activations, bf16 or fp16; default the scales' own, bf16 for fp32.
        device: where the result is put, default the scales' device.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    fields.check_tensor("qweight", qweight, (torch.int32,), 2, "[K, N / 8]")
    fields.check_tensor("qzeros", qzeros, (torch.int32,), 2, "[groups, N / 8]")
    fields.check_tensor("scales", scales, fields.FLOATING, 2, "[groups, N]")
    k, (groups, n) = qweight.shape[0], scales.shape
    if n % _PER_WORD:
        raise ValueError(f"scales: got shape {list(scales.shape)}, want [groups, N] with N a multiple of {_PER_WORD}")
    fields.check_shape(
        "qweight", qweight, (k, n // _PER_WORD), f"{_PER_WORD} codes a word for the {n} columns of scales"
    )
    fields.check_shape("qzeros", qzeros, (groups, n // _PER_WORD), f"{_PER_WORD} codes a word for each group of scales")
    scales = fields.to_scales("scales", scales, dtype)
    if input_scale is not None:
        fields.check_tensor("input_scale", input_scale, fields.FLOATING, 1, f"[{k}]")
        fields.check_shape("input_scale", input_scale, (k,), "one for each input")
        input_scale = fields.to_scales("input_scale", input_scale, scales.dtype)

    return pack_codes(
        lambda start, stop: columns(qweight[:, start // _PER_WORD : stop // _PER_WORD]).T,
        scales.T,
        columns(qzeros).T,
        bits=4,
        group_size=fields.group_size_of(k, groups, group_size),
        shape=(n, k),
        input_scale=input_scale,
        device=device,
    )


def columns(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 words [rows, W] to uint8 codes [rows, 8 * W], with the columns in order."""
    nibble_of = [COLUMN_ORDER.index(column) for column in range(_PER_WORD)]
    return fields.unpack_words(words, 4).unflatten(-1, (-1, _PER_WORD))[..., nibble_of].flatten(-2)
