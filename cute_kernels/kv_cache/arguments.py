"""The arguments that appends are launched with; they are listed nowhere else.

Tensors: q, k, v, q_out [tokens, heads, head_dim], any token stride; caches [pages, page_size, num_kv_heads, row] with
any strides but the last, a contiguous cache having a page of max_seq_len tokens for each request; seq_lens int32
[batch]; block_table int32 [batch, max_pages], any row stride. ``mode``, bits of :mod:`cute_kernels.kv_cache.config`,
says which of q, seq_lens and block_table count; the others may be any tensors of their kind.

    cu_seqlens, slots, position_ids  int32 [batch + 1], int64 [tokens], int32 or int64 [tokens]
    q_bias, k_bias, v_bias           [heads, head_dim] in q's dtype
    q_norm, k_norm                   [head_dim] in q's dtype
    phase_steps                      int64 [rotary_dim / 2]
    k_scale, v_scale                 fp32
    wave                             CTAs that the GPU holds at a time
    k_center ... q_shift             of a transform, see :class:`cute_kernels.kv_cache.operands.Transforms`; q_out then
                                     gets the transformed q

Of whole caches (`bulk_arguments`): numbers [num_rows, head_dim], contiguous; rows [num_rows, row], contiguous; scale
fp32 for formats that are given one, of head ``row % num_heads``; every ``*_divisor`` is `divisor_of` what it is named
after. Where numbers or rows lie in blocks, dense rows of one block, bytes from one to the next, and ``numbers`` the
first of num_rows rows alone. center, factor of a transform: fp32 [num_heads, head_dim].
"""

from __future__ import annotations

import functools

from cute_kernels.runtime.launch_arguments import LaunchArguments, arguments, joined

TERMS = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
APPEND = (
    *arguments("tensor", "q", "k", "v", "q_out", "k_cache", "v_cache", "seq_lens", "block_table"),
    *arguments("address", "cu_seqlens", "slots", "position_ids", *TERMS),
    *arguments("address", "phase_steps", "k_scale", "v_scale"),
    *arguments("float32", "norm_eps", "rope_factor"),
    *arguments("int32", "wave", "mode"),
)
FILL = LaunchArguments(
    (
        *arguments("tensor", "k_new", "k_tail", "tail_slots", "k_cache", "seq_lens"),
        *arguments("address", "cu_seqlens", "block_table"),
        *arguments("int64", "table_stride"),
        *arguments("int32", "max_pages", "max_blocks"),
    )
)
"""Of the kernel that fills blocks of keys: k_new fp16 [tokens, num_kv_heads, head_dim]; k_tail fp16 [slots, 64,
num_kv_heads, head_dim]; tail_slots int32 [batch]; the cache, lengths, bounds and table of an append; the blocks that
one request's new tokens touch at most."""
CONSTANTS = ("k_center", "k_factor", "q_factor", "v_factor")
TRANSFORM = arguments("address", *CONSTANTS, "q_shift")


@functools.cache
def append_arguments(transformed: bool) -> LaunchArguments:
    """Returns the arguments of an append, to caches that are transformed or not."""
    return joined(APPEND, TRANSFORM if transformed else ())


BULK = (
    *arguments("tensor", "numbers"),
    *arguments("address", "rows", "scale"),
    *arguments("int32", "num_heads"),
    *arguments("int64", "head_divisor"),
)
BLOCKS = (
    *arguments("int32", "num_rows", "number_rows"),
    *arguments("int64", "number_stride", "number_divisor"),
    *arguments("int32", "cache_rows"),
    *arguments("int64", "cache_stride", "cache_divisor"),
)


@functools.cache
def bulk_arguments(strided: bool, transformed: bool) -> LaunchArguments:
    """Returns the arguments for whole caches. strided: whether rows come in blocks; those of transformed caches do."""
    return joined(BULK, BLOCKS if strided else (), arguments("address", "center", "factor") if transformed else ())
