"""The launch arguments of the append, fill and bulk kernels.

The append kernel (`append_arguments`) has these arguments. ``mode``, bits of :mod:`cute_kernels.kv_cache.config`, says
which of q, seq_lens and block_table are used; unused ones may be any tensors of their dtype and rank.

    q, k, v, q_out                   tensors [tokens, heads, head_dim], any token stride
    k_cache, v_cache                 tensors [pages, page_size, num_kv_heads, row], rows contiguous; a contiguous cache
                                     has a page of max_seq_len tokens for each request
    seq_lens, block_table            tensors int32 [batch], and int32 [batch, max_pages] with any row stride
    cu_seqlens, slots, position_ids  int32 [batch + 1], int64 [tokens], int32 or int64 [tokens]
    q_bias, k_bias, v_bias           [heads, head_dim] in q's dtype
    q_norm, k_norm                   [head_dim] in q's dtype
    phase_steps                      int64 [rotary_dim / 2]
    k_scale, v_scale                 fp32
    wave                             number of CTAs that the GPU runs at a time
    k_center ... q_shift             of a transform, see :class:`cute_kernels.kv_cache.operands.Transforms`; q_out then
                                     receives the transformed q

The bulk kernels (`bulk_arguments`) convert between num_rows rows of numbers [head_dim] and as many cache rows:

    numbers, rows                    the first row of numbers as a tensor, the first cache row as an address
    scale                            fp32, for formats whose scales are not in the rows; row i belongs to head
                                     i % num_heads
    number_rows, cache_rows          rows lie in blocks: how many rows of numbers, and cache rows, a block has
    number_stride, cache_stride      bytes from one block to the next
    head_divisor, number_divisor, cache_divisor
                                     `divisor_of` num_heads, number_rows and cache_rows
    center, factor                   of a transform, fp32 [num_heads, head_dim]
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
"""The arguments of the kernel that fills blocks of keys. k_new: fp16 [tokens, num_kv_heads, head_dim]. k_tail: fp16
[slots, 64, num_kv_heads, head_dim]. tail_slots: int32 [batch]. max_blocks: the greatest number of blocks that new
tokens of one request touch. The remaining arguments are those of an append."""
CONSTANTS = ("k_center", "k_factor", "q_factor", "v_factor")
TRANSFORM = arguments("address", *CONSTANTS, "q_shift")


@functools.cache
def append_arguments(transformed: bool) -> LaunchArguments:
    """Returns the launch arguments of an append. transformed: whether the caches have a transform."""
    return joined(APPEND, TRANSFORM if transformed else ())


BULK = (
    *arguments("tensor", "numbers"),
    *arguments("address", "rows", "scale"),
    *arguments("int32", "num_heads"),
    *arguments("int64", "head_divisor"),
    *arguments("int32", "num_rows", "number_rows"),
    *arguments("int64", "number_stride", "number_divisor"),
    *arguments("int32", "cache_rows"),
    *arguments("int64", "cache_stride", "cache_divisor"),
)


@functools.cache
def bulk_arguments(transformed: bool) -> LaunchArguments:
    """Returns the launch arguments of the bulk kernels. transformed: whether numbers are transformed before they are
    quantised."""
    return joined(BULK, arguments("address", "center", "factor") if transformed else ())
