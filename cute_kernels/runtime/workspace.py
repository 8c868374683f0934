"""Scratch memory of split kernels: a grow-only buffer per device and stream, every word EMPTY between launches.

Kernels on one stream run one after the other, so they may share a buffer. Each leaves the words that it used EMPTY. A
captured graph may be replayed on any stream at any time. So a graph has buffers of its own: one for its launches on
each stream. Such a buffer is a piece of a slab that was filled in advance. Or it is memory from the graph's own pool,
which the graph fills in each replay.

A buffer is freed at one of these times:

- A stream's buffer lives as long as the process, even if it became too small: another thread may have its address and
  not have launched yet. Sizes at least double, so all buffers of a stream together are less than twice the last buffer.
- A graph's piece lives as long as the graph and every executable graph made from it. CUDA holds a *user object* for the
  piece (:mod:`cute_kernels.runtime.captures`), and releases it once all of these graphs are destroyed and have run.
  Then the next capture may take the piece, which each replay leaves EMPTY. So memory is needed only for graphs that
  exist at the same time.
- Memory that a graph fills itself lives in the graph's memory pool, which torch frees with the graph. `WorkspacePool`
  holds it until a later capture needs a buffer on the same stream, so that the graph uses it for nothing else.
- A program that never replays two of its graphs at a time calls `share_among_captures`. The graphs captured on one
  stream then share a piece that is never given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cute_kernels.device.cuda import EMPTY_WORD
from cute_kernels.runtime.captures import capture_of

EMPTY = EMPTY_WORD - 2**32  # as int32: what CTAs wait to see overwritten
_WORDS = 1 << 18  # per stream, at first
_GRAPH_SLAB = 1 << 23  # words set aside, per device, for captured launches
_SHARED_WORDS = 1 << 20  # of them, at first, for a stream whose graphs share
_PIECE = 64  # words that pieces are multiples of: each starts on 256 bytes


@dataclass
class _Slab:
    """The words of one tensor. free: the free ranges (first, end) of words, in order, with used words between any two
    of them.
    """

    words: torch.Tensor
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, num_words: int) -> int | None:
        """Takes ``num_words`` consecutive free words. Returns the first word's index; None if no range is large
        enough."""
        for i, (first, end) in enumerate(self.free):
            if end - first >= num_words:
                self.free[i : i + 1] = [(first + num_words, end)] if end - first > num_words else []
                return first
        return None

    def give_back(self, first: int, num_words: int) -> None:
        ranges = sorted([*self.free, (first, first + num_words)])
        self.free = ranges[:1]
        for start, end in ranges[1:]:
            if start == self.free[-1][1]:
                self.free[-1] = (self.free[-1][0], end)
            else:
                self.free.append((start, end))

    def address(self, first: int) -> int:
        return self.words.data_ptr() + first * self.words.element_size()


@dataclass
class _Piece:
    """The words of a slab that belong to a graph. is_gone: says whether the graph is destroyed."""

    slab: _Slab
    first: int
    num_words: int
    is_gone: Callable[[], bool]


@dataclass
class _Captured:
    """The memory of a stream's launches in one capture. owned: tensors from the graph's own pool; empty if the memory
    is a piece of a slab."""

    capture: int
    address: int
    num_words: int
    owned: list[torch.Tensor] = field(default_factory=list)


def _filled(device_index: int, num_words: int) -> torch.Tensor:
    return torch.full((num_words,), EMPTY, dtype=torch.int32, device=torch.device("cuda", device_index))


def _synchronize(device_index: int) -> None:
    torch.cuda.current_stream(device_index).synchronize()


class Watched(Protocol):
    """The part of :class:`cute_kernels.runtime.captures.Capture` that a pool needs: a capture in progress."""

    @property
    def identity(self) -> int: ...

    def watch(self) -> Callable[[], bool]: ...


@dataclass(frozen=True)
class Memory:
    """The CUDA functions that a pool needs. They find captures in progress, fill memory with EMPTY words, and wait for
    a device.

    Attributes:
        stream_words: the first size of a stream's buffer, in words of 4 bytes.
        slab_words: number of words that are set aside on each device for captured launches.
    """

    is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    capture_of: Callable[[int], Watched] = capture_of
    filled: Callable[[int, int], torch.Tensor] = _filled
    synchronize: Callable[[int], None] = _synchronize
    stream_words: int = _WORDS
    slab_words: int = _GRAPH_SLAB


class WorkspacePool:
    """A pool of workspaces. Several threads may call it at the same time, for the same stream or for different ones."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._is_capturing = self._memory.is_capturing  # which each launch waits for
        self._by_stream: dict[tuple[int, int], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._by_capture: dict[tuple[int, int], _Captured] = {}
        self._slabs: dict[int, _Slab] = {}
        self._pieces: list[_Piece] = []
        self._shared: dict[tuple[int, int], tuple[int, int]] | None = None  # (address, words) by device and stream
        self._lock = threading.Lock()

    def share_among_captures(self) -> None:
        """Lets launches captured on one stream share one buffer from now on, also across graphs.

        It is for programs that never replay two of their graphs at the same time, such as engines whose graphs share
        one memory pool. An engine has thousands of graphs, and a buffer for each graph would take gigabytes.
        """
        with self._lock:
            if self._shared is None:
                self._shared = {}

    def get(self, device_index: int, stream: int, num_words: int) -> int:
        """Returns the address of at least ``num_words`` words of 4 bytes, for launches on ``stream`` (a raw handle) of
        a device."""
        if self._is_capturing():
            with self._lock:
                return self._captured(device_index, stream, num_words)
        words = self._by_stream.get((device_index, stream))
        if words is None or words.numel() < num_words:
            with self._lock:
                words = self._grown(device_index, stream, num_words)
        return words.data_ptr()

    def _grown(self, device_index: int, stream: int, num_words: int) -> torch.Tensor:
        words = self._by_stream.get((device_index, stream))
        if words is not None and words.numel() >= num_words:  # another thread was here first
            return words
        self._set_aside(device_index)
        size = self._memory.stream_words
        if words is not None:
            self._outgrown.append(words)
            size = 2 * words.numel()
        words = self._by_stream[device_index, stream] = self._memory.filled(device_index, max(num_words, size))
        return words

    def prepare(self, device_index: int) -> None:
        """Sets memory aside for launches that will be captured. Without this call, the first launch that is not
        captured sets it aside."""
        with self._lock:
            self._set_aside(device_index)

    def _set_aside(self, device_index: int) -> None:
        if device_index not in self._slabs:
            size = self._memory.slab_words
            self._slabs[device_index] = _Slab(self._memory.filled(device_index, size), [(0, size)])
            self._memory.synchronize(device_index)  # once: a graph on any stream may use it from now on

    def _captured(self, device_index: int, stream: int, num_words: int) -> int:
        shared = self._of_all_captures(device_index, stream, num_words)
        if shared is not None:
            return shared
        capture = self._memory.capture_of(stream)
        held = self._by_capture.get((device_index, stream))
        if held is None or held.capture != capture.identity:
            held = self._by_capture[device_index, stream] = _Captured(capture.identity, 0, 0)
        if held.num_words < num_words:
            # What was handed out for earlier launches of the capture stays the graph's.
            held.num_words = -(-num_words // _PIECE) * _PIECE
            piece = self._piece(device_index, held.num_words, capture)
            if piece is None:
                # No launch before this capture, or too many graphs at a time: the graph fills its own.
                held.owned.append(self._memory.filled(device_index, held.num_words))
                held.address = held.owned[-1].data_ptr()
            else:
                held.address = piece.slab.address(piece.first)
        return held.address

    def _of_all_captures(self, device_index: int, stream: int, num_words: int) -> int | None:
        """Returns the address of the buffer that a stream's graphs share; None if each graph has its own, or the slab
        is used up."""
        if self._shared is None:
            return None
        address, held = self._shared.get((device_index, stream), (0, 0))
        if held >= num_words:
            return address
        slab = self._slabs.get(device_index)
        size = -(-max(num_words, _SHARED_WORDS) // _PIECE) * _PIECE
        first = None if slab is None else slab.take(size)
        if slab is None or first is None:
            return None
        # Graphs that were captured before keep the smaller one: it stays as it is, EMPTY between launches.
        self._shared[device_index, stream] = slab.address(first), size
        return slab.address(first)

    def _piece(self, device_index: int, num_words: int, capture: Watched) -> _Piece | None:
        """Takes words of the slab that live as long as the captured graph; returns None if too few are free."""
        slab = self._slabs.get(device_index)
        if slab is None:
            return None
        self._collect()
        first = slab.take(num_words)
        if first is None:
            return None
        piece = _Piece(slab, first, num_words, capture.watch())
        self._pieces.append(piece)
        return piece

    def _collect(self) -> None:
        """Takes back the pieces of graphs that are gone."""
        living = []
        for piece in self._pieces:
            if piece.is_gone():
                piece.slab.give_back(piece.first, piece.num_words)
            else:
                living.append(piece)
        self._pieces = living


POOL = WorkspacePool()


class UnsettledError(RuntimeError):
    """A capture needs memory that was filled with EMPTY words before it began, and there is none. During a capture
    nothing can wait for memory to be filled.
    """


def settled(memory: Memory) -> Callable[[int, int], torch.Tensor]:
    """Makes a function that fills words of a device and waits, so that any later launch finds them EMPTY."""

    def filled(device_index: int, num_words: int) -> torch.Tensor:
        if memory.is_capturing():
            raise UnsettledError("got a capture before any launch of its kind, want one launch before")
        words = memory.filled(device_index, num_words)
        memory.synchronize(device_index)
        return words

    return filled


# Of launches whose CTAs count before they wait for the launch before them: no other may use these words, and none may
# be filling them. `get` raises UnsettledError where a capture has none of the slab.
COUNTER_SLAB_WORDS = 1 << 22
COUNTERS = WorkspacePool(Memory(filled=settled(Memory()), stream_words=1 << 8, slab_words=COUNTER_SLAB_WORDS))
