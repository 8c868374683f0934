"""Scratch memory of split kernels: a grow-only buffer per device and stream; counters, zero between launches.

Kernels on one stream run one after the other, so they may share. A captured graph may be replayed on any stream at any
time, so what it uses is its own: allocated from the graph's memory pool, with counters out of a slab that was zeroed
before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_COUNTERS = 1 << 16  # per stream: 64 Ki rows that are being combined at a time
_GRAPH_SLAB = 1 << 20  # counters set aside, per device, for captured launches


@dataclass
class Workspace:
    """values: fp32 scratch; counters: int32, all zero between launches."""

    values: torch.Tensor
    counters: torch.Tensor


class WorkspacePool:
    """Hands out workspaces; not thread-safe beyond what the interpreter lock gives (one dict access)."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[int, int], Workspace] = {}
        self._slabs: dict[int, torch.Tensor] = {}

    def get(self, device: torch.device, stream: int, num_values: int, num_counters: int) -> Workspace:
        """Scratch of at least the given sizes for launches on ``stream`` (a raw handle) of ``device``."""
        index = device.index or 0
        workspace = self._by_stream.get((index, stream))
        if (
            workspace is not None
            and workspace.values.numel() >= num_values
            and workspace.counters.numel() >= num_counters
            and not torch.cuda.is_current_stream_capturing()
        ):
            return workspace
        if torch.cuda.is_current_stream_capturing():
            return self._captured(device, num_values, num_counters)
        self._slab(device)
        # Replaced, not resized in place: the allocator keeps memory that launches in flight still use.
        workspace = Workspace(
            torch.empty(max(num_values, 1 << 18), dtype=torch.float32, device=device),
            torch.zeros(max(num_counters, _COUNTERS), dtype=torch.int32, device=device),
        )
        self._by_stream[index, stream] = workspace
        return workspace

    def _slab(self, device: torch.device) -> torch.Tensor:
        index = device.index or 0
        if index not in self._slabs:
            self._slabs[index] = torch.zeros(_GRAPH_SLAB, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # once: a graph on any stream may use it from now on
        return self._slabs[index]

    def _captured(self, device: torch.device, num_values: int, num_counters: int) -> Workspace:
        index = device.index or 0
        values = torch.empty(max(num_values, 4), dtype=torch.float32, device=device)
        slab = self._slabs.get(index)
        if slab is None or slab.numel() < num_counters:
            # No launch before this capture, or very many captures: let the graph zero its own.
            return Workspace(values, torch.zeros(max(num_counters, 1), dtype=torch.int32, device=device))
        self._slabs[index] = slab[num_counters:]
        return Workspace(values, slab[:num_counters])


POOL = WorkspacePool()
