"""CUDA graph captures in progress: the capture of a stream, and whether the captured graph still exists.

A graph can own *user objects* (cudaGraphRetainUserObject, which is allowed during the capture). Executable graphs that
are instantiated from the graph own its user objects, too. Once an object's last owner is destroyed and that owner's
launches have ended, CUDA calls the object's destructor. CUDA may call it on a thread of its own, where neither CUDA nor
Python may be called. The destructor here is the C library's ``sem_post`` on a semaphore, whose value Python reads
later.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, SupportsInt, TypeVar

import torch

_SEMAPHORE_BYTES = 64  # of a sem_t, at most
_T = TypeVar("_T")


class Capture(NamedTuple):
    """A CUDA graph capture in progress.

    Attributes:
        identity: CUDA's identifier of the capture.
        graph: the graph captured so far.
    """

    identity: int
    graph: SupportsInt  # a cudaGraph_t

    def watch(self) -> Callable[[], bool]:
        """Returns a function that says whether the graph, and every executable graph made from it, are destroyed."""
        runtime = _runtime()

        semaphore = _Semaphore()
        destroy = runtime.cudaHostFn_t(init_value=semaphore.post_address)
        no_sync = runtime.cudaUserObjectFlags.cudaUserObjectNoDestructorSync
        made = runtime.cudaUserObjectCreate(semaphore.address, destroy, 1, no_sync)
        user_object = _checked("cudaUserObjectCreate", *made)
        move = runtime.cudaUserObjectRetainFlags.cudaGraphUserObjectMove
        _checked("cudaGraphRetainUserObject", *runtime.cudaGraphRetainUserObject(self.graph, user_object, 1, move))
        return semaphore.is_posted


class _Rest:
    """The state of a pause of Python's garbage collector: how many callers have paused it, and whether it was on
    before.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = 0
        self.was_enabled = False

    def begin(self) -> None:
        with self.lock:
            if not self.wanted:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.wanted += 1

    def end(self) -> None:
        with self.lock:
            self.wanted -= 1
            if not self.wanted and self.was_enabled:
                gc.enable()


_REST = _Rest()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Pauses Python's garbage collector in all threads within this block, which must begin before a capture. Otherwise
    the collector might destroy an unreachable CUDA graph during the capture, and the graph's destructor would abort the
    process.

    Code can still call the collector itself, or delete a graph.
    """
    _REST.begin()
    try:
        yield
    finally:
        _REST.end()


def graph_of(function: Callable[[], _T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Captures the launches of a function on a device as a CUDA graph. Returns (the graph, the function's result).

    Raises the error of the function or of CUDA. After an error it restores torch's earlier state. Without this, torch
    would stay on the captured stream, draw no more random numbers on this device, and keep memory.
    """
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
    cause: BaseException | None = None
    with torch.cuda.device(device), nothing_collected():
        try:
            with torch.cuda.graph(graph, pool=pool):
                try:
                    outputs = function()
                except BaseException as error:
                    cause = error
                    raise
        except BaseException:
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # as torch did it, or of a device that is lost
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
            with suppress(RuntimeError):
                _let_random_numbers_be_drawn(device)
            if cause is not None:
                raise cause from None  # the end of a capture says only that something before it was wrong
            raise
    return graph, outputs


def _let_random_numbers_be_drawn(device: torch.device) -> None:
    """Lets torch's generator draw random numbers again after a failed capture. It makes an empty capture, as the
    generator counts the failed capture as running until another capture ends."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


def capture_of(stream: int) -> Capture:
    """Returns the capture that a stream (a raw handle) belongs to."""
    runtime = _runtime()
    status, _, identity, graph, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    _checked("cudaStreamGetCaptureInfo", status)
    return Capture(int(identity), graph)


def _runtime() -> ModuleType:
    """Imports CUDA's runtime bindings. It is called only when a graph is captured, as the import searches for CUDA's
    libraries.
    """
    return import_module("cuda.bindings.runtime")


class _Semaphore:
    """A POSIX semaphore of value 0 that C code posts once, perhaps only when the process ends.

    So Python does not own the semaphore's memory. The memory is freed only after the semaphore was posted.
    """

    _library = ctypes.CDLL(None, use_errno=True)
    _library.calloc.restype = ctypes.c_void_p
    _library.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)

    def __init__(self) -> None:
        self.address: int | None = self._library.calloc(1, _SEMAPHORE_BYTES)
        if self.address is None or self._library.sem_init(ctypes.c_void_p(self.address), 0, 0) != 0:
            raise MemoryError("no semaphore")

    @property
    def post_address(self) -> int:
        """The address of the C function sem_post, which takes a semaphore's address and adds 1."""
        address = ctypes.cast(self._library.sem_post, ctypes.c_void_p).value
        assert address is not None
        return address

    def is_posted(self) -> bool:
        if self.address is None:
            return True
        value = ctypes.c_int()
        self._library.sem_getvalue(ctypes.c_void_p(self.address), ctypes.byref(value))
        if value.value == 0:
            return False
        self._library.free(ctypes.c_void_p(self.address))
        self.address = None
        return True


def _checked(function: str, status: SupportsInt, *result: object) -> Any:
    """Returns the result of a CUDA call; raises RuntimeError unless it succeeded."""
    if int(status) != 0:
        raise RuntimeError(f"{function} failed: {status}")
    return result[0] if result else None
