"""One captured graph of extend attention, and other lengths of the same tensors."""

from __future__ import annotations

import torch

from tests.extend.cases import Call, assert_close


def assert_a_graph_serves(call: Call, other: Call) -> None:
    """A graph of ``call`` gives what ``other`` wants, once its tensors hold that call's numbers; other may have fewer
    queries and keys."""
    out = torch.full_like(call.q, torch.nan)
    call.run(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(out=out)
    take_over(call, other)
    out.fill_(torch.nan)
    for _ in range(2):
        graph.replay()
    assert_close(other, out[: other.q.shape[0]])
    assert out[other.q.shape[0] :].isnan().all(), "queries of no request are not written"


def take_over(call: Call, other: Call) -> None:
    """Puts all that ``other`` is given into the tensors of ``call``."""
    for mine, theirs in zip(call.tensors[1:3], other.tensors[1:3], strict=True):
        assert mine.shape == theirs.shape
        mine.copy_(theirs)
    call.q[: other.q.shape[0]].copy_(other.q)
    call.seq_lens.copy_(other.seq_lens)
    call.cu_seqlens_q.copy_(other.cu_seqlens_q)
    for name, theirs in other.options.items():
        if isinstance(theirs, torch.Tensor):
            call.options[name].copy_(theirs)
