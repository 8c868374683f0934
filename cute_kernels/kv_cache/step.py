"""A layer's decoding step in one call: it appends the new tokens and attends with them, overlapped on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_kernels.attention.options import ScoreOptions, options_of
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache import step_ops
from cute_kernels.kv_cache.call import split_bias
from cute_kernels.kv_cache.options import NewTokenOptions
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.names import CacheLayout, KvFormats, QkvBias, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StepOptions(ScoreOptions, NewTokenOptions, total=False):
    """Further options of a step, besides `ScoreOptions`; :func:`append_and_decode` documents each."""

    softmax_scale: float | None
    num_splits: int | None
    out: torch.Tensor | None
    transform: CacheTransform | None


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    **options: Unpack[StepOptions],
) -> torch.Tensor: ...


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[True],
    **options: Unpack[StepOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: bool = ...,
    **options: Unpack[StepOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    qkv_bias: QkvBias | None = None,
    rope: Rope | None = None,
    position_ids: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    transform: CacheTransform | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Appends each request's last q_len tokens (`append_kv`), then attends with their queries over the whole cache
    (`decode_attention`).

    The result is that of the two calls, bit for bit where ``num_splits`` is given. On a GPU the second kernel starts
    while the first one runs: it reads the tokens that were in the cache before, and waits for the append only for the
    new ones and for the rotated queries. One token a request takes one launch in most caches: attention
    writes the new rows itself (docs/api.md says where not). What a center takes off the scores is another launch's work
    where a soft cap, sinks or the log-sum-exp see it.

    Args:
        q: bf16 or fp16 [batch, q_len, num_q_heads, head_dim], before norm and RoPE; q_len 1 to 16.
        k, v: [batch, q_len, num_kv_heads, head_dim] in q's dtype; V may have another head_dim. q, k and v may be views
            of one fused QKV tensor: the last two dimensions contiguous, tokens evenly spaced.
        k_cache, v_cache, kv_format, block_table, cache_layout, k_scale, v_scale: as `decode_attention` has them.
            The slot of a new token must belong to its request alone.
        seq_lens: int32 [batch], tokens of each request after the append: the new ones take positions
            seq_lens[b] - q_len to seq_lens[b] - 1, those below 0 are not written. There is no slot_mapping: a token
            that went elsewhere than its position says could be read before it is written.
        qkv_bias: (q's, k's, v's), each [heads * head_dim] in q's dtype, or None.
        rope, q_norm, k_norm, norm_eps: as `append_kv` has them.
        position_ids: int32 or int64 [batch, q_len], contiguous: positions for RoPE in place of those in the cache.
        softmax_scale, causal, window_size, softcap, sinks, alibi_slopes, attn_bias, num_splits: as `decode_attention`
            has them.
        transform: how the cache is written, as `append_kv` has it. The append transforms q as well, and the result is
            that over K and V as they were: attention undoes V's part of blocks up to 128 columns in its epilogue, of
            wider ones in a dozen more launches. A V whose transform is folded into the projections before and after it
            needs none here.
        return_lse: also return the log-sum-exp of the scores, without the sinks.
        out: the tensor for the result, contiguous.

    Returns:
        As `decode_attention`: out [batch, q_len, num_q_heads, head_dim of V] in q's dtype, with ``return_lse`` also
        lse, fp32 [batch, q_len, num_q_heads], natural log.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted, and
            nothing was appended. Lengths and pages are checked as `append_kv` and `decode_attention` do: on the CPU,
            and with CUTE_KERNELS_DEBUG=1.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    if type(kv_format) is not str:
        kv_format = format_pair(kv_format)
    # Before names are looked at: who has such keys gives k_tail and tail_slots as well.
    if (keys := format_of(format_pair(kv_format)[0])).in_blocks:
        raise ValueError(
            f"kv_format: got {keys.name} keys, whose blocks a launch of their own fills; want another format, or "
            "append_kv and then decode_attention"
        )
    extras: step_ops.Extras | None = None
    if qkv_bias is not None or not (position_ids is q_norm is k_norm is None):
        biases = (None, None, None) if qkv_bias is None else split_bias("qkv_bias", qkv_bias)
        extras = (position_ids, *biases, q_norm, k_norm)
    options = options_of(
        block_table, cache_layout, k_scale, v_scale, causal, window_size, softcap, sinks, alibi_slopes, attn_bias
    )  # fmt: skip
    numbers = (softmax_scale, num_splits, return_lse, out, options, transform)
    step = step_ops.Step(q, k, v, k_cache, v_cache, seq_lens, kv_format, rope, norm_eps, extras, *numbers)
    result, lse = step_ops.path_of(step)(step)
    return (result, lse) if return_lse else result
