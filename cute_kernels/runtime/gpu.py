"""The host's access to the GPU: one object of functions, which another object can replace.

A launch needs little of a device: whether it is current, torch's stream, memory, the number of SMs. All of that goes
through :data:`GPU`. :func:`standing_in` replaces these functions within a block, for all families at once: a test
records launches on a machine without a GPU (`tests/host_functions.py`), a tool makes plans for an absent GPU.
`simulator.running` replaces the GPU for device code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch

from cute_kernels.runtime.memory import empty_strided
from cute_kernels.runtime.workspace import COUNTERS, POOL

Device = Any  # what torch takes for one: an index, a name, a torch.device


# Without the checks of torch's public functions, which a launch would wait for; a torch without CUDA has neither.
_current = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def _num_sms(device: Device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(slots=True)
class Gpu:
    """The functions that describe GPUs and provide streams and memory for launches; the defaults are torch's.

    Attributes:
        is_available: whether there is a GPU.
        count: how many GPUs there are.
        capability, name, num_sms: a device's compute capability, name and number of SMs.
        current: index of the current device.
        guard: a context in which a device is the current one.
        stream: raw handle of torch's current stream of a device (index).
        is_capturing: whether torch's current stream is being captured.
        empty: as `torch.empty_strided` (shape, strides, dtype), on the current device.
        workspace: (index, stream, number of words) -> address, as `WorkspacePool.get`.
        counters: as ``workspace``, for words that a launch may use while the previous launch still runs.
        takes_cpu: whether calls on CPU tensors launch kernels, as on CUDA tensors, instead of running the reference.
    """

    is_available: Callable[[], bool] = torch.cuda.is_available
    count: Callable[[], int] = torch.cuda.device_count
    capability: Callable[[Device], tuple[int, int]] = torch.cuda.get_device_capability
    name: Callable[[Device], str] = torch.cuda.get_device_name
    num_sms: Callable[[Device], int] = _num_sms
    current: Callable[[], int | None] = _current
    guard: Callable[[Device], AbstractContextManager[Any]] = torch.cuda.device
    stream: Callable[[int], int] = _stream
    is_capturing: Callable[[], bool] = lambda: torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = empty_strided
    workspace: Callable[[int, int, int], int] = POOL.get
    counters: Callable[[int, int, int], int] = COUNTERS.get
    takes_cpu: bool = False


GPU = Gpu()


class _Cached(Protocol):
    def cache_clear(self) -> None: ...


CachedT = TypeVar("CachedT", bound=_Cached)
_clears: list[Callable[[], object]] = []


def forgotten(clear: Callable[[], object]) -> None:
    """Registers ``clear``, which empties a cache that depends on devices. ``clear`` runs whenever `standing_in` begins
    or ends."""
    _clears.append(clear)


def per_gpu(cached: CachedT) -> CachedT:
    """Decorates a cached function whose results depend on this machine's GPUs, so that :func:`forget` empties its
    cache."""
    forgotten(cached.cache_clear)
    return cached


@contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Replaces the GPU by ``gpu`` within this block; kept plans are dropped before and after it.

    The replacement holds for the whole process, so no other thread may launch meanwhile.
    """
    names = [field.name for field in fields(Gpu)]
    before = [getattr(GPU, name) for name in names]
    try:
        for name in names:
            setattr(GPU, name, getattr(gpu, name))
        forget()
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(GPU, name, value)
        forget()


def forget() -> None:
    """Empties all caches that depend on devices: plans, launches, architectures."""
    for clear in _clears:
        clear()
