"""Attention over BF16, FP16, INT8, FP8 and INT4 KV caches, contiguous or paged.

Decode (one to 16 queries a request: `decode`) and extend (any number of them: `extend`) are two kernels of one family:
modules say ``decode_`` or ``extend_`` where these differ, and `policies` and `loads` have what they are composed of.
Read on in `reference` (what both mean), `options` and `call` (checked arguments), `problem`, `decode_schedule` and
`extend_schedule`, their configurations, `plan`, `launches` and `ops`; `merge_states` joins results over parts of a
context, `mixed` takes batches of both kinds, `chosen_blocks` a list of blocks of each KV head.
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
