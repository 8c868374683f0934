"""Functions under torch.compile and in CUDA graphs, held to the bits of what they return as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

BACKEND = "aot_eager"  # traces and functionalises as Inductor does, and generates no code

Tensors = Sequence[torch.Tensor]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one graph, with nothing kept of others."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=BACKEND)


def assert_one_graph_serves(function: Callable[..., torch.Tensor], calls: Iterable[Tensors], marks: bool) -> None:
    """Of all ``calls``, whose tensors differ in how many rows they have, each with more than one.

    marks: whether rows are marked as what changes, rather than all sizes taken to.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend(BACKEND)
    function_of_any = torch.compile(function, fullgraph=True, backend=counter, dynamic=None if marks else True)
    for given in calls:
        wanted = function(*given)
        for tensor in given if marks else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(function_of_any(*given), wanted)
    assert counter.frame_count == 1


def captured(function: Callable[..., torch.Tensor], given: Tensors) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """(a graph of one call, what each replay writes)."""
    function(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*given)
    return graph, out


def assert_replays(function: Callable[..., torch.Tensor], given: Tensors, others: Iterable[Tensors]) -> None:
    """A captured call of ``given`` returns what an eager one does for each of ``others`` that is copied into them."""
    graph, out = captured(function, given)
    for other in others:
        for tensor, numbers in zip(given, other, strict=True):
            tensor.copy_(numbers)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, function(*given))
