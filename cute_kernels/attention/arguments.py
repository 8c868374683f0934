"""What decode attention's kernels are launched with: declared here, and nowhere else listed.

Tensors: q [batch, q_len, num_q_heads, head_dim], the first two strides free; out [batch, q_len, num_q_heads,
v_head_dim]; caches [blocks, tokens, num_kv_heads, row], or [blocks, num_kv_heads, tokens, row] if they are head-major,
8-bit codes as bytes, all strides free but that of a row's elements; a block is a page with ``block_table``, else a
request; seq_lens int32 [batch]. The others are addresses and numbers, which cost the caller less than tensors:

    lse                  fp32 [batch, q_len, num_q_heads], written if bit 0 of ``mode``
    workspace            fp32 [batch, num_splits, q_len, num_q_heads, 3/2 v_head_dim] (unnormalised values, then for
                         every 4 their maximum in powers of 2 and their sum), every word EMPTY before and after
    k_scale, v_scale     fp32 scales of formats that are given one, ``*_scale_stride`` elements from a KV head's to the
                         next one's (0: one for all); those of a head's columns lie together, aligned to 16 bytes
    mode                 bit 1: write and leave the partial results of all splits; bits from 8 on: log2 of the CTAs that
                         the GPU holds at a time
    more_rows            rows of CTAs (and of the workspace) beyond the batch, for more parts of long requests where
                         lengths differ; 0 to cut every row into num_splits whatever they are
    shares               of about equal size that all requests together are cut into where lengths differ
    block_table          int32 [batch, max_pages], rows table_stride entries apart
    sinks, alibi_slopes  fp32 [num_q_heads]
    bias                 fp32 or bf16, with its strides in elements
    q_shift              fp32 [batch, q_len, num_q_heads], which softmax_scale times is added to all scores of a query
    out_factor           fp32 [num_kv_heads, v_head_dim], aligned to 16 bytes, which the output is multiplied by once it
                         is turned back

    k_tail               fp16 [slots, 64, num_kv_heads, head_dim], of formats in blocks: the newest rows of K, by
                         position modulo 64
    tail_slots           int32 [batch]: which of these slots is a request's

Then the tensors of registered options, see :mod:`cute_kernels.formats.scores`.

Merging states (`MERGE`): outs [..., num_heads, head_dim], lses fp32 [..., num_heads].
"""

from __future__ import annotations

import functools

from cute_kernels.attention.features import PLAIN, Features
from cute_kernels.formats.scores import tensors_in
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
    *arguments("int32", "more_rows", "shares"),
    Argument("block_table", "address"),
    *arguments("int32", "max_pages", "table_stride", "window"),
    Argument("soft_cap", "float32"),
    *arguments("address", "sinks", "alibi_slopes", "bias"),
    *arguments("int64", *BIAS_STRIDES),
)
TRANSFORM = arguments("address", "q_shift", "out_factor")
TAIL = arguments("address", "k_tail", "tail_slots")
MERGE = joined(arguments("tensor", "out_a", "lse_a", "out_b", "lse_b", "out", "lse"))


@functools.lru_cache(maxsize=256)
def arguments_of(features: Features, paged: bool) -> LaunchArguments:
    """Of a variant with these features; paged: whether its caches are."""
    of_features = FEATURES if features != PLAIN or paged else ()
    of_transform = TRANSFORM if features.transformed else ()
    of_tail = TAIL if features.tail else ()
    of_terms = (Argument(each.name, "address") for each in tensors_in(features))
    return joined(BASE, of_features, of_transform, of_tail, of_terms)
