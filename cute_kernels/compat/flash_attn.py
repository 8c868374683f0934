"""FlashAttention's calls over ragged tensors and caches (Dao-AILab/flash-attention 2) on this package's kernels.

Names, order and defaults are FlashAttention's, so that ``from cute_kernels.compat.flash_attn import ...`` is all that a
caller changes. Neither call has a backward pass. Both take bf16 and fp16. The arguments correspond as follows:

| FlashAttention | here |
|---|---|
| k, v with a block table | pages of `extend_attention` |
| k, v without one | K and V of all requests one after the other |
| causal, window_size (left, right) | a window with right = 0 is causal; with causal right counts as 0 |
| alibi_slopes | supported in causal calls, fp32 [num_heads] |
| lse [batch, num_heads, seqlen_q], [num_heads, total_q] | the transpose of lse [batch, seqlen_q, num_heads] |
| q, k, v that are parts of a fused projection's result | read without a copy if they are aligned |
| num_splits, 0: FlashAttention chooses | num_splits, at most 32; 0: the plan chooses |

These arguments are refused with an error: dropout, slopes per request or without causal, windows that see later keys,
new K and V (`cute_kernels.append_kv` appends them), rotary embedding, cache_batch_idx, cache_leftpad.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.arguments import check_dtype, check_shape, check_tensors, strides_of
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.ragged import ragged_attention
from cute_kernels.compat.names import renamed
from cute_kernels.runtime.plans import ALIGNMENT

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Computes attention of ragged queries; the module's docstring compares it with FlashAttention's.

    Args:
        q: [total_q, num_heads, head_dim].
        k, v: [total_k, num_heads_k, head_dim], or pages [num_pages, page_size, num_heads_k, head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1]: where requests begin in q, and in k and v. With pages,
            cu_seqlens_k has the cumulative lengths of the requests' contexts.
        max_seqlen_q, max_seqlen_k: ignored.
        dropout_p: 0.
        softmax_scale: default head_dim ** -0.5.
        causal: whether a query sees no later key; the queries are the last tokens of their request.
        window_size: (left, right): keys before and after a query's own that it sees; -1 for all.
        softcap: 0 for none.
        alibi_slopes: fp32 [num_heads].
        deterministic: ignored: results are always deterministic.
        return_attn_probs: also return the log-sum-exp, fp32 [num_heads, total_q], and None, as there is no dropout.
        block_table: int32 [batch, max_pages]: each request's pages; None for k and v without pages.

    Returns out [total_q, num_heads, head_dim] in q's dtype, or (out, log-sum-exp, None) with ``return_attn_probs``.

    Raises TypeError and ValueError, naming the argument, what came and what is wanted.
    """
    _refuse(dropout_p=(dropout_p, 0.0))
    options: dict[str, Any] = _options(causal, window_size, softcap, alibi_slopes) | {"softmax_scale": softmax_scale}
    names = {"k_cache": "k", "v_cache": "v", "seq_lens": "cu_seqlens_k"}
    check_tensors(q=q, k=k, v=v, cu_seqlens_k=cu_seqlens_k)
    q = _rows_of(q)
    try:
        if block_table is None:
            k, v = _rows_of(k), _rows_of(v)
            out, lse = ragged_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        else:
            options |= {"kv_format": _format_of(q), "block_table": block_table, "cu_seqlens_q": cu_seqlens_q}
            out, lse = extend_attention(q, k, v, cu_seqlens_k.diff(), return_lse=True, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None
    return (out, lse.T, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of the newest tokens over caches; the module's docstring compares it with FlashAttention's.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim].
        k_cache, v_cache: [batch, seqlen_cache, num_heads_k, head_dim], or pages with a block table.
        k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad: None.
        cache_seqlens: int32 [batch], or one int for all requests: the number of tokens in the cache, including the
            queries' own. None: caches are full.
        block_table: int32 [batch, max_pages]: each request's pages; None for caches without pages.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flash_attn_varlen_func`.
        rotary_interleaved: ignored, as there is no rotary embedding.
        num_splits: how many parts keys are cut into, at most 32; 0: the plan chooses.
        return_softmax_lse: also return the log-sum-exp, fp32 [batch, num_heads, seqlen_q].

    Returns out [batch, seqlen_q, num_heads, head_dim] in q's dtype, and the log-sum-exp with ``return_softmax_lse``.

    Raises TypeError and ValueError, naming the argument, what came and what is wanted.
    """
    missing = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    missing |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    _refuse(**{name: (value, None) for name, value in missing.items()})
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q.dim() != 4:
        raise ValueError(f"q: got {q.dim()} dimensions, want 4: [batch, seqlen_q, num_heads, head_dim]")
    batch, seqlen_q = q.shape[:2]
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        room = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
        length = room if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    names = {"cu_seqlens_q": "q", "seq_lens": "cache_seqlens"}
    options = _options(causal, window_size, softcap, alibi_slopes)
    options |= {"kv_format": _format_of(q), "block_table": block_table, "softmax_scale": softmax_scale}
    options["num_splits"] = num_splits or None
    options["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    rows = _rows_of(q.reshape(batch * seqlen_q, *q.shape[2:]))
    try:
        out, lse = extend_attention(rows, k_cache, v_cache, cache_seqlens, return_lse=True, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None
    out = out.view(q.shape)
    return (out, lse.view(q.shape[:3]).transpose(1, 2)) if return_softmax_lse else out


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns x [tokens, heads, head_dim] itself if each token's heads are contiguous and aligned, as kernels need it;
    else a contiguous copy."""
    if x.dim() != 3:
        return x  # which is refused
    token, head, column = strides_of(x)
    together = column == 1 and head == x.shape[2] and token >= x.shape[1] * head
    return x if together and token * x.element_size() % ALIGNMENT == 0 else x.contiguous()


def _format_of(q: torch.Tensor) -> Any:
    check_dtype("q", q, *Q_DTYPES)
    return Q_DTYPES[q.dtype]


def _refuse(**given: tuple[Any, Any]) -> None:
    """Raises ValueError for an unsupported argument.

    given: maps each argument's name to (its value, the only supported value).
    """
    for name, (value, wanted) in given.items():
        if (value is not None) if wanted is None else value != wanted:
            came = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name}: got {came}, want {wanted}: it is not supported")


def _options(
    causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: torch.Tensor | None
) -> dict[str, Any]:
    """Converts FlashAttention's options to those of `extend_attention`. Raises ValueError for unsupported options."""
    left, right = window_size
    if causal:
        right = 0
    if right == -1 and left != -1:
        raise ValueError(f"window_size: got {tuple(window_size)!r} without causal, want (left, 0) or (-1, -1)")
    if alibi_slopes is not None:
        if right != 0:
            raise ValueError("alibi_slopes: got a tensor without causal, want None or causal=True")
        check_shape("alibi_slopes", alibi_slopes, "num_heads")
    return {
        "causal": causal,
        "window_size": None if (left, right) in ((-1, -1), (-1, 0)) and causal == (right == 0) else (left, right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }
