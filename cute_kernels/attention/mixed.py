"""Batches in which some requests decode and others prefill: two kernels run concurrently, each with its own requests.

Requests with one query are limited by bandwidth, requests with hundreds of queries by MMAs. Over 16-bit caches the two
kernels do not slow each other much, if both have SMs to run on. So a prefill leaves some SMs free, and decoding runs on
these. Over quantised caches both kernels need all SMs, so they run one after the other. docs/design/extend_attention.md
has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.attention.call import make_extend_call
from cute_kernels.attention.checks import check_out
from cute_kernels.attention.decode import decode_attention
from cute_kernels.attention.device_values import check_device_values
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.extend_checks import check_query
from cute_kernels.attention.extend_schedule import decode_sms
from cute_kernels.attention.options import keys_seen
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.names import KvFormats
from cute_kernels.runtime.gpu import GPU

ResultT = TypeVar("ResultT")

_streams: dict[int, torch.cuda.Stream] = {}
OF_BOTH = ("block_table", "cache_layout", "softmax_scale", "window_size", "softcap", "sinks", "alibi_slopes", "k_scale")
OF_BOTH += ("v_scale", "transform", "num_splits")
OF_EXTEND = ("unpack", "max_seq_len", "fp8_products")


@overload
def mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    num_decodes: int,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    sm_margin: int | None = ...,
    **options: object,
) -> torch.Tensor: ...


@overload
def mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    num_decodes: int,
    kv_format: KvFormats,
    return_lse: bool,
    out: torch.Tensor | None = ...,
    sm_margin: int | None = ...,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    num_decodes: int,
    kv_format: KvFormats,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    sm_margin: int | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes :func:`extend_attention` of a batch whose first requests decode, with one query each.

    `decode_attention` computes the requests that decode. On a GPU it may run on a stream of its own, for which the
    current stream waits. CUDA graphs capture both streams.

    Args:
        q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format: as for :func:`extend_attention`.
        num_decodes: how many requests decode. They are the first of the batch, as engines order batches, and have
            exactly one query each. A GPU does not check this, since cu_seqlens_q is not read on the host.
        return_lse: also return the log-sum-exp of the scores, as :func:`extend_attention` does.
        out: the tensor for the result, contiguous, with q's shape and dtype.
        options: block_table, cache_layout, softmax_scale, window_size, softcap, sinks, alibi_slopes, k_scale, v_scale,
            as for both calls; fp8_products, as for :func:`extend_attention`.

    Other Parameters:
        sm_margin: SMs that extend attention leaves to decoding, which then runs concurrently. Default: chosen by the
            work of both kernels. Over quantised caches both need all SMs, so they run one after the other.
        unpack, max_seq_len: as for :func:`extend_attention`.

    Returns the results of :func:`extend_attention`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    for name in options:
        if name not in OF_BOTH + OF_EXTEND:  # before anything is launched
            known = ", ".join(OF_BOTH + OF_EXTEND)
            raise TypeError(f"{name}: got it as an option of mixed_attention, want one of {known}")
    arguments.check_tensors(q=q, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, k_cache=k_cache, v_cache=v_cache)
    _check(q, seq_lens, cu_seqlens_q, num_decodes)
    if out is None:
        out = torch.empty_like(q)
    else:
        check_out(out, q, q.shape[-1])
        arguments.check_place("out", out, q.device)
        arguments.check_contiguous("out", out)
    if 0 < num_decodes < len(seq_lens) and (arguments.DEBUG or q.is_cpu) and not is_compiling():
        # Each part checks its own, which is too late for what the first has written.
        given = {name: value for name, value in options.items() if name != "transform"}
        whole = {"cu_seqlens_q": cu_seqlens_q, "kv_format": kv_format, "sm_margin": sm_margin or 0, "out": out}
        check_device_values(make_extend_call(q, k_cache, v_cache, seq_lens, **whole, **given))
    of_extend = {name: options.pop(name) for name in OF_EXTEND if name in options}
    caches, batch = {"k_cache": k_cache, "v_cache": v_cache}, len(seq_lens)
    first = _part_of(caches, options, slice(0, num_decodes), batch)
    rest = _part_of(caches, options, slice(num_decodes, None), batch) | of_extend

    arguments.check_flag("return_lse", return_lse)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None

    def keep(part: slice, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        if lse is not None and isinstance(result, tuple):
            lse[part] = result[1].flatten(0, -2)

    def decode() -> None:
        result = decode_attention(
            q[:num_decodes].unsqueeze(1),
            seq_lens=seq_lens[:num_decodes],
            kv_format=kv_format,
            out=out[:num_decodes].unsqueeze(1),
            return_lse=return_lse,
            **first,
        )
        keep(slice(0, num_decodes), result)

    def extend(margin: int) -> None:
        result = extend_attention(
            q[num_decodes:],
            seq_lens=seq_lens[num_decodes:],
            cu_seqlens_q=cu_seqlens_q[num_decodes:] - num_decodes,
            kv_format=kv_format,
            out=out[num_decodes:],
            sm_margin=margin,
            return_lse=return_lse,
            **rest,
        )
        keep(slice(num_decodes, None), result)

    if num_decodes == 0:
        extend(0)
    elif num_decodes == seq_lens.shape[0]:
        decode()
    else:
        margin = sm_margin
        if margin is None and q.is_cuda:
            margin = _margin_of(q, k_cache, seq_lens.shape[0], num_decodes, kv_format, options, of_extend)
        if margin is None or not q.is_cuda:
            extend(margin or 0)  # first: it refuses all that the other does
            decode()
        else:
            side_by_side(q.device, decode, lambda: extend(margin))
    return out if lse is None else (out, lse)


def _margin_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: int,
    num_decodes: int,
    kv_format: KvFormats,
    options: dict[str, Any],
    of_extend: dict[str, Any],
) -> int | None:
    """Returns the number of SMs for decode attention, or None if the kernels run one after the other. Arguments are not
    checked here: the calls of both kernels check them.

    The estimate assumes that all requests have the largest possible length.
    """
    forms = [format_of(name) for name in format_pair(kv_format)]
    if k_cache.dim() != 4 or any(form.is_coded for form in forms):
        return None
    head_major, table = options.get("cache_layout") == "HND", options.get("block_table")
    tokens, kv_heads = k_cache.shape[2 if head_major else 1], k_cache.shape[1 if head_major else 2]
    window, bound = keys_seen(options.get("window_size")), of_extend.get("max_seq_len")
    length = tokens if table is None else table.shape[1] * tokens
    length = min(length, *(most for most in (window, bound) if type(most) is int and most > 0), length)
    heads, head_dim = q.shape[1:]
    queries, requests = q.shape[0] - num_decodes, batch - num_decodes
    seen = max(length - queries / requests / 2, length / 2)
    row_bytes = sum(form.row_bytes(head_dim) for form in forms)
    num_sms = GPU.num_sms(q.device)
    return decode_sms(num_decodes * length * kv_heads * row_bytes, 4 * head_dim * heads * queries * seen, num_sms)


def _check(q: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_decodes: object) -> None:
    """Raises ValueError unless the batch can be divided in two parts. The calls of both parts check the rest."""
    check_query(q)
    arguments.check_shape("seq_lens", seq_lens, "batch")
    batch, queries = seq_lens.shape[0], q.shape[0]
    arguments.check_vector("cu_seqlens_q", cu_seqlens_q, torch.int32, batch + 1, "the batch of seq_lens and one")
    if type(num_decodes) is not int or not 0 <= num_decodes <= min(batch, queries):
        raise ValueError(f"num_decodes: got {num_decodes!r}, want a number of requests from 0 to {min(batch, queries)}")
    if cu_seqlens_q.device.type == "cpu" and not is_compiling():
        ends = cu_seqlens_q[: num_decodes + 1].tolist()
        if ends != list(range(num_decodes + 1)):
            raise ValueError(f"cu_seqlens_q: got {ends} first, want 0 to {num_decodes}: one query for each of them")


def _part_of(caches: dict[str, torch.Tensor], options: dict[str, Any], part: slice, batch: int) -> dict[str, Any]:
    """Returns the caches and options of the requests ``part`` of a batch."""
    table, why = options.get("block_table"), ", those of each request of seq_lens"
    if table is not None:
        arguments.check_tensors(block_table=table)
        arguments.check_shape("block_table", table, batch, "max_pages", why=why)
        return {**caches, **options, "block_table": table[part]}
    for name, cache in caches.items():
        arguments.check_shape(name, cache, batch, "max_seq_len", "num_kv_heads", "row", why=why)
    return {name: cache[part] for name, cache in caches.items()} | options


def side_by_side(device: torch.device, beside: Callable[[], object], first: Callable[[], ResultT]) -> ResultT:
    """Runs two functions concurrently: ``first`` on the current stream, ``beside`` on another stream. At the end the
    current stream waits for the other stream. Returns the result of ``first``.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    side = _streams.get(index)
    if side is None:
        side = _streams[index] = torch.cuda.Stream(index)
    current = torch.cuda.current_stream(index)
    side.wait_stream(current)
    # In this order: decoding would begin on all SMs and leave the prefill none to begin on.
    result = first()
    with torch.cuda.stream(side):
        beside()
    current.wait_stream(side)
    return result
