"""The arguments that attention's kernels are launched with.

Decode attention (`decode_arguments`) takes these tensors. q: [batch, q_len, num_q_heads, head_dim], the first two
strides free. out: [batch, q_len, num_q_heads, v_head_dim]. Caches: [blocks, tokens, num_kv_heads, row], or [blocks,
num_kv_heads, tokens, row] if they are head-major. 8-bit codes are passed as bytes. Rows are contiguous; other strides
are free. With ``block_table`` a block is a page, without it a request's tokens. seq_lens: int32 [batch]. The other
arguments are addresses and integers, which take the host less time than tensors:

    lse                  fp32 [batch, q_len, num_q_heads], written if bit 0 of ``mode`` is set
    workspace            fp32 [batch, num_splits, q_len, num_q_heads, 3/2 v_head_dim]: v_head_dim unnormalised
                         outputs, then for every 4 of them a copy of the split's softmax maximum (an exponent of 2) and
                         sum. A launch finds every word EMPTY, and leaves it so
    k_scale, v_scale     fp32 scales beside the cache, those of successive KV heads ``*_scale_stride`` elements apart
                         (0: one scale for all heads); a head's column scales are contiguous, aligned to 16 bytes
    mode                 bit 0: write lse; bit 1: leave the partial results of all splits in the workspace; bits from 8
                         on: log2 of the most CTAs that may combine a row
    more_rows            rows of CTAs beyond the batch, so that there is a CTA for each range
    ranges               how many ranges the tiles of all requests are cut into if lengths differ; 0 if every row
                         is cut into num_splits parts, whatever the lengths
    block_table          int32 [batch, max_pages], rows table_stride entries apart
    sinks, alibi_slopes  fp32 [num_q_heads]
    bias                 fp32 or bf16, with its strides in elements
    q_shift              fp32 [batch, q_len, num_q_heads]; softmax_scale times it is added to all scores of a query
    out_factor           fp32 [num_kv_heads, v_head_dim], aligned to 16 bytes; the output is multiplied by it once V's
                         rotation is undone

    k_tail               fp16 [slots, 64, num_kv_heads, head_dim], for K formats in blocks: the newest rows of K, by
                         position modulo 64
    tail_slots           int32 [batch]: each request's slot of k_tail

    block_list           int32 [batch, num_kv_heads, max_blocks], with its strides in elements: the blocks of
                         block_tokens tokens that each KV head reads
    block_counts         int32 [batch, num_kv_heads], with its strides in elements
    page_size            tokens of a page; block_tokens if block_table is 0

Then the tensors of registered options, see :mod:`cute_kernels.formats.scores`.

Extend attention (`extend_arguments`) takes these tensors. q, out: [total_q, num_q_heads, head_dim], q's first stride
free. Caches: as above; ragged K and V are one block of all tokens. cu_seqlens: int32 [batch + 1]. seq_lens: int32
[batch]; with ragged K and V [batch + 1], where each request's keys begin. Arguments that are not listed are as above:

    lse                  fp32 [total_q, num_q_heads], or 0
    other_out, other_lse a result to merge with, shaped as out and lse
    counter              a word; a launch finds it EMPTY, and leaves it so
    prefix_only          1 to leave out the queries' own tokens, else 0
    block_table          int32 [batch, max_pages], contiguous
    max_pages            pages of a request; with unpacked keys, tokens that a request may have
    tree_mask            int32 [total_q, tree_words]
    num_splits           number of parts that the keys of every work tile are cut into
    partials             fp32 [num_splits, total_q, num_q_heads, head_dim], then [num_splits, total_q, num_q_heads] of
                         log2 sums. With more than one split the launch writes only these, for `COMBINE` to read
    tile_scales          of unpacked keys, see :class:`.loads.unpack.UnpackTarget`
    num_ctas             CTAs that are launched, at most one for each work tile

Unpacking (`UNPACK`): caches, cu_seqlens, seq_lens, block_table, prefix_only as above; k_rows, v_rows [batch,
num_kv_heads, room, head_dim], contiguous; room is a number of whole tiles. :class:`.loads.unpack.UnpackSizes` and
:class:`.loads.unpack.UnpackTarget` describe the others.

Combining parts (`COMBINE`): out [..., num_heads, head_dim]. last: for splits, the address of an int32 that says how
many queries to write. num_parts: at most 32. :class:`.combine.kernel.Parts` describes the others.
"""

from __future__ import annotations

import functools

from cute_kernels.formats.scores import tensors_in
from cute_kernels.formats.scores.features import PLAIN, Features
from cute_kernels.runtime.launch_arguments import Argument, LaunchArguments, arguments, joined

BIAS_STRIDES = ("bias_stride_request", "bias_stride_query", "bias_stride_head", "bias_stride_key")
BASE = (
    *arguments("tensor", "q", "k_cache", "v_cache", "seq_lens", "out"),
    *arguments("address", "lse", "workspace", "k_scale", "v_scale"),
    *arguments("int32", "k_scale_stride", "v_scale_stride"),
    Argument("softmax_scale", "float32"),
    *arguments("int32", "num_splits", "mode"),
)
FEATURES = (
    *arguments("int32", "more_rows", "ranges"),
    Argument("block_table", "address"),
    *arguments("int32", "max_pages", "table_stride", "window"),
    Argument("soft_cap", "float32"),
    *arguments("address", "sinks", "alibi_slopes", "bias"),
    *arguments("int64", *BIAS_STRIDES),
)
TRANSFORM = arguments("address", "q_shift", "out_factor")
TAIL = arguments("address", "k_tail", "tail_slots")
LIST_STRIDES = ("list_stride_request", "list_stride_head", "list_stride_block")
LIST_STRIDES += ("count_stride_request", "count_stride_head")
LISTS = (
    *arguments("address", "block_list", "block_counts"),
    *arguments("int64", *LIST_STRIDES),
    *arguments("int32", "max_blocks", "block_tokens", "page_size"),
)

EXTEND = joined(
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
    arguments("tensor", "out"),
    arguments("address", "values", "sums"),
    arguments("int64", "value_stride", "sum_stride"),
    arguments("address", "lse", "sinks", "last"),
    arguments("int32", "num_parts"),
)


@functools.lru_cache(maxsize=256)
def decode_arguments(features: Features, paged: bool) -> LaunchArguments:
    """Returns the launch arguments of decode attention's variant with ``features``. paged: whether the caches are
    paged."""
    of_features = FEATURES if features != PLAIN or paged else ()
    of_transform = TRANSFORM if features.transformed else ()
    of_tail = TAIL if features.tail else ()
    of_lists = LISTS if features.by_head else ()
    of_terms = (Argument(each.name, "address") for each in tensors_in(features))
    return joined(BASE, of_features, of_transform, of_tail, of_lists, of_terms)


@functools.lru_cache(maxsize=256)
def extend_arguments(features: Features) -> LaunchArguments:
    """Returns the launch arguments of extend attention's variant with ``features``."""
    options = (Argument(each.name, "address") for each in tensors_in(features))
    return joined(EXTEND.arguments, LISTS if features.by_head else (), options)
