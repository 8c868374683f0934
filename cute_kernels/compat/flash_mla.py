"""FlashMLA's decoding and sparse prefill calls (deepseek-ai/FlashMLA, April 2026) on this package's kernels.

Names, order, defaults and outputs are FlashMLA's, so that

    import cute_kernels.compat.flash_mla as flash_mla

is all that a caller changes. The calls and arguments correspond as follows:

| FlashMLA | here |
|---|---|
| sparse decode, head_dim 576, FP8 | `sparse_mla_decode`, kv_format "mla_fp8" |
| sparse decode, head_dim 512, FP8 | `sparse_mla_decode`, kv_format "mla_model1" |
| dense decode, bf16 or fp16 | `mla_decode`, kv_format "mla_bf16" or "mla_fp16", once for each of h_k heads |
| sparse prefill, queries [s_q] | `sparse_mla_decode` of s_q requests of one query |
| lse [b, h_q, s_q] | the transpose of lse [b, s_q, h_q] |
| tile_scheduler_metadata | calls that share the object must agree; each call makes its own schedule on the device |

This module supports more than FlashMLA: any number of indices, up to 128 heads, any page size, and CPU tensors (through
the reference). It has sparse decode over 16-bit caches (``is_fp8_kvcache=False``), dense decode over FP8 caches, and
topk_length and extra caches for both FP8 formats. It supports less in one place: dense decode has at most 16 queries a
request. For wrong arguments FlashMLA has assertions; the functions here raise ValueError or TypeError, with a message
that says what is wanted.
"""

from __future__ import annotations

import dataclasses

import torch

from cute_kernels import arguments as package_arguments
from cute_kernels.arguments import check_shape, check_tensors
from cute_kernels.compat.names import renamed
from cute_kernels.mla import ops
from cute_kernels.mla.formats import V_DIM
from cute_kernels.mla.problem import SparseExtras

DECODE_NAMES = {
    "cache": "k_cache",
    "seq_lens": "cache_seqlens",
    "sinks": "attn_sink",
    "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
}
PREFILL_NAMES = {"cache": "kv", "sinks": "attn_sink", "softmax_scale": "sm_scale"}

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclasses.dataclass
class FlashMLASchedMeta:
    """FlashMLA's schedule object. All calls that share the object must have the same configuration.

    Both tensors are always None: each call makes a schedule of its own.
    """

    @dataclasses.dataclass
    class Config:
        """The arguments that all calls of a schedule share, by FlashMLA's field names."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None

    def hold(self, config: Config) -> None:
        """Keeps the first call's configuration. Raises ValueError if a later call has a different configuration."""
        if self.config is None:
            self.config, self.have_initialized = config, True
            return
        for field in dataclasses.fields(config):
            came, wanted = getattr(config, field.name), getattr(self.config, field.name)
            if came != wanted:
                raise ValueError(
                    f"tile_scheduler_metadata: got a call with {field.name} {came}, want {wanted}, that of the first "
                    "call with this object"
                )


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Returns (an empty schedule for `flash_mla_with_kvcache`, None), as FlashMLA's function does. Arguments are
    ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes over an MLA cache: over chosen tokens if ``indices`` are given, else over whole contexts.

    Args:
        q: bf16 or fp16 [b, s_q, h_q, head_dim], head_dim 576 or 512, the last dimension contiguous.
        k_cache: [num_blocks, page_block_size, h_k, head_dim], or [num_blocks, page_block_size, 1, 656 or 584] bytes in
            FP8; blocks may be padded. h_k is 1, except in dense decode of 16-bit tokens.
        block_table: int32 [b, max_num_blocks_per_seq]; ignored with indices.
        cache_seqlens: int32 [b]; ignored with indices.
        head_dim_v: 512.
        tile_scheduler_metadata: from `get_mla_metadata`; calls that share one object must have the same configuration.
        num_splits: None.
        softmax_scale: default head_dim ** -0.5.
        causal: whether queries do not see later tokens; False with indices.
        is_fp8_kvcache: whether k_cache holds FP8 tokens.
        indices: int32 [b, s_q, topk]: block * page_block_size + offset, or -1 for no token.
        attn_sink: fp32 [h_q]: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache, extra_indices_in_kvcache: a second cache, and indices into it, in the form of the first.
        topk_length, extra_topk_length: int32 [b]: for each request, the number of indices that are used, from the first
            index on.

    Returns:
        out [b, s_q, h_q, 512] in q's dtype, lse fp32 [b, h_q, s_q], natural log. A query that sees nothing has out 0
        and lse +inf.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    check_tensors(q=q, k_cache=k_cache)
    _check_decode(q, k_cache, head_dim_v, tile_scheduler_metadata, num_splits)
    _check_dimensions("indices", indices, ("b", "s_q", "topk"))
    _check_dimensions("extra_indices_in_kvcache", extra_indices_in_kvcache, ("b", "s_q", "topk"))
    _check_dimensions("extra_k_cache", extra_k_cache, ("num_blocks", "page_block_size", "1", "row"))
    tile_scheduler_metadata.hold(
        FlashMLASchedMeta.Config(
            b=q.shape[0],
            s_q=q.shape[1],
            h_q=q.shape[2],
            page_block_size=k_cache.shape[1],
            h_k=k_cache.shape[2],
            causal=causal,
            is_fp8_kvcache=is_fp8_kvcache,
            topk=None if indices is None else indices.shape[-1],
            extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
            extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
        )
    )
    kv_format = _format_of(q, is_fp8_kvcache)
    extras = (topk_length, attn_sink, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if indices is None:
        names = ("topk_length", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        for name, tensor in zip(names, extras, strict=True):
            if tensor is not None:
                raise ValueError(f"{name}: got a tensor without indices, want None for dense attention")
    elif causal:
        raise ValueError("causal: got True with indices, want False: they say what a query sees")
    try:
        if indices is None:
            out, lse = _dense(q, k_cache, block_table, cache_seqlens, kv_format, softmax_scale, causal)
        else:
            out, lse = _sparse(q, k_cache, indices, kv_format, softmax_scale, extras)
    except (TypeError, ValueError) as error:
        raise renamed(error, DECODE_NAMES) from error
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes sparse attention of many queries over one sequence of 16-bit tokens.

    Args:
        q: bf16 [s_q, h_q, d_qk], d_qk 576 or 512, the last dimension contiguous.
        kv: bf16 [s_kv, 1, d_qk], the last dimension contiguous.
        indices: int32 [s_q, 1, topk]; -1, or s_kv and above, for no token.
        sm_scale: the factor of the scores.
        d_v: 512.
        attn_sink: fp32 [h_q], as for `flash_mla_with_kvcache`.
        topk_length: int32 [s_q]: for each query, the number of indices that are used, from the first index on.

    Returns:
        out [s_q, h_q, 512] in q's dtype; the largest scaled scores, fp32 [s_q, h_q]; lse, fp32 [s_q, h_q]. A query that
        sees nothing has the largest score -inf and lse +inf.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    check_tensors(q=q, kv=kv, indices=indices)
    _check_value_dim("d_v", d_v)
    check_shape("q", q, "s_q", "h_q", "d_qk")
    check_shape("kv", kv, "s_kv", 1, "d_qk")
    check_shape("indices", indices, q.shape[0], 1, "topk")
    cache = kv.transpose(0, 1)  # one page
    chosen = indices.masked_fill(indices >= kv.shape[0], -1) if package_arguments.DEBUG else indices  # no mistake here
    extras = SparseExtras(topk_length, attn_sink)
    queries, kv_format = q.unsqueeze(1).contiguous(), _format_of(q, is_fp8=False)
    try:
        out, lse, top = ops.sparse(
            ops.SparseCall(queries, cache, chosen.contiguous(), kv_format, sm_scale, extras, with_max=True)
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, PREFILL_NAMES) from error
    return out.squeeze(1), top.squeeze(1), lse.squeeze(1)


def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    kv_format: str,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse [b, s_q, h_q]). Each head of the cache belongs to h_q / h_k neighbouring heads of q."""
    if block_table is None or cache_seqlens is None:
        name = "block_table" if block_table is None else "cache_seqlens"
        raise ValueError(f"{name}: got None without indices, want it for dense attention")
    h_q, h_k = q.shape[2], k_cache.shape[2]
    if h_k == 0 or h_q % h_k:
        raise ValueError(f"q: got {h_q} heads, want a multiple of the {h_k} heads of k_cache")
    calls = (
        ops.DenseCall(
            heads.contiguous(), k_cache[:, :, i], block_table, cache_seqlens, kv_format, softmax_scale, causal
        )
        for i, heads in enumerate(q.split(h_q // h_k, dim=2))
    )
    parts = [ops.dense(call) for call in calls]
    if h_k == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    extras: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse [b, s_q, h_q]). extras: topk_length, attn_sink, extra_k_cache, extra_indices_in_kvcache,
    extra_topk_length."""
    topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length = extras
    for name, cache in (("k_cache", k_cache), ("extra_k_cache", extra_k_cache)):
        if cache is not None:
            check_shape(name, cache, "num_blocks", "page_block_size", 1, "row")
    own = SparseExtras(
        topk_length,
        attn_sink,
        None if extra_k_cache is None else extra_k_cache.squeeze(2),
        None if extra_indices is None else extra_indices.contiguous(),
        extra_topk_length,
    )
    queries, cache = q.contiguous(), k_cache.squeeze(2)
    out, lse, _ = ops.sparse(ops.SparseCall(queries, cache, indices.contiguous(), kv_format, softmax_scale, own))
    return out, lse


def _format_of(q: torch.Tensor, is_fp8: bool) -> str:
    """Returns the name of the cache's format. As in FlashMLA, the format depends on the number of columns and the dtype
    of q.
    """
    if is_fp8:
        return "mla_fp8" if q.shape[-1] == 576 else "mla_model1"
    return "mla_fp16" if q.dtype == torch.float16 else "mla_bf16"


def _check_dimensions(name: str, tensor: torch.Tensor | None, dimensions: tuple[str, ...]) -> None:
    if tensor is None:
        return
    check_tensors(**{name: tensor})
    check_shape(name, tensor, *dimensions)


def _check_decode(
    q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, metadata: object, num_splits: object
) -> None:
    _check_value_dim("head_dim_v", head_dim_v)
    check_shape("q", q, "b", "s_q", "h_q", "head_dim")
    check_shape("k_cache", k_cache, "num_blocks", "page_block_size", "h_k", "row")
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            f"tile_scheduler_metadata: got {type(metadata).__name__}, want the FlashMLASchedMeta of get_mla_metadata"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits: got {type(num_splits).__name__}, want None")


def _check_value_dim(name: str, value: int) -> None:
    if value != V_DIM:
        raise ValueError(f"{name}: got {value}, want {V_DIM}")
