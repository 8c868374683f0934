"""`append_and_extend`, which attends to a cache while it writes the new tokens into the cache.

Attention reads the new tokens in 16 bits from ``new_k`` and ``new_v``, and only older tokens from the cache. So the
append can run concurrently with all of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_kernels.arguments import check_tensors, shape_of, strides_of
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.mixed import side_by_side
from cute_kernels.kv_cache.step import append_kv
from cute_kernels.names import KvFormats

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cute_kernels.attention.options import AppendedOptions

OF_APPEND = ("block_table", "cache_layout", "k_scale", "v_scale", "transform")


@overload
def append_and_extend(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    **options: Unpack[AppendedOptions],
) -> torch.Tensor: ...


@overload
def append_and_extend(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: bool,
    **options: Unpack[AppendedOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def append_and_extend(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: bool = False,
    **options: Unpack[AppendedOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes :func:`extend_attention` with new tokens outside the cache, and concurrently appends the new tokens as
    :func:`append_kv` does.

    Args:
        q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format: as for :func:`extend_attention`. seq_lens count the new
            tokens, and the block table has their pages, too.
        new_k, new_v: K and V of the new tokens, [total_q, num_kv_heads, head_dim] in q's dtype. The last two dimensions
            are contiguous, tokens begin on multiples of 16 bytes, and K is already rotated if the model has RoPE.
        return_lse: also return the log-sum-exp of the scores, fp32 [total_q, num_q_heads], natural log.
        options: further arguments of :func:`extend_attention`.

    Returns what :func:`extend_attention` returns. On a GPU the append runs on a second stream, for which the current
    stream waits. CUDA graphs capture both streams. If the arguments of attention are refused, nothing is appended.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    check_tensors(q=q, new_k=new_k, new_v=new_v, k_cache=k_cache, v_cache=v_cache)
    for name, rows in (("new_k", new_k), ("new_v", new_v)):
        _check_heads(name, rows)
    of_append: dict[str, Any] = {name: value for name, value in options.items() if name in OF_APPEND}

    def extend() -> Any:
        return extend_attention(
            q, k_cache, v_cache, seq_lens, cu_seqlens_q=cu_seqlens_q, kv_format=kv_format, return_lse=return_lse,
            new_k=new_k, new_v=new_v, **options,
        )  # fmt: skip

    def append() -> None:
        append_kv(
            new_k, new_v, k_cache, v_cache, kv_format=kv_format, seq_lens=seq_lens, cu_seqlens=cu_seqlens_q, **of_append
        )

    if q.is_cuda and not torch.compiler.is_compiling():
        return side_by_side(q.device, append, extend)
    result = extend()
    append()
    return result


def _check_heads(name: str, rows: torch.Tensor) -> None:
    """Raises ValueError unless the heads of each token in ``rows`` are contiguous, as `append_kv` requires."""
    if rows.dim() == 3 and rows.numel() and strides_of(rows)[1:] != (rows.shape[2], 1):
        raise ValueError(
            f"{name}: got strides {rows.stride()} for shape {shape_of(rows)}, want the last two dimensions contiguous"
        )
