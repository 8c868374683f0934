"""A batch of cached sequences as device tensors with fixed addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cute_kernels.arguments import check_count
from cute_kernels.kv_cache.pages import PageTable, SeqId, SequencePages, check_distinct, per_sequence

UNMAPPED = -1
_NOTHING = SequencePages()


class Batch:
    """The block table and lengths of the sequences of one step, in buffers whose addresses never change.

    A captured CUDA graph reads these buffers; call `update` between replays to describe the next step. The host
    remembers what the buffers hold. So an update copies only changed lengths and changed entries of the block table, in
    one asynchronous copy, and never waits for the device. Call `update` outside the capture, on the stream that replays
    the graph.

    An engine keeps one batch for decoding and one for prefill. `KVCache.make_batch` makes them.

    Attributes:
        seq_ids: the sequences of the last update, in order; row i of the tensors is sequence i.
        num_new_tokens: for each sequence, the number of last tokens that this step writes.
        size: number of rows of the tensors.
        version: the page table's version at the last update.
        shared: a sequence whose new tokens must not be written, since they lie in pages that other sequences use, too;
            or None.
    """

    def __init__(
        self,
        pages: PageTable,
        max_batch: int,
        device: torch.device,
        slot_of: Callable[[SeqId], int] | None = None,
    ) -> None:
        check_count("max_batch", max_batch, 1)
        self._pages = pages
        self.max_batch = max_batch
        self.max_pages = -(-pages.max_seq_len // pages.page_size)
        if max_batch * self.max_pages >= 2**31:
            raise ValueError(f"max_batch: got {max_batch} rows of {self.max_pages} pages, want less than 2**31 entries")
        self._table = torch.full((max_batch, self.max_pages), UNMAPPED, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._starts = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self._slot_of = slot_of
        self._slots = None if slot_of is None else torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._host_slots = np.zeros(max_batch, dtype=np.int32)
        # What the buffers hold: of the table, each row's pages and the stamp of the page list they came from.
        self._host_pages: list[list[int]] = [[] for _ in range(max_batch)]
        self._host_stamps = [0] * max_batch
        self._host_lens = np.zeros(max_batch, dtype=np.int32)
        self._host_starts = np.zeros(max_batch + 1, dtype=np.int32)
        self.seq_ids: tuple[SeqId, ...] = ()
        self.num_new_tokens: tuple[int, ...] = ()
        self.size = 0
        self.version = -1
        self.shared: SeqId | None = None
        self._one_token_each = True

    def is_of(self, pages: PageTable) -> bool:
        """Returns whether the batch was made for the page table ``pages``."""
        return self._pages is pages

    @property
    def block_table(self) -> torch.Tensor:
        """int32 [size, max_pages]; -1 for entries without a page."""
        return self._table[: self.size]

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 [size]: tokens of each sequence, this step's new tokens included; 0 for padding."""
        return self._lens[: self.size]

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """int32 [size + 1]: where each row's new tokens begin; None if every row has exactly one new token."""
        return None if self._one_token_each else self._starts[: self.size + 1]

    @property
    def tail_slots(self) -> torch.Tensor | None:
        """int32 [size]: the slot of each sequence's newest keys, for caches whose keys are written in blocks; None for
        other caches.

        A padding row repeats the slot of another sequence; nothing is written there for the padding row.
        """
        return None if self._slots is None else self._slots[: self.size]

    def update(
        self, seq_ids: Sequence[SeqId], num_new_tokens: int | Sequence[int] = 1, *, pad_to: int | None = None
    ) -> Batch:
        """Describes the next step; returns the batch itself.

        Padding rows have length 0: attention returns 0 for them, and their tokens are not stored. So a graph that was
        captured with a larger batch can be replayed.

        Args:
            seq_ids: distinct sequences, already extended by their new tokens.
            num_new_tokens: how many of each sequence's last tokens are new: one count for all sequences, or one for
                each. With one count for all, padding rows have as many new tokens; otherwise they have none.
            pad_to: number of rows of the tensors; default: the number of sequences.

        Raises:
            ValueError: a sequence is unknown, is named twice or has fewer tokens than new tokens; or there are more
                than max_batch sequences.
        """
        check_distinct(seq_ids)
        counts = per_sequence("num_new_tokens", num_new_tokens, len(seq_ids))
        size = len(seq_ids) if pad_to is None else pad_to
        check_count("pad_to", size, 0)
        self._check_size(len(seq_ids), size)
        sequences = [self._pages[seq_id] for seq_id in seq_ids]
        for seq_id, sequence, count in zip(seq_ids, sequences, counts, strict=True):
            if count > sequence.length:
                raise ValueError(
                    f"num_new_tokens: got {count} for {seq_id!r}, want at most its {sequence.length} tokens"
                )
        free_rows = self.max_batch - len(seq_ids)
        lens = np.array([sequence.length for sequence in sequences] + [0] * free_rows, np.int32)
        row_counts = counts + [num_new_tokens if isinstance(num_new_tokens, int) else 0] * free_rows
        starts = np.cumsum([0, *row_counts], dtype=np.int32)
        slots = np.zeros(self.max_batch, np.int32)
        if self._slot_of is not None:
            slots[: len(seq_ids)] = [self._slot_of(seq_id) for seq_id in seq_ids]
        self._send(lens, starts, slots, self._changed_entries(sequences))
        self.seq_ids, self.num_new_tokens, self.size = tuple(seq_ids), tuple(counts), size
        self._one_token_each = row_counts[:size] == [1] * size
        self.version = self._pages.version
        self.shared = self._pages.first_shared(seq_ids, counts)
        return self

    def _check_size(self, num_sequences: int, size: int) -> None:
        if size < num_sequences:
            raise ValueError(f"pad_to: got {size}, want at least the {num_sequences} sequences")
        if size > self.max_batch:
            got = f"seq_ids: got {size} sequences" if size == num_sequences else f"pad_to: got {size}"
            raise ValueError(f"{got}, want at most max_batch {self.max_batch}")

    def _changed_entries(self, sequences: Sequence[SequencePages]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (flat indices, values) of the entries of the block table that differ from the device's copy."""
        indices, values = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        idle = itertools.repeat(_NOTHING, self.max_batch - len(sequences))
        for row, sequence in enumerate(itertools.chain(sequences, idle)):
            if self._host_stamps[row] == sequence.stamp:
                continue
            old, new = self._host_pages[row], list(sequence.pages)
            was, now = np.full((2, max(len(old), len(new))), UNMAPPED, np.int32)
            was[: len(old)], now[: len(new)] = old, new
            columns = np.flatnonzero(was != now)
            indices.append((row * self.max_pages + columns).astype(np.int32))
            values.append(now[columns])
            self._host_pages[row], self._host_stamps[row] = new, sequence.stamp
        return np.concatenate(indices), np.concatenate(values)

    def _send(
        self, lens: np.ndarray, starts: np.ndarray, slots: np.ndarray, entries: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Copies all changes to the device in one transfer. There they are written into the buffers."""
        indices, values = entries
        held = (self._host_lens, self._host_starts, self._host_slots)
        lens, starts, slots = (
            new[:0] if np.array_equal(new, old) else new for new, old in zip((lens, starts, slots), held, strict=True)
        )
        parts = (lens, starts, slots, indices, values)
        if not any(map(len, parts)):
            return
        packed = torch.from_numpy(np.concatenate(parts))
        if self._lens.is_cuda:  # its pinned memory is not used again before the copy is done
            packed = packed.pin_memory().to(self._lens.device, non_blocking=True)
        new_lens, new_starts, new_slots, flat, pages = packed.split([len(part) for part in parts])
        if len(lens):
            self._lens.copy_(new_lens)
            self._host_lens = lens
        if len(starts):
            self._starts.copy_(new_starts)
            self._host_starts = starts
        if len(slots) and self._slots is not None:
            self._slots.copy_(new_slots)
            self._host_slots = slots
        if len(indices):
            self._table.view(-1).index_put_((flat,), pages)
