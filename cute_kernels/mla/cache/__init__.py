"""Writing caches of multi-head latent attention: append with RoPE, and quantisation in bulk.

Read on in `reference` (what they mean), `call`, `config`, `kernel`, `compile`, `plan`, `ops`.
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
        latent: bf16 or fp16 [tokens, 512] (448 for "mla_model1"): the normalised compressed KV. It and ``k_rope`` may
            be views of one tensor: columns contiguous, any token stride that is a multiple of 16 bytes.
        k_rope: [tokens, 64] in latent's dtype: the columns that RoPE turns.
        cache: [num_pages, page_size, row] in ``kv_format``, as for :func:`cute_kernels.mla.mla_decode`.
        kv_format: "mla_fp8", "mla_model1", "mla_bf16" or "mla_fp16". FP8 scales are powers of two chosen as FlashMLA's
            quantiser does (:mod:`layouts.kv.mla`). NaN counts as 0, and what is out of range saturates.
        slot_mapping: int64 [tokens], page * page_size + offset; -1 writes nothing.
        rope: rotary embedding of all 64 columns (DeepSeek's is interleaved), see :class:`cute_kernels.Rope`; None where
            ``k_rope`` is rotated already.
        position_ids: int32 or int64 [tokens], below 2**31: with rope, and only then.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. Slots are
            not checked on a GPU (that would wait for it): a token whose slot is outside the cache is not written.
            With CUTE_KERNELS_DEBUG=1 in the environment at import such slots, and slots that two tokens share, are
            errors that name the tokens; on the CPU always.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    ops.append(AppendMlaCall(latent, k_rope, cache, slot_mapping, kv_format, rope, position_ids))


def quantize_mla_kv(x: torch.Tensor, *, kv_format: MlaFormatName, out: torch.Tensor | None = None) -> torch.Tensor:
    """Converts numbers to MLA tokens, bit for bit those of :mod:`layouts.kv.mla`.

    Args:
        x: bf16, fp16 or fp32 [..., head_dim], contiguous: latent columns, then 64 RoPE columns that are rotated
            already. head_dim 576, or 512 for "mla_model1" (and for 16-bit tokens).
        kv_format: as for `append_mla`.
        out: where to write the tokens, contiguous.

    Returns:
        Tokens [..., row] in the format's dtype: out, or a new tensor. Those of "mla_model1" are data, then scales, as
        in pages of one token; :meth:`layouts.kv.MlaModel1.to_pages` makes larger ones of them.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors are converted by the formats themselves.
    """
    return ops.quantize(x, kv_format, out)
