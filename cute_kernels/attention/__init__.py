"""Attention over BF16, FP16, INT8, FP8 and INT4 KV caches, contiguous or paged.

Decode (one to 16 queries a request: `decode`) and extend (any number of them: `extend`) are two shapes of one family.
Read on in `reference` (what they mean), `call` (what a checked call is), `problem`, `schedule`, `config`, `plan`, `ops`
and `kernel`; `merge_states` joins results over parts of a context, `mixed` serves batches of both kinds.
"""

from cute_kernels.attention.decode import decode_attention, decode_attention_splits
from cute_kernels.attention.extend import extend_attention, pack_tree_mask
from cute_kernels.attention.merge_states import merge_over_ranks, merge_states
from cute_kernels.attention.mixed import mixed_attention

__all__ = [
    "decode_attention",
    "decode_attention_splits",
    "extend_attention",
    "merge_over_ranks",
    "merge_states",
    "mixed_attention",
    "pack_tree_mask",
]
