"""`KeyTails`, the rings of newest keys that a `KVCache` with keys in blocks has, and the sequence that owns each
ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache.cache_checks import sees_shift
from cute_kernels.kv_cache.pages import PageTable, SeqId
from layouts.kv.channel_blocks import BLOCK_TOKENS, TAIL_TOKENS

APPEND_OPTIONS = ("qkv_bias", "rope", "position_ids", "q_norm", "k_norm", "norm_eps")


class KeyTails:
    """One ring of 64 keys for each sequence (`layouts.kv.channel_blocks`). A ring's index is its slot.

    Once newer keys have overwritten a full block in the ring, the block exists only in the cache, in 4 bits. So a
    sequence can be cut back to the start of any block, or to any token of a block that the ring still has.

    Args:
        form: the format of the keys.
        shape: (layers, sequences at a time, KV heads, head_dim).
        page_size: tokens of a page, a multiple of a block's tokens.

    Attributes:
        rows: fp16 [layers, sequences, 64, KV heads, head_dim]. rows[layer] is the k_tail of `append_kv`.

    Raises ValueError unless page_size is a multiple of a block's tokens.
    """

    def __init__(
        self, form: KvFormat, shape: tuple[int, int, int, int], page_size: int, device: torch.device | str | None
    ) -> None:
        layers, self.max_seqs, heads, head_dim = shape
        if page_size % form.block_tokens:
            raise ValueError(
                f"page_size: got {page_size}, want a multiple of {form.block_tokens} for {form.name}: a page holds "
                "whole blocks"
            )
        self.rows = torch.zeros(layers, self.max_seqs, TAIL_TOKENS, heads, head_dim, dtype=torch.float16, device=device)
        self._free = list(range(self.max_seqs - 1, -1, -1))
        self._slots: dict[SeqId, int] = {}
        self._first: dict[SeqId, int] = {}  # position of the oldest row that the ring has

    def slot(self, seq_id: SeqId) -> int:
        """Returns a sequence's slot."""
        return self._slots[seq_id]

    def check_free(self, name: str, seq_id: SeqId) -> None:
        """Raises ValueError, naming the argument ``name``, unless there is a slot for one more sequence."""
        if not self._free:
            raise ValueError(
                f"{name}: got {seq_id!r} beside {len(self._slots)} sequences, want at most max_seqs {self.max_seqs} at "
                "a time: free one first"
            )

    def add(self, seq_id: SeqId) -> None:
        """Gives a new sequence a slot."""
        self._slots[seq_id], self._first[seq_id] = self._free.pop(), 0

    def fork(self, seq_id: SeqId, new_id: SeqId) -> None:
        """Gives a new sequence a slot, and copies another sequence's ring to it."""
        self.add(new_id)
        self._first[new_id] = self._first[seq_id]
        self.rows[:, self._slots[new_id]].copy_(self.rows[:, self._slots[seq_id]])

    def free(self, seq_id: SeqId) -> None:
        """Frees a sequence's slot."""
        self._free.append(self._slots.pop(seq_id))
        del self._first[seq_id]

    def lengthened(self, pages: PageTable, seq_ids: Sequence[SeqId]) -> None:
        """Notes that sequences have become longer. A ring then holds the newest block and the block before it."""
        for seq_id in seq_ids:
            oldest = (pages[seq_id].length - 1) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
            self._first[seq_id] = max(self._first[seq_id], oldest)

    def check_truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Raises ValueError if the sequence would end inside a block that its ring no longer has."""
        first = self._first[seq_id]
        if num_tokens % BLOCK_TOKENS and num_tokens // BLOCK_TOKENS * BLOCK_TOKENS < first:
            raise ValueError(
                f"num_tokens: got {num_tokens} for {seq_id!r}, want a multiple of {BLOCK_TOKENS} or at least {first}: "
                "keys of older blocks are there in 4 bits alone"
            )

    def truncated(self, seq_id: SeqId, num_tokens: int) -> None:
        """Notes that a sequence has been cut back to ``num_tokens`` tokens."""
        if num_tokens % BLOCK_TOKENS == 0:
            self._first[seq_id] = min(self._first[seq_id], num_tokens)

    def waiting(self, layer: int, seq_id: SeqId, length: int) -> torch.Tensor:
        """Returns fp16 [length % 32, KV heads, head_dim]: the keys of the sequence's last block, which is not full."""
        positions = torch.arange(length // BLOCK_TOKENS * BLOCK_TOKENS, length, device=self.rows.device)
        return self.rows[layer, self._slots[seq_id], positions % TAIL_TOKENS]


def append_then_attend(
    append: Callable[..., torch.Tensor | None],
    attend: Callable[..., Any],
    transform: CacheTransform | None,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> Any:
    """Appends to a cache with keys in blocks, then attends: `KVCache.append_and_attend` for such a cache. The two
    launches cannot run concurrently, since a third launch between them fills blocks.

    Args:
        append, attend: the methods of a `KVCache`, for one layer and batch.
        transform: the layer's transform.
        qkv, options: as for `KVCache.append_and_attend`.
    """
    q, k, v = qkv
    for_append = {name: options.pop(name) for name in APPEND_OPTIONS if name in options}
    if (positions := for_append.get("position_ids")) is not None:
        for_append["position_ids"] = positions.flatten()
    of_q: dict[str, Any] = {}
    if transform is not None:
        of_q["q_transformed"] = True
        if sees_shift(options) and transform.k_center is not None:
            of_q["q_shift"] = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            for_append["q_shift"] = of_q["q_shift"].flatten(0, 1)
    turned = append(k.flatten(0, 1), v.flatten(0, 1), q=q.flatten(0, 1), **for_append)
    assert turned is not None
    return attend(turned.view(q.shape), **of_q, **options)
