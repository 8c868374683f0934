"""Writes caches of multi-head latent attention: append with RoPE, and quantisation in bulk.

Read on in `reference` (what both compute), `call`, `config`, `kernel`, `compile`, `plan`, `ops`.
:mod:`cute_kernels.mla.formats` says what a token is.
"""

from __future__ import annotations

import torch

from cute_kernels.kv_cache.rope import Rope
from cute_kernels.mla.cache import ops
from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.names import MlaFormatName

__all__ = ["append_mla", "quantize_mla_kv"]


def append_mla(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cache: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    slot_mapping: torch.Tensor,
    rope: Rope | None = None,
    position_ids: torch.Tensor | None = None,
) -> None:
    """Appends new tokens to an MLA cache, in one launch: RoPE in fp32, then quantisation to the cache's format.

    Args:
        latent: bf16 or fp16 [tokens, 512] (448 for "mla_model1"): the normalised compressed KV. ``latent`` and
            ``k_rope`` may be views of one tensor. Columns are contiguous; the token stride is a multiple of 16 bytes
            for latent, of 4 for k_rope.
        k_rope: [tokens, 64] in latent's dtype: the columns that RoPE turns.
        cache: [num_pages, page_size, row] in ``kv_format``, as for :func:`cute_kernels.mla.mla_decode`.
        kv_format: "mla_fp8", "mla_model1", "mla_bf16" or "mla_fp16". FP8 scales are powers of two, chosen as in
            FlashMLA's quantiser (:mod:`layouts.kv.mla`). NaN is stored as 0; numbers out of range saturate.
        slot_mapping: int64 [tokens], page * page_size + offset; -1 writes nothing.
        rope: rotary embedding of all 64 columns of ``k_rope`` (DeepSeek's is interleaved), see
            :class:`cute_kernels.Rope`; None if ``k_rope`` is rotated already.
        position_ids: int32 or int64 [tokens], below 2**31; required with rope, None without.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. A slot
            outside the cache, or one that two tokens share, is an error that names the tokens: always on the CPU, on a
            GPU only with CUTE_KERNELS_DEBUG=1 in the environment at import, as the check waits for the GPU. Else a
            token whose slot is outside the cache is not written.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    ops.append(AppendMlaCall(latent, k_rope, cache, slot_mapping, kv_format, rope, position_ids))


def quantize_mla_kv(x: torch.Tensor, *, kv_format: MlaFormatName, out: torch.Tensor | None = None) -> torch.Tensor:
    """Converts numbers to MLA tokens; the result is bit for bit that of :mod:`layouts.kv.mla`.

    Args:
        x: bf16, fp16 or fp32 [..., head_dim], contiguous: latent columns, then 64 RoPE columns that are rotated
            already. head_dim 576, or 512 for "mla_model1" (and for 16-bit tokens).
        kv_format: as for `append_mla`.
        out: where to write the tokens, contiguous.

    Returns:
        Tokens [..., row] in the format's dtype: out, or a new tensor. A token of "mla_model1" is data, then scales, as
        in a page of one token; :meth:`layouts.kv.MlaModel1.to_pages` makes larger pages of them.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors are converted by the formats themselves.
    """
    return ops.quantize(x, kv_format, out)
