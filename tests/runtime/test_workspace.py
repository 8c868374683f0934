"""Who gets which words of a workspace, and for how long; with captures that are no CUDA's, on a CPU."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.runtime import captures, workspace
from cute_kernels.runtime.workspace import EMPTY, Memory, WorkspacePool

SLAB = 1 << 12
FIRST = 1 << 6
STREAM, OTHER = 11, 12


class Graphs:
    """Stands for CUDA: at most one capture in progress, graphs that live until they are destroyed."""

    def __init__(self) -> None:
        self.capture: int | None = None
        self.living: set[int] = set()
        self.watched = 0
        self.filled: list[weakref.ref[torch.Tensor]] = []

    def begin(self) -> int:
        self.capture = len(self.living) + self.watched + 1000 * len(self.filled) + max(self.living, default=0) + 1
        self.living.add(self.capture)
        return self.capture

    def is_capturing(self) -> bool:
        return self.capture is not None

    def capture_of(self, stream: int) -> Graphs.Capture:
        assert self.capture is not None
        return Graphs.Capture(self, self.capture)

    def fill(self, device_index: int, num_words: int) -> torch.Tensor:
        words = torch.full((num_words,), EMPTY, dtype=torch.int32)
        self.filled.append(weakref.ref(words))
        return words

    def pool(self) -> WorkspacePool:
        """One whose memory and captures these are."""
        memory = Memory(self.is_capturing, self.capture_of, self.fill, lambda index: None, FIRST, SLAB)
        return WorkspacePool(memory)

    class Capture:
        def __init__(self, graphs: Graphs, identity: int) -> None:
            self.graphs, self.identity = graphs, identity

        def watch(self):
            self.graphs.watched += 1
            return lambda: self.identity not in self.graphs.living


def living(graphs: Graphs) -> list[torch.Tensor]:
    """What somebody still has."""
    gc.collect()
    return [words for words in (made() for made in graphs.filled) if words is not None]


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def test_a_stream_has_one_buffer_and_others_another(graphs):
    pool = graphs.pool()
    first = pool.get(0, STREAM, 5)
    assert pool.get(0, STREAM, FIRST) == first
    assert len({first, pool.get(0, OTHER, 5), pool.get(1, STREAM, 5)}) == 3


def test_a_buffer_that_was_outgrown_is_kept_and_all_are_less_than_twice_the_last(graphs):
    """Somebody may have its address and not have launched yet."""
    pool = graphs.pool()
    addresses = [pool.get(0, STREAM, size) for size in range(1, 40 * FIRST)]
    assert addresses == sorted(addresses, key=addresses.index)
    buffers = {words.data_ptr(): words.numel() for words in living(graphs) if words is not pool._slabs[0].words}
    assert buffers.keys() == set(addresses)
    sizes = sorted(buffers.values())
    assert sum(sizes) < 2 * sizes[-1] and len(sizes) == 7


def test_threads_that_ask_for_more_at_once_get_buffers_that_stay(graphs):
    pool, found = graphs.pool(), []
    start = threading.Barrier(8)

    def work(size: int) -> None:
        start.wait()
        found.extend(pool.get(0, STREAM, size * step) for step in range(1, 200))

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) <= {words.data_ptr() for words in living(graphs)}


def test_captures_one_after_the_other_take_no_more_than_one(graphs):
    """A thousand graphs, each destroyed when the next one is there, as where a model is captured again and again."""
    pool = graphs.pool()
    pool.get(0, STREAM, 1)
    addresses, last = set(), None
    for _ in range(1000):
        graph = graphs.begin()
        addresses.add(pool.get(0, STREAM, SLAB // 4))
        graphs.capture = None
        graphs.living.discard(last)
        last = graph
    assert len(addresses) == 2 and len(living(graphs)) == 2


def test_a_thousand_graphs_that_fill_their_own_are_not_held(graphs):
    """Without a launch before there is no slab; torch frees the memory with the graph."""
    pool = graphs.pool()
    for i in range(1000):
        graphs.begin()
        pool.get(0, STREAM, 100)
        pool.get(0, STREAM, 1000)
        assert i % 250 or len(living(graphs)) == 2  # for launches that have the one, and those that have the other
        graphs.capture = None
    assert len(living(graphs)) == 2


def test_a_capture_that_needs_more_keeps_what_it_had(graphs):
    pool = graphs.pool()
    pool.get(0, STREAM, 1)
    graph = graphs.begin()
    small, large = pool.get(0, STREAM, 100), pool.get(0, STREAM, 500)
    assert small != large and pool.get(0, STREAM, 10) == large
    graphs.begin()
    other = pool.get(0, STREAM, SLAB - 600 - 200)
    graphs.living.discard(graph)
    graphs.begin()
    assert other not in (small, large) and pool.get(0, STREAM, 500) == small  # both pieces are one again


def test_two_streams_of_one_capture_do_not_share(graphs):
    pool = graphs.pool()
    pool.get(0, STREAM, 1)
    graphs.begin()
    one, two = pool.get(0, STREAM, 64), pool.get(0, OTHER, 64)
    assert one != two and (pool.get(0, STREAM, 64), pool.get(0, OTHER, 64)) == (one, two)


def test_where_the_slab_is_taken_a_graph_fills_its_own(graphs):
    pool = graphs.pool()
    pool.get(0, STREAM, 1)
    graphs.begin()
    pool.get(0, STREAM, SLAB)
    before = len(graphs.filled)
    graphs.begin()
    pool.get(0, STREAM, 64)
    assert len(graphs.filled) == before + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cdg"), st.integers(1, SLAB // 3), st.integers(0, 10)), max_size=60))
def test_words_belong_to_one_living_graph_at_a_time(steps):
    """Begin a capture (c), ask for words (g), destroy a graph (d), in any order."""
    graphs = Graphs()
    pool = graphs.pool()
    eager = pool.get(0, STREAM, 1)
    slab = pool._slabs[0]
    taken: dict[int, set[range]] = {}
    for kind, size, which in steps:
        if kind == "c":
            taken[graphs.begin()] = set()
        elif kind == "d" and taken:
            graph = list(taken)[which % len(taken)]
            graphs.living.discard(graph)
            del taken[graph]
            graphs.capture = None if graphs.capture == graph else graphs.capture
        elif kind == "g" and graphs.capture is not None:
            address = pool.get(0, STREAM, size)
            assert address != eager and address % 4 == 0
            first = (address - slab.words.data_ptr()) // 4
            if 0 <= first < SLAB:
                assert first % 64 == 0 and first + size <= SLAB
                taken[graphs.capture].add(range(first, first + size))
        words = [word for pieces in taken.values() for piece in merged(pieces) for word in piece]
        assert len(words) == len(set(words)), "words of two graphs"
    for graph in list(taken):
        graphs.living.discard(graph)
    pool._collect()
    assert slab.free == [(0, SLAB)]


def merged(pieces: set[range]) -> list[range]:
    """Of one graph: what it asked for at one address."""
    longest: dict[int, range] = {}
    for piece in pieces:
        longest[piece.start] = max(piece, longest.get(piece.start, piece), key=len)
    return list(longest.values())


def test_a_semaphore_is_posted_by_c_code_that_knows_its_address():
    import ctypes

    semaphore = captures._Semaphore()
    assert not semaphore.is_posted()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(semaphore.post_address)(semaphore.address)
    assert semaphore.is_posted() and semaphore.address is None and semaphore.is_posted()


def test_counters_are_filled_long_before_a_launch():
    """A launch whose CTAs count before they wait for the launch before finds none that is being filled."""
    waited: list[int] = []
    memory = workspace.Memory(
        is_capturing=lambda: False,
        filled=lambda device, count: torch.full((count,), workspace.EMPTY),
        synchronize=waited.append,
    )
    assert (workspace.settled(memory)(0, 5) == workspace.EMPTY).all() and waited == [0]
    with pytest.raises(workspace.UnsettledError, match="capture"):
        workspace.settled(replace(memory, is_capturing=lambda: True))(0, 5)
