"""Checks of values that only the device knows: lengths, pages, slots, and where requests begin."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from cute_kernels.arguments import TOKENS_OF_TABLE, check_pages, checked_lengths
from cute_kernels.attention.call import AttentionCall


def check_device_values(call: AttentionCall) -> None:
    """Raises ValueError for the first invalid length or page. The message names the request, and the position if there
    is one.

    Reads lengths, and the pages that hold a token which some query sees, so it waits for the device.
    """
    if call.extends:
        _check_requests(call)
        return
    if call.blocks is not None:
        _check_blocks(call)
    room = "the cache's tokens" if call.block_table is None else TOKENS_OF_TABLE
    lengths = checked_lengths(call.seq_lens, call.max_seq_len, room)
    if call.tail is not None:
        slots, most = call.tail.slots.cpu(), call.tail.rows.shape[0]
        wrong = torch.nonzero((lengths > 0) & ((slots < 0) | (slots >= most)))
        if wrong.numel():
            request = int(wrong[0])
            raise ValueError(f"tail_slots: got {int(slots[request])} for request {request}, want 0 to {most - 1}")
    if call.block_table is None:
        return
    table = call.block_table.cpu()
    first = torch.arange(table.shape[1], device="cpu") * call.page_size  # token of each entry
    # From the first token that is seen in a page to after the last one there.
    last = torch.minimum(first + call.page_size, lengths[:, None])
    used = torch.maximum(first, call.first_seen(lengths)[:, None]) < last
    if call.blocks is not None:
        used &= call.blocks.seen(first.to(call.blocks.list.device)).any(dim=1).cpu()
    check_pages(table, used, call.page_size, call.num_blocks)


def _check_requests(call: AttentionCall) -> None:
    """Raises ValueError for the first invalid boundary, length or page. The message names the request, and the position
    if there is one.

    Reads where requests begin, lengths, and the pages that hold a token which some query sees, so it waits for the
    device.
    """
    assert call.cu_seqlens_q is not None
    ends, total = call.cu_seqlens_q.tolist(), call.q.shape[0]
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens_q: got {ends[0]} first, want 0")
    for request in range(call.batch):
        if not ends[request] <= ends[request + 1] <= total:
            raise ValueError(
                f"cu_seqlens_q: got {ends[request]} to {ends[request + 1]} for request {request}, want numbers that "
                f"do not fall, at most {total}, the queries of q"
            )
    if call.longest is not None and call.batch and int(longest := call.seq_lens.max()) > call.longest:
        request = call.seq_lens.tolist().index(int(longest))
        raise ValueError(
            f"seq_lens: got {int(longest)} for request {request}, want at most max_seq_len, {call.longest}"
        )
    for request in range(call.batch):
        own = call.request(request, slice(ends[request], ends[request + 1]))
        if not own.q_len:  # nobody looks at its pages
            own = replace(own, block_table=None)
        elif call.new is not None:
            length = int(own.seq_lens[0])
            if length < own.q_len:
                raise ValueError(
                    f"seq_lens: got {length} for request {request}, want at least {own.q_len}, its new tokens"
                )
            # The cache holds what lies before the queries; no query of the cache's own is after that.
            own = replace(own, seq_lens=own.seq_lens - own.q_len, q=own.q[:, :0])
        try:
            check_device_values(own)
        except ValueError as error:
            raise ValueError(str(error).replace("request 0", f"request {request}")) from None


def _check_blocks(call: AttentionCall) -> None:
    """Raises ValueError for invalid chosen blocks or counts. Reads all lists, so it waits for the device."""
    assert call.blocks is not None
    blocks, ends = call.blocks, call.cu_seqlens_q
    q_lens = [call.q_len] * call.batch if ends is None else ends.diff().tolist()
    chosen, counts, lengths = blocks.list.tolist(), blocks.counts.tolist(), call.seq_lens.tolist()
    for request, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        there = -(-length // blocks.tokens)
        own = range(max(length - q_len, 0) // blocks.tokens, there) if q_len > 1 and call.causal else range(0)
        for head, (entries, count) in enumerate(zip(chosen[request], counts[request], strict=True)):
            where = f"request {request}, KV head {head}"
            if not 0 <= count <= len(entries):
                raise ValueError(f"block_counts: got {count} for {where}, want 0 to {len(entries)}")
            row = entries[:count]
            if any(entry < 0 or entry >= there for entry in row) or any(a >= b for a, b in itertools.pairwise(row)):
                raise ValueError(f"block_list: got {row} for {where}, want ascending blocks from 0 to {there - 1}")
            if own and row[-len(own) :] != list(own):
                raise ValueError(
                    f"block_list: got {row} for {where}, want it to end with {list(own)}, blocks of the queries' own "
                    "tokens"
                )
