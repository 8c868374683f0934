"""The streaming floor: what it costs merely to read N bytes on this GPU, with the same cold-L2 protocol.

Ratios to the datasheet's bandwidth hide the ramp-up that every kernel pays; a read-only kernel over the same bytes pays
it too. The floor is the best of a sweep, per byte count, cached for the run.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from bench.timing import DEFAULT_PROTOCOL, Protocol, time_cold

HAVE_TRITON = importlib.util.find_spec("triton") is not None
GRANULE_BYTES = 64


@dataclass(frozen=True)
class ReadConfig:
    """One read-only kernel: `waves` of thread blocks per SM walk the buffer, `unroll` loads of `block_bytes` each in
    flight per thread block; `waves` 0 gives each thread block exactly one step."""

    block_bytes: int
    unroll: int
    num_warps: int
    waves: int

    @property
    def name(self) -> str:
        grid = f"{self.waves} blocks per SM" if self.waves else "one step per block"
        return f"triton {self.block_bytes} B x {self.unroll}, {self.num_warps} warps, {grid}"


# Chosen so that both ends are covered: many small thread blocks for short reads, deep unrolling for long ones.
SWEEP = (
    ReadConfig(block_bytes=8192, unroll=2, num_warps=4, waves=0),
    ReadConfig(block_bytes=8192, unroll=4, num_warps=4, waves=0),
    ReadConfig(block_bytes=16384, unroll=2, num_warps=8, waves=0),
    ReadConfig(block_bytes=4096, unroll=2, num_warps=4, waves=0),
    ReadConfig(block_bytes=2048, unroll=2, num_warps=4, waves=0),
    ReadConfig(block_bytes=8192, unroll=4, num_warps=4, waves=4),
    ReadConfig(block_bytes=8192, unroll=4, num_warps=4, waves=8),
    ReadConfig(block_bytes=16384, unroll=4, num_warps=8, waves=2),
    ReadConfig(block_bytes=16384, unroll=4, num_warps=8, waves=4),
    ReadConfig(block_bytes=32768, unroll=2, num_warps=16, waves=2),
    ReadConfig(block_bytes=8192, unroll=8, num_warps=4, waves=4),
)

QUICK_SWEEP = (SWEEP[0], SWEEP[1], SWEEP[5])


@dataclass(frozen=True)
class Floor:
    """Median microseconds of the fastest read-only kernel over `num_bytes`, and which one it was."""

    num_bytes: int
    us: float
    kernel: str
    sweep_us: dict[str, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.us * 1e-3


class StreamingFloor:
    """Measures floors on one device, remembering each byte count."""

    def __init__(
        self,
        flush: Callable[[], None],
        protocol: Protocol = DEFAULT_PROTOCOL,
        device: torch.device | str = "cuda",
        quick: bool = False,
    ) -> None:
        self._flush, self._protocol, self._device = flush, protocol, torch.device(device)
        self._configs = QUICK_SWEEP if quick else SWEEP
        self._known: dict[int, Floor] = {}
        self._buffer = torch.empty(0, dtype=torch.int32, device=self._device)

    def __call__(self, num_bytes: int) -> Floor:
        if num_bytes <= 0 or num_bytes % GRANULE_BYTES:
            raise ValueError(f"num_bytes: got {num_bytes}, want a positive multiple of {GRANULE_BYTES}")
        if num_bytes not in self._known:
            self._known[num_bytes] = self._measure(num_bytes)
        return self._known[num_bytes]

    def release(self) -> None:
        """Gives the read buffer back; measured floors stay known."""
        self._buffer = torch.empty(0, dtype=torch.int32, device=self._device)

    def _measure(self, num_bytes: int) -> Floor:
        words = num_bytes // 4
        if self._buffer.numel() < words:
            self.release()
            self._buffer = torch.empty(words, dtype=torch.int32, device=self._device).random_()
        buffer = self._buffer[:words]
        times = {
            name: time_cold(call, self._flush, self._protocol).median_us for name, call in self._candidates(buffer)
        }
        best = min(times, key=times.__getitem__)
        return Floor(num_bytes, times[best], best, times)

    def _candidates(self, buffer: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
        if not HAVE_TRITON:
            view, result = buffer.view(torch.float32), torch.empty((), device=self._device)
            yield "torch.sum (triton is not installed, so no sweep)", lambda: torch.sum(view, dim=0, out=result)
            return
        from bench import floor_kernels

        sink = torch.empty(1, dtype=torch.int32, device=self._device)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        for config in self._configs:
            yield (
                config.name,
                functools.partial(
                    floor_kernels.read,
                    buffer,
                    sink,
                    block_words=config.block_bytes // 4,
                    unroll=config.unroll,
                    num_warps=config.num_warps,
                    num_programs=num_sms * config.waves or None,
                ),
            )
