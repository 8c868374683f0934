"""Attention over BF16, FP16, INT8, FP8 and INT4 KV caches, contiguous or paged.

Decode attention takes 1 to 16 queries a request (`decode`), extend attention any number (`extend`). They are two
kernels of one family. A module's name begins with ``decode_`` or ``extend_`` if only one of them uses it; `loads` has
the copies of both. Read on in `reference` (what both compute), `options` and `call` (checked arguments), `problem`,
`decode_schedule` and `extend_schedule`, their configurations, `plan`, `launches` and `ops`. `merge_states` joins
results over parts of a context. `mixed` takes batches of decode and extend requests.
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
