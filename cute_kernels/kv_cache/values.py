"""The checks of an append's values in debug mode: lengths, pages and slots. They wait for the device."""

from __future__ import annotations

import itertools

import torch

from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.reference import places, requests_of


def check_append_values(call: AppendCall, may_be_shorter: bool = False) -> None:
    """Raises ValueError if two tokens would be written to one place, or a token has no place in the cache. The message
    names request and position, or the token.

    Tokens with slot -1, and tokens after the last request, need no place.

    may_be_shorter: whether a request's length may be less than its number of new tokens. The first new tokens then need
    no place.
    """
    if call.cu_seqlens is not None:
        _check_bounds(call)
    if not call.has_places:
        return
    if call.seq_lens is not None and call.slot_mapping is None:
        _check_lengths(call, may_be_shorter)
    _, pages, rows = places(call)
    _check_pages(call, pages)
    _check_duplicates(call, pages, rows)


def _check_bounds(call: AppendCall) -> None:
    assert call.cu_seqlens is not None
    bounds = call.cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > call.num_tokens:
        raise ValueError(
            f"cu_seqlens: got {bounds[0]} to {bounds[-1]}, want it to begin with 0 and end with at most "
            f"{call.num_tokens}, the tokens of k"
        )
    for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end < begin:
            raise ValueError(f"cu_seqlens: request {request}: got {begin} to {end}, want no less than it begins with")


def _check_lengths(call: AppendCall, may_be_shorter: bool) -> None:
    assert call.seq_lens is not None
    new = torch.ones_like(call.seq_lens) if call.cu_seqlens is None else call.cu_seqlens.diff()
    room = call.page_size * (1 if call.block_table is None else call.block_table.shape[1])
    holder = "the cache" if call.block_table is None else "block_table"
    for request, (length, count) in enumerate(zip(call.seq_lens.tolist(), new.tolist(), strict=True)):
        # A length of 0 appends nothing: rows that pad a batch for a graph.
        if length and length < count and not may_be_shorter:
            raise ValueError(
                f"seq_lens: request {request}: got length {length} after an append of {count} tokens, want at least "
                f"{count}"
            )
        if count and length > room:
            raise ValueError(
                f"seq_lens: request {request}, position {length - 1}: got length {length}, want at most {room}, what "
                f"{holder} has room for"
            )


def _check_pages(call: AppendCall, pages: torch.Tensor) -> None:
    lost = pages < 0
    if call.slot_mapping is not None:
        lost = lost & (call.slot_mapping != -1)
    elif call.seq_lens is not None:
        request, ahead = requests_of(call)
        lost = lost & (request >= 0) & (call.seq_lens[request] >= ahead)
    if not lost.any():
        return
    token = int(lost.nonzero()[0])
    if call.slot_mapping is not None:
        slot, room = int(call.slot_mapping[token]), call.num_pages * call.page_size
        raise ValueError(f"slot_mapping: token {token}: got {slot}, want -1 or 0 to {room - 1}, the cache's tokens")
    request, position = _request_and_position(call, token)
    assert call.block_table is not None
    page = int(call.block_table[request, position // call.page_size])
    raise ValueError(
        f"block_table: request {request}, position {position}: got page {page}, want 0 to {call.num_pages - 1}"
    )


def _check_duplicates(call: AppendCall, pages: torch.Tensor, rows: torch.Tensor) -> None:
    slots = torch.where(pages >= 0, pages * call.page_size + rows, -1)
    ordered, order = slots.sort(stable=True)
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if not same.any():
        return
    at = int(same.nonzero()[0])
    first, second = (_name(call, int(order[at + i])) for i in range(2))
    slot = int(ordered[at])
    name = "slot_mapping" if call.slot_mapping is not None else "block_table"
    raise ValueError(
        f"{name}: {first} and {second} both go to page {slot // call.page_size}, row {slot % call.page_size} (slot "
        f"{slot}), want a place for each"
    )


def _request_and_position(call: AppendCall, token: int) -> tuple[int, int]:
    assert call.seq_lens is not None
    request, ahead = (int(value[token]) for value in requests_of(call))
    return request, int(call.seq_lens[request]) - ahead


def _name(call: AppendCall, token: int) -> str:
    if call.slot_mapping is not None:
        return f"token {token}"
    request, position = _request_and_position(call, token)
    return f"request {request}, position {position}"
