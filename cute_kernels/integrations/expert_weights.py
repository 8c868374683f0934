"""Converts an engine's tensors for a layer of experts to `PackedExperts`.

Engines' tensors hold all experts. All experts are packed as one tall weight, since each expert's rows fill whole tiles.
Engines store the rows of gate before those of up; in the packed weight the two alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_kernels.formats.weights import MXFP4, SHIPPED_GROUP_SIZES
from cute_kernels.gemm import pack_experts
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import TILE_N
from cute_kernels.integrations.checkpoints import awq, fields

COMPRESSED_TENSORS = "{}_weight_packed", "{}_weight_scale", "{}_weight_zero_point"
"""Engines' names of words, scales and zero points of compressed-tensors layers; "{}" stands for "w13" or "w2"."""
AUTO = "{}_qweight", "{}_scales", "{}_qzeros"
"""Engines' names of words, scales and zero points of GPTQ and AWQ layers."""


class Stored(NamedTuple):
    """How an engine's layer stores codes. group_size: 0 for one scale per row."""

    bits: int
    group_size: int
    zero_point: bool
    act_order: bool

    def wrong(self, features: int, hidden: int, gated: bool = True) -> dict[str, bool]:
        """Returns the properties that no kernel supports: {property: whether the layer has it}.

        features: the number of features between the two products of an expert. hidden: the model's hidden size.
        """
        return {
            f"{self.bits}-bit weights": self.bits not in (4, 8),
            f"groups of {self.group_size}": self.group_size not in (0, *SHIPPED_GROUP_SIZES),
            "act-order": self.act_order,
            f"experts of {features} features": bool(features * (1 + gated) % TILE_N or hidden % TILE_N),
        }


AS_MXFP4 = Stored(MXFP4.bits, MXFP4.group_size, zero_point=False, act_order=False)


def gate_and_up_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Reorders rows [E, 2 I, ...], in which the rows of gate come before those of up, so that the rows of gate and up
    alternate.
    """
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def from_inputs_packed(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int | None,
    dtype: torch.dtype,
    gated: bool,
) -> PackedExperts:
    """Packs the experts of GPTQ and compressed-tensors layers.

    Args:
        words: int32 [E, K * bits / 32, N], codes packed along the inputs.
        scales: [E, G, N]. zeros: int32 [E, G, N * bits / 32], packed along the outputs; None for symmetric weights.
        gated: whether N holds the rows of gate, then those of up.
    """
    per_word = fields.check_bits(bits)
    rows = _in_order(words.transpose(1, 2), gated).flatten(0, 1)
    n, k = words.shape[2], words.shape[1] * per_word
    points = None if zeros is None else fields.unpack_words(zeros, bits)
    return _pack(
        lambda start, stop: fields.unpack_words(rows[start:stop], bits),
        (len(words), n, k),
        _in_order(scales.transpose(1, 2), gated),
        None if points is None else _in_order(points.transpose(1, 2), gated),
        bits=bits,
        group_size=group_size,
        dtype=dtype,
    )


def from_awq(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    bits: int,
    group_size: int | None,
    dtype: torch.dtype,
    gated: bool,
) -> PackedExperts:
    """Packs the experts of AWQ layers: words int32 [E, K, N / 8], zeros int32 [E, G, N / 8], both in AWQ's order of
    columns."""
    codes = _in_order(awq.columns(words).transpose(1, 2), gated).flatten(0, 1)
    return _pack(
        lambda start, stop: codes[start:stop],
        (len(words), scales.shape[2], words.shape[1]),
        _in_order(scales.transpose(1, 2), gated),
        _in_order(awq.columns(zeros).transpose(1, 2), gated),
        bits=bits,
        group_size=group_size,
        dtype=dtype,
    )


def from_mxfp4(
    words: torch.Tensor, scales: torch.Tensor, zeros: None, *, dtype: torch.dtype, gated: bool, **_: object
) -> PackedExperts:
    """Packs the experts of gpt-oss: words of two codes a byte [E, K / 2, N], scales E8M0 [E, K / 32, N].

    gated: whether the rows of gate come before those of up; otherwise they already alternate.
    """
    codes, bytes_ = (_in_order(x.transpose(1, 2).view(torch.uint8), gated).contiguous() for x in (words, scales))
    return pack_experts(MXFP4, codes, bytes_.view(torch.float8_e8m0fnu), dtype=dtype)


def _in_order(rows: torch.Tensor, gated: bool) -> torch.Tensor:
    return gate_and_up_in_turn(rows) if gated else rows


def _pack(
    codes_of: Callable[[int, int], torch.Tensor],
    sizes: tuple[int, int, int],
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int | None,
    dtype: torch.dtype,
) -> PackedExperts:
    """Packs the rows of all experts, one expert after the other.

    Args:
        codes_of: a function from a range of rows to the rows' codes.
        sizes: (E, N, K), N in whole tiles.
        scales, zeros: [E, N, G].
    """
    experts, n, k = sizes
    assert n % TILE_N == 0, n
    packed = pack_codes(
        codes_of,
        fields.to_scales("scales", scales.flatten(0, 1), dtype),
        None if zeros is None else zeros.flatten(0, 1),
        bits=bits,
        group_size=group_size,
        shape=(experts * n, k),
    )

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (experts, n // TILE_N))

    points = None if packed.zeros is None else apart(packed.zeros)
    return PackedExperts(apart(packed.codes), apart(packed.scales), points, packed.format, (n, k), check_values=False)
