"""What the kernels of extend attention are launched with: declared here, and nowhere else listed.

Attention (`attention_arguments`): q, out [total_q, num_q_heads, head_dim], of q the first stride may be free; caches
[blocks, tokens, num_kv_heads, row], or [blocks, num_kv_heads, tokens, row] if they are head-major; a block is a page
with ``block_table``, else a request, or all tokens if they are ragged; cu_seqlens int32 [batch + 1]; seq_lens int32
[batch] (ragged: where each request's keys begin, [batch + 1]). The others are addresses and numbers, which cost the
caller less than tensors:

    lse                  fp32 [total_q, num_q_heads], or 0
    other_out, other_lse as out and lse, what the result is merged with
    counter              a word, EMPTY before and after
    prefix_only          1 to leave out the queries' own tokens, else 0
    k_scale, v_scale     fp32 scales of formats that are given one, ``*_scale_stride`` elements from a KV head's to the
                         next one's (0: one for all); those of a head's columns lie together, aligned to 16 bytes
    block_table          int32 [batch, max_pages]
    max_pages            of a request; of unpacked keys the tokens that a request may have
    sinks, alibi_slopes  fp32 [num_q_heads]
    tree_mask            int32 [total_q, tree_words]
    num_splits           parts that the keys of every work tile are cut into
    partials             fp32 [num_splits, total_q, num_q_heads, head_dim], then [num_splits, total_q, num_q_heads] of
                         log2 sums: with more than one split what `COMBINE` reads, and out and lse are left to it
    tile_scales          of unpacked keys, as :class:`.loads.unpack.UnpackTarget` has them
    num_ctas             that are launched, at most as many as there are work tiles

Then the tensors of registered options, see :mod:`cute_kernels.formats.scores`.

Unpacking (`UNPACK`): caches, cu_seqlens, seq_lens, block_table, prefix_only as above; k_rows, v_rows [batch,
num_kv_heads, room, head_dim], contiguous, room whole tiles; others as :class:`.loads.unpack.UnpackSizes` and
:class:`.loads.unpack.UnpackTarget` have them.

Putting splits together (`COMBINE`): out, of which queries from ``cu_seqlens[-1]`` on are left alone; others as
:class:`.combine.splits.Parts` has them; num_splits at most 32.
"""

from __future__ import annotations

import functools

from cute_kernels.attention.features import Features
from cute_kernels.formats.scores import tensors_in
from cute_kernels.runtime.launch_arguments import Argument, LaunchArguments, arguments, joined

ATTENTION = joined(
    arguments("tensor", "q", "k_cache", "v_cache", "cu_seqlens", "seq_lens", "out"),
    arguments("address", "lse", "other_out", "other_lse", "counter"),
    arguments("int32", "prefix_only"),
    arguments("address", "k_scale", "v_scale"),
    arguments("int32", "k_scale_stride", "v_scale_stride"),
    (Argument("softmax_scale", "float32"), Argument("block_table", "address")),
    arguments("int32", "max_pages", "window"),
    (Argument("soft_cap", "float32"),),
    arguments("address", "sinks", "alibi_slopes", "tree_mask"),
    arguments("int32", "tree_words", "num_splits"),
    arguments("address", "partials", "tile_scales"),
    arguments("int32", "num_ctas"),
)
UNPACK = joined(
    arguments("tensor", "k_cache", "v_cache", "k_rows", "v_rows", "cu_seqlens", "seq_lens"),
    arguments("address", "tile_scales", "block_table"),
    arguments("int32", "max_pages", "total_q", "max_seq_len", "window", "prefix_only", "num_ctas"),
)
COMBINE = joined(
    arguments("tensor", "out", "cu_seqlens"),
    arguments("address", "partials", "lse", "sinks"),
    arguments("int32", "num_splits"),
)


@functools.lru_cache(maxsize=256)
def attention_arguments(features: Features) -> LaunchArguments:
    """Of a variant of attention with these features."""
    options = (Argument(each.name, "address") for each in tensors_in(features))
    return joined(ATTENTION.arguments, options)
