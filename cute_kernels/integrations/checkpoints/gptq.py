"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes packed along the inputs, zero points along the output features."""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_tensors
from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints import fields

FORMATS = ("gptq", "gptq_v2")
"""`checkpoint_format` of the configuration: "gptq" (v1, and the default) stores zero points less one."""


def words_of_v2(qzeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Converts int32 words of zero points from "gptq" to "gptq_v2", for checkpoints of GPTQModel.

    For "gptq", GPTQModel subtracts one from all zero points of a word in one operation, so a zero point 0 borrows from
    its neighbour.
    """
    return qzeros + (0x11111111 if bits == 4 else 0x01010101)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int | None = None,
    checkpoint_format: str = "gptq",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of a GPTQ layer: W[n, k] = (q - z) * s of input k's group.

    Some v1 checkpoints have the zero points of v2, and nothing in them says so. If such a checkpoint is symmetric,
    every zero point is read as 9 (129 for 8 bits) instead of 8 (128), and the checkpoint is refused.

    Args:
        qweight: int32 [K * bits / 32, N].
        qzeros: int32 [G, N * bits / 32], z - 1 ("gptq") or z ("gptq_v2"). A v1 zero point 0 is refused unless it is the
            last of its word: writers store it in two ways, and the tensor does not say which. Some subtract one from
            whole words, so that 0 borrows from its neighbour (`words_of_v2` undoes this). Others subtract one from each
            zero point.
        scales: floating [G, N].
        g_idx: int [K], the group of each input, or None for groups in order. With act-order, inputs are permuted so
            that each group's inputs are neighbours; `PackedWeight.perm` is the permutation.
        bits: 4 or 8.
        checkpoint_format: "gptq" (v1) or "gptq_v2", as the configuration has it: how qzeros are stored.
        group_size, dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    per_word = fields.check_bits(bits)
    if checkpoint_format not in FORMATS:
        raise ValueError(f"checkpoint_format: got {checkpoint_format!r}, want {' or '.join(map(repr, FORMATS))}")
    fields.check_tensor("qweight", qweight, (torch.int32,), 2, f"[K / {per_word}, N]")
    fields.check_tensor("qzeros", qzeros, (torch.int32,), 2, f"[groups, N / {per_word}]")
    fields.check_tensor("scales", scales, fields.FLOATING, 2, "[groups, N]")
    groups, n = scales.shape
    k = qweight.shape[0] * per_word
    fields.check_shape("qweight", qweight, (qweight.shape[0], n), f"a column for each of the {n} columns of scales")
    if isinstance(g_idx, torch.Tensor):
        check_tensors(g_idx=g_idx)
        if inputs := g_idx.numel():
            fields.check_shape("qweight", qweight, (-(-inputs // per_word), n), f"{per_word} codes a word for g_idx")
    fields.check_shape(
        "qzeros", qzeros, (groups, -(-n // per_word)), f"{per_word} codes a word for each group of scales"
    )
    size = fields.group_size_of(k, groups, group_size)
    stored = fields.unpack_words(qzeros, bits)[:, :n].T
    zeros = stored
    if checkpoint_format == "gptq":
        zeros = fields.unpack_words(words_of_v2(qzeros, bits), bits)[:, :n].T
        if not torch.equal(zeros, (stored + 1) & ((1 << bits) - 1)):
            raise ValueError(
                "qzeros: got a zero point 0 in format 'gptq', which writers store in different ways, want format "
                "'gptq_v2', or a configuration whose meta says that the quantizer is gptqmodel"
            )
    one_off = symmetric_zero(bits) + 1
    if checkpoint_format == "gptq" and bool((zeros == one_off).all()):
        raise ValueError(
            f"qzeros: got the zero point {one_off} everywhere, a symmetric weight's less nothing, want it less one in "
            "format 'gptq': give checkpoint_format='gptq_v2'"
        )
    return pack_codes(
        lambda start, stop: fields.unpack_words(qweight[:, start:stop].T, bits),
        fields.to_scales("scales", scales.T, dtype),
        zeros,
        bits=bits,
        group_size=size,
        shape=(n, k),
        perm=fields.perm_of("g_idx", g_idx, k, groups, size),
        device=device,
    )
