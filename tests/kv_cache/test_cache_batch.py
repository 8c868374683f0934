"""`Batch`: device tensors that stay where they are and are sent only what has changed."""

from typing import Any, cast

import pytest
import torch

from cute_kernels.kv_cache import KVCache
from cute_kernels.kv_cache import batch as batches


def make_cache(**options):
    return KVCache(1, 16, 16, 1, 64, kv_format="bf16", max_seq_len=64, **options)


@pytest.fixture
def sent(monkeypatch):
    """How many numbers each update sends to the device."""
    counts = []
    from_numpy = torch.from_numpy

    def counted(array):
        counts.append(len(array))
        return from_numpy(array)

    monkeypatch.setattr(batches.torch, "from_numpy", counted)
    return counts


def test_the_tensors_say_where_each_sequences_tokens_lie():
    cache = make_cache()
    cache.allocate("a", 20)
    cache.allocate("b", 0)
    batch = cache.make_batch(4).update(["b", "a"], 0)
    assert batch.seq_lens.tolist() == [0, 20] and batch.seq_lens.dtype == torch.int32
    assert batch.block_table.tolist() == [[-1] * 4, [*cache.page_ids("a"), -1, -1]]
    assert batch.block_table.dtype == torch.int32 and batch.size == 2


def test_one_token_each_needs_no_cu_seqlens():
    cache = make_cache()
    for name in "abc":
        cache.allocate(name, 5)
    batch = cache.make_batch(8)
    assert batch.update("abc").cu_seqlens is None
    for counts, want in ((2, [0, 2, 4, 6]), ([1, 3, 0], [0, 1, 4, 4])):
        found = batch.update("abc", counts).cu_seqlens
        assert found is not None and found.tolist() == want and found.dtype == torch.int32


def test_addresses_never_change_and_padding_is_empty():
    cache = make_cache()
    for name in "abc":
        cache.allocate(name, 17)
    batch = cache.make_batch(4).update("abc", 2, pad_to=4)
    addresses = [x.data_ptr() for x in (batch.block_table, batch.seq_lens, batch.cu_seqlens) if x is not None]
    assert batch.seq_lens.tolist() == [17, 17, 17, 0] and batch.block_table[3].tolist() == [-1] * 4
    cache.extend_all("ac", 20)
    batch.update("ca", 2, pad_to=4)
    assert [x.data_ptr() for x in (batch.block_table, batch.seq_lens, batch.cu_seqlens) if x is not None] == addresses
    assert batch.seq_lens.tolist() == [37, 37, 0, 0] and batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 6, 8]
    assert batch.block_table[:, 0].tolist() == [cache.page_ids("c")[0], cache.page_ids("a")[0], -1, -1]


def test_rows_that_a_smaller_batch_leaves_are_emptied_too():
    """A graph captured at the larger batch would go on writing the pages of sequences that have left."""
    cache = make_cache()
    for name in "ab":
        cache.allocate(name, 5)
    batch = cache.make_batch(2).update("ab")
    whole_lens, whole_table = batch.seq_lens, batch.block_table
    cache.free("b")
    batch.update("a")
    assert whole_lens.tolist() == [5, 0] and whole_table[1].tolist() == [-1] * 4


def test_a_step_sends_lengths_and_new_pages_only(sent):
    cache = make_cache()
    for name in "abc":
        cache.allocate(name, 15)
    batch = cache.make_batch(3).update("abc")
    assert sent == [3 + 4 + 2 * 3]  # lengths, starts, and an index and a value for each sequence's page
    batch.update("abc")
    assert len(sent) == 1  # nothing has changed
    cache.extend_all("abc")
    batch.update("abc")
    assert sent[1:] == [3]  # within their pages
    cache.extend_all("ab")
    batch.update("abc")
    assert sent[2:] == [3 + 2 * 2]  # two of them have a second page


def test_a_name_used_again_is_another_sequence():
    cache = make_cache()
    cache.allocate("a", 16)
    batch = cache.make_batch(1).update(["a"])
    first = cache.page_ids("a")
    cache.free("a")
    cache.allocate("other", 16)
    cache.allocate("a", 16)
    assert cache.page_ids("a") != first
    assert batch.update(["a"]).block_table[0, 0] == cache.page_ids("a")[0]


def test_bad_updates_are_refused_and_change_nothing():
    cache = make_cache()
    for name in "abc":
        cache.allocate(name, 2)
    batch = cache.make_batch(2).update("ab")
    for refused, message in (
        (lambda: batch.update("abc"), "seq_ids: got 3 sequences, want at most max_batch 2"),
        (lambda: batch.update("a", pad_to=3), "pad_to: got 3, want at most max_batch 2"),
        (lambda: batch.update("ab", pad_to=1), "pad_to: got 1, want at least the 2 sequences"),
        (lambda: batch.update("aa"), "seq_ids: got 'a' twice"),
        (lambda: batch.update("ad"), "seq_id: got 'd'"),
        (lambda: batch.update("ab", [1]), "num_new_tokens: got 1 counts, want 2"),
        (lambda: batch.update("ab", [1, 3]), "num_new_tokens: got 3 for 'b', want at most its 2 tokens"),
        (lambda: batch.update("ab", -1), "num_new_tokens: got -1, want at least 0"),
        (lambda: cache.make_batch(0), "max_batch: got 0, want at least 1"),
        (lambda: batch.update("a", pad_to=cast(Any, 2.0)), "pad_to: got 2.0, want an int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            refused()
    assert batch.seq_ids == ("a", "b") and batch.seq_lens.tolist() == [2, 2]
