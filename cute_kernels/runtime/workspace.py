"""Scratch memory of split kernels: a grow-only buffer per device and stream; counters, zero between launches.

Kernels on one stream run one after the other, so they may share. A captured graph may be replayed on any stream at any
time, so what it uses is its own: allocated from the graph's memory pool, with counters out of a slab that was zeroed
before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_VALUES = 1 << 18  # per stream, at first
_COUNTERS = 1 << 16  # per stream: 64 Ki rows that are being combined at a time
_GRAPH_SLAB = 1 << 20  # counters set aside, per device, for captured launches


@dataclass(frozen=True)
class Workspace:
    """Addresses and sizes of fp32 scratch and of int32 counters that are zero between launches."""

    values: int
    num_values: int
    counters: int
    num_counters: int
    tensors: tuple[torch.Tensor, torch.Tensor]  # the memory itself


class WorkspacePool:
    """Hands out workspaces; not thread-safe beyond what the interpreter lock gives (one dict access)."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[int, int], Workspace] = {}
        self._slabs: dict[int, torch.Tensor] = {}

    def get(self, device_index: int, stream: int, num_values: int, num_counters: int) -> Workspace:
        """Scratch of at least the given sizes for launches on ``stream`` (a raw handle) of a device."""
        if torch.cuda.is_current_stream_capturing():
            return self._captured(device_index, num_values, num_counters)
        workspace = self._by_stream.get((device_index, stream))
        if workspace is None or workspace.num_values < num_values or workspace.num_counters < num_counters:
            self._slab(device_index)
            # Replaced, not resized in place: the allocator keeps memory that launches in flight still use.
            device = torch.device("cuda", device_index)
            workspace = _workspace(
                torch.empty(max(num_values, _VALUES), dtype=torch.float32, device=device),
                torch.zeros(max(num_counters, _COUNTERS), dtype=torch.int32, device=device),
            )
            self._by_stream[device_index, stream] = workspace
        return workspace

    def _slab(self, device_index: int) -> torch.Tensor:
        if device_index not in self._slabs:
            device = torch.device("cuda", device_index)
            self._slabs[device_index] = torch.zeros(_GRAPH_SLAB, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # once: a graph on any stream may use it from now on
        return self._slabs[device_index]

    def _captured(self, device_index: int, num_values: int, num_counters: int) -> Workspace:
        device = torch.device("cuda", device_index)
        values = torch.empty(max(num_values, 4), dtype=torch.float32, device=device)
        slab = self._slabs.get(device_index)
        if slab is None or slab.numel() < num_counters:
            # No launch before this capture, or very many captures: let the graph zero its own.
            return _workspace(values, torch.zeros(max(num_counters, 1), dtype=torch.int32, device=device))
        self._slabs[device_index] = slab[num_counters:]
        return _workspace(values, slab[:num_counters])


def _workspace(values: torch.Tensor, counters: torch.Tensor) -> Workspace:
    tensors = values, counters
    return Workspace(values.data_ptr(), values.numel(), counters.data_ptr(), counters.numel(), tensors)


POOL = WorkspacePool()
