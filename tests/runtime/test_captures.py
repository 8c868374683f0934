"""Python's collector rests while a graph is captured: what it destroys there may abort the process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from cute_kernels.runtime.captures import nothing_collected


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


def test_steps_are_recorded_in_its_rest(monkeypatch):
    graphs = pytest.importorskip("cute_kernels.integrations.transformers.graphs")
    found: list[bool] = []
    with monkeypatch.context() as patch:
        for name in ("CUDAGraph", "device", "graph"):  # no GPU's
            patch.setattr(torch.cuda, name, lambda *_: nullcontext())
        graphs.CudaGraph(lambda: found.append(gc.isenabled()), torch.device("cpu"))
    assert found == [False] and gc.isenabled()
