"""How kernels find what a KV head's list chooses, lane by lane: what PyTorch's operations find, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.plan import known_arguments, problem_of
from cute_kernels.device.division import Divisor
from cute_kernels.device.lists import Lists
from cute_kernels.device.pages import Pages
from simulator import LANES, Int32, Int64, Warp, running
from tests.attention.lists import HEADS, LISTS, odd_call, tables_of


def in_memory(*tensors: torch.Tensor | None) -> tuple[np.ndarray, list[int]]:
    """Global memory that holds int32 tensors with their strides, and the address of each; 0 for None."""
    words, places = [np.full(4, 77, np.int32)], []
    for tensor in tensors:
        base = tensor if tensor is None or tensor._base is None else tensor._base
        offset = 0 if tensor is None else tensor.storage_offset()
        places.append(0 if base is None else 4 * (sum(map(len, words)) + offset))
        words += [] if base is None else [base.numpy().ravel()]
    return np.concatenate(words).view(np.uint8), places


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("page_size, tokens", [(None, 64), (64, 64), (16, 128)])
def test_pages_and_tokens_are_those_of_pytorchs_operations(lists, page_size, tokens):
    checked, _ = odd_call(lists, page_size, tokens, batch=2)
    call, (want_pages, want_tokens) = checked.in_pages(), tables_of(checked)
    assert call.blocks is not None
    assert call.blocks.list.shape[2] * tokens == call.max_seq_len
    size, room = call.page_size, checked.max_seq_len // call.page_size
    given: Any = SimpleNamespace(**known_arguments(call, make_schedule(problem_of(call)))[0])
    memory, (listed, counts, table) = in_memory(call.blocks.list, call.blocks.counts, call.block_table)
    with running(Warp(np.zeros(64, np.uint8), memory)):
        numbers = {name: Int32(n) for name, n in vars(given).items() if isinstance(n, int)}
        addresses = {"block_list": Int64(listed), "block_counts": Int64(counts)}
        every = Lists.of(SimpleNamespace(**numbers | addresses))
        pages = Pages(Int64(table), Int32(given.table_stride), Int32(99), Divisor.of(Int32(size)), every)
        for head, request in np.ndindex(HEADS, 2):
            own, row, found = pages.of_row(Int32(request), Int32(head)), Int32(request), []
            for first in range(0, want_pages.shape[2], 32):
                entries = np.minimum(first + LANES, want_pages.shape[2] - 1)
                entry, place = map(np.asarray, own.ask(row, Int32(entries * size + 5)))
                found.append(entry if table else request * room + place // size)
                assert (place % size == 5).all() and (table or (entry == request).all())
            assert (np.concatenate(found)[: want_pages.shape[2]] == want_pages[head, request].numpy()).all()
            assert own.lists is not None
            length = own.lists.tokens(own.lists.ask_count(), Int32(int(call.seq_lens[request])))
            assert (np.asarray(length) == int(want_tokens[head * 2 + request])).all()
