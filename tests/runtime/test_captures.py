"""Captures: Python's collector rests meanwhile, since what it destroys there may abort the process; and torch is as it
was behind one that fails. (tests/gpu/test_runtime.py has captures of CUDA's.)"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels.runtime.captures import graph_of, nothing_collected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Enabled, and as it was afterwards: the suite's own processes run without."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_and_it_goes_on_behind():
    with nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_behind_an_error():
    with pytest.raises(ZeroDivisionError), nothing_collected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_had_disabled_it_finds_it_disabled():
    gc.disable()
    with nothing_collected():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_lets_it_go_on():
    entered, leave = threading.Event(), threading.Event()

    def capture() -> None:
        with nothing_collected():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=capture)
    with nothing_collected():
        thread.start()
        entered.wait()
    assert not gc.isenabled(), "the other thread captures still"
    leave.set()
    thread.join()
    assert gc.isenabled()


class Cuda:
    """Stands for torch.cuda. Captures number ``bad`` are invalid when they end, as one is in which the host waited."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.begun, self.said, self.stream = bad, 0, [], "the caller's"
        self.CUDAGraph, self.current_stream = object, lambda device: self.stream
        self.graph_pool_handle, self.device = lambda: (0, 7), nullcontext

    @contextmanager
    def graph(self, graph: object, pool: object = None) -> Iterator[None]:
        number, self.begun, self.stream = self.begun, self.begun + 1, "the capture's"
        try:
            yield
        finally:
            if number in self.bad:
                raise RuntimeError("operation failed due to a previous error during capture")  # and stays on the stream
            self.stream = "the caller's"

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def captured(self, function: Callable[[], Any], capture: Callable[..., Any] = graph_of) -> Any:
        ends: dict[str, Any] = {name: lambda *given, name=name: self.said.append((name, *given)) for name in ENDS}
        with mock.patch.object(torch, "cuda", self), mock.patch.multiple(torch._C, create=True, **ends):
            return capture(function, torch.device("cpu", 0))


ENDS = ("_cuda_endAllocateToPool", "_cuda_releasePool")


def waits() -> None:
    raise ValueError("the host may not wait while a stream is captured")


def test_steps_are_recorded_while_nothing_is_collected():
    graphs = pytest.importorskip("cute_kernels.integrations.transformers.graphs")
    found = Cuda().captured(gc.isenabled, graphs.CudaGraph)
    assert found.outputs is False and gc.isenabled()


def test_what_a_function_returns_comes_with_its_graph():
    cuda = Cuda()
    assert cuda.captured(lambda: "outputs")[1] == "outputs"
    assert (cuda.begun, cuda.said, cuda.stream) == (1, [], "the caller's")


def test_behind_a_capture_that_fails_torch_is_as_it_was():
    cuda = Cuda(0)
    with pytest.raises(ValueError, match="the host may not wait"):
        cuda.captured(waits)
    assert cuda.stream == "the caller's"
    assert cuda.said == [(name, 0, (0, 7)) for name in ENDS]
    assert cuda.begun == 2, "torch's generator waits for the end of a capture"


def test_what_cuda_says_of_launches_is_raised_where_the_function_says_nothing():
    with pytest.raises(RuntimeError, match="previous error during capture"):
        Cuda(0).captured(lambda: None)


def test_a_lost_device_gives_the_first_error():
    with pytest.raises(ValueError, match="the host may not wait"):
        Cuda(0, 1).captured(waits)
