"""Scratch memory of split kernels: a grow-only buffer per device and stream, every word EMPTY between launches.

Kernels on one stream run one after the other, so they may share; they leave the words that they used EMPTY again. A
captured graph may be replayed on any stream at any time, so its launches on a stream share a buffer of their own: a
piece of memory that was filled before, or one from the graph's memory pool that the graph fills each time it begins.
A program that never replays two of its graphs at a time says so, and they all share what was filled before.
"""

from __future__ import annotations

import torch

from cute_kernels.sm90 import EMPTY_WORD

EMPTY = EMPTY_WORD - 2**32  # as int32: what CTAs wait to see overwritten
_WORDS = 1 << 18  # per stream, at first
_GRAPH_SLAB = 1 << 23  # words set aside, per device, for captured launches
_SHARED_WORDS = 1 << 20  # of them, at first, for a stream whose graphs share


class WorkspacePool:
    """Hands out workspaces; not thread-safe beyond what the interpreter lock gives (one dict access)."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[int, int], torch.Tensor] = {}
        self._by_capture: dict[tuple[int, int, int], torch.Tensor] = {}
        self._slabs: dict[int, torch.Tensor] = {}
        self._shared: dict[tuple[int, int], torch.Tensor] | None = None

    def share_among_captures(self) -> None:
        """From now on launches captured on one stream share one buffer, whatever graph they are in.

        For a program that never replays two of its graphs at the same time, as engines do whose graphs share one pool
        of memory. An engine has thousands of graphs; a buffer for each would take gigabytes.
        """
        if self._shared is None:
            self._shared = {}

    def get(self, device_index: int, stream: int, num_words: int) -> int:
        """Address of at least ``num_words`` words of 4 bytes for launches on ``stream`` (a raw handle) of a device."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._captured(device_index, stream, num_words)
        words = self._by_stream.get((device_index, stream))
        if words is None or words.numel() < num_words:
            self.prepare(device_index)
            # Replaced, not resized in place: the allocator keeps memory that launches in flight still use.
            words = self._by_stream[device_index, stream] = _filled(device_index, max(num_words, _WORDS))
        return words.data_ptr()

    def prepare(self, device_index: int) -> None:
        """Sets memory aside for launches that will be captured; done by itself before the first that is not."""
        if device_index not in self._slabs:
            self._slabs[device_index] = _filled(device_index, _GRAPH_SLAB)
            torch.cuda.current_stream(device_index).synchronize()  # once: a graph on any stream may use it from now on

    def _captured(self, device_index: int, stream: int, num_words: int) -> int:
        words = None if self._shared is None else self._of_all_captures(device_index, stream, num_words)
        if words is not None:
            return words.data_ptr()
        key = device_index, stream, capture_id(stream)
        words = self._by_capture.get(key)
        if words is None or words.numel() < num_words:
            words = self._by_capture[key] = self._for_capture(device_index, num_words)
        return words.data_ptr()

    def _of_all_captures(self, device_index: int, stream: int, num_words: int) -> torch.Tensor | None:
        """The buffer that graphs share; None if what was filled before is used up: then each has its own."""
        assert self._shared is not None
        words = self._shared.get((device_index, stream))
        if words is None or words.numel() < num_words:
            slab = self._slabs.get(device_index)
            if slab is None or slab.numel() < num_words:
                return None
            # Graphs that were captured before keep the smaller one: it stays as it is, EMPTY between launches.
            words = self._shared[device_index, stream] = self._for_capture(
                device_index, min(max(num_words, _SHARED_WORDS), slab.numel())
            )
        return words

    def _for_capture(self, device_index: int, num_words: int) -> torch.Tensor:
        num_words = -(-num_words // 64) * 64  # later pieces start on 256 bytes
        slab = self._slabs.get(device_index)
        if slab is None or slab.numel() < num_words:
            # No launch before this capture, or very many captures: the graph fills its own.
            return _filled(device_index, num_words)
        self._slabs[device_index] = slab[num_words:]
        return slab[:num_words]


def capture_id(stream: int) -> int:
    """A number that tells the graph capture in progress on a stream from all others of the process."""
    # Here, as it looks for CUDA's libraries, and a process that captures no graph has no use for them.
    from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue]

    status, _, identity, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if int(status) != 0:
        raise RuntimeError(f"cudaStreamGetCaptureInfo failed: {status}")
    return int(identity)


def _filled(device_index: int, num_words: int) -> torch.Tensor:
    return torch.full((num_words,), EMPTY, dtype=torch.int32, device=torch.device("cuda", device_index))


POOL = WorkspacePool()
