"""Multi-head latent attention (DeepSeek V2, V3, V3.2): decode over whole contexts or chosen tokens of an MLA cache.

Read on in `formats` (what a token is), `reference` (what decode means), `problem` and `checks` (what a checked call
is), `ops`. Then read the kernels: `layout` (the bytes of a token), `config`, `schedule`, `kernel`, `compile`, `plan`.
:mod:`cute_kernels.mla.cache` writes tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch

from cute_kernels.mla import ops
from cute_kernels.mla.problem import SparseExtras
from cute_kernels.names import MlaFormatName
from cute_kernels.runtime.operator import new_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["mla_decode", "sparse_mla_decode"]


class DenseOptions(TypedDict, total=False):
    """The options of `mla_decode` except ``return_lse``."""

    softmax_scale: float | None
    causal: bool
    out: torch.Tensor | None


class SparseOptions(TypedDict, total=False):
    """The options of `sparse_mla_decode` except ``return_lse``."""

    softmax_scale: float | None
    topk_length: torch.Tensor | None
    sinks: torch.Tensor | None
    extra_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    out: torch.Tensor | None


@overload
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    block_table: torch.Tensor,
    return_lse: Literal[False] = ...,
    **options: Unpack[DenseOptions],
) -> torch.Tensor: ...


@overload
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    block_table: torch.Tensor,
    return_lse: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    block_table: torch.Tensor,
    return_lse: bool,
    **options: Unpack[DenseOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(q K^T * softmax_scale) V for the newest tokens of each request. K is the cached tokens, V their
    first 512 columns.

    Query i of request b has position seq_lens[b] - q_len + i: the queries are the last tokens, and they are in the
    cache already. All heads see the same tokens.

    Args:
        q: [batch, q_len, num_heads, head_dim], q_len 1 to 16, 1 to 128 heads: the absorbed queries, latent columns then
            RoPE columns. bf16; fp16 over an "mla_fp16" cache.
        cache: [num_pages, page_size, row] in ``kv_format``, any page_size. Rows are contiguous; pages may be padded,
            and 16-bit tokens may lie further apart. On a GPU, q, out, pages and tokens begin at multiples of 16 bytes.
        seq_lens: int32 [batch]: how many tokens of each request are in the cache, the queries' own among them. Read on
            the device: one captured CUDA graph serves changing lengths.
        kv_format: "mla_bf16" or "mla_fp16" (head_dim 576, or 512), "mla_fp8" (DeepSeek-V3.2's 656 bytes, head_dim
            576), "mla_model1" (584 bytes, head_dim 512): see :mod:`layouts.kv.mla`. FP8 caches are uint8, int8 or
            float8_e4m3fn.
        block_table: int32 [batch, max_pages], columns contiguous: token t of request b is row t % page_size of page
            block_table[b, t // page_size]. Entries beyond a request's tokens may hold anything.
        softmax_scale: a positive number, default head_dim ** -0.5. A model scales by its head size before absorption,
            so DeepSeek-V3 has 192 ** -0.5 times YaRN's factor.
        causal: whether a query sees no token after its own position. It makes no difference if q_len is 1.
        return_lse: also return the log-sum-exp of the scores.
        out: the tensor for the result, contiguous.

    Returns:
        out [batch, q_len, num_heads, 512] in q's dtype; with ``return_lse`` also fp32 [batch, q_len, num_heads],
        natural log. A query that sees no token has out 0 and lse -inf, as `merge_states` requires. FlashMLA and
        :mod:`cute_kernels.compat.flash_mla` have lse +inf there. Softmax and accumulation are fp32. Equal inputs give
        bitwise equal outputs.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. Lengths and
            pages are checked on the CPU, but not on a GPU, as a check would wait for the GPU. With CUTE_KERNELS_DEBUG=1
            in the environment at import they are checked in every call. The message names request and position.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    values = q, cache, block_table, seq_lens, kv_format, softmax_scale, causal, out
    result, lse = ops.dense(new_call(ops.DenseCall, values))
    return (result, _empty_is_least(lse)) if return_lse else result


@overload
def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    return_lse: Literal[False] = ...,
    **options: Unpack[SparseOptions],
) -> torch.Tensor: ...


@overload
def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    return_lse: Literal[True],
    **options: Unpack[SparseOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    return_lse: bool,
    **options: Unpack[SparseOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: MlaFormatName,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes :func:`mla_decode` over the tokens that each query has chosen (DeepSeek Sparse Attention).

    Args:
        q, cache, kv_format, softmax_scale, return_lse, out: as for `mla_decode`, with any q_len.
        indices: int32 [batch, q_len, topk], contiguous, any topk: page * page_size + offset, -1 for none. An index
            outside the cache is treated as -1. If an index occurs twice, its token is counted twice.
        topk_length: int32 [batch]: the number of a request's indices that are used, from the first one on. Default:
            all.
        sinks: fp32 [num_heads], one more logit for each head. It adds exp(sink) to the softmax's denominator and has no
            value, so out is multiplied by exp(lse) / (exp(lse) + exp(sink)). -inf: no sink; +inf: out is 0. lse does
            not include sinks.
        extra_cache, extra_indices, extra_topk_length: a second cache in the same format, with its own indices and
            topk_length. Queries also see the tokens chosen from it. Its page size may differ.

    Returns:
        As `mla_decode`.

    Raises:
        As `mla_decode`. Indices are checked only with CUTE_KERNELS_DEBUG=1. Then an index that is neither -1 nor in the
        cache is a ValueError that names request, query and position.
    """
    extras = SparseExtras(topk_length, sinks, extra_cache, extra_indices, extra_topk_length)
    call = ops.SparseCall(q, cache, indices, kv_format, softmax_scale, extras, out=out)
    result, lse, _ = ops.sparse(call)
    return (result, _empty_is_least(lse)) if return_lse else result


def _empty_is_least(lse: torch.Tensor) -> torch.Tensor:
    """Replaces +inf by -inf in place, and returns the tensor. Kernels write +inf for queries that see no token. NaN is
    kept."""
    return lse.nan_to_num_(torch.nan, -torch.inf, -torch.inf)
