"""SGLang's attention backend on a GPU: steps over its own pools, and a captured step that is replayed.

It wants SGLang beside it: `pip install sglang==0.5.23`. Without it these tests are skipped.
"""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from cute_kernels.integrations.sglang import rows
from tests.integrations.sglang import seam_attention
from tests.integrations.sglang.seam_attention import Engine, engine

CACHES = ("", *seam_attention.ROWS)
"""SGLang's FP8, and pools in our formats."""


def served(cache: str) -> Engine:
    with mock.patch.dict(os.environ, {rows.KV_FORMAT: cache}):
        made = engine(device="cuda", page_size=64)
        made.step({1: 70, 2: 130}, "EXTEND")
    return made


@pytest.mark.parametrize("cache", CACHES)
def test_steps_of_every_kind_give_attention_over_the_pool(cache: str):
    made = served(cache)
    with mock.patch.dict(os.environ, {rows.KV_FORMAT: cache}):
        made.share(3, 2, 128)
        made.step({3: 9, 1: 40}, "EXTEND")  # a prefix hit and a later chunk
        made.step({1: 1, 2: 1, 4: 21}, "MIXED")
        made.step({1: 1, 3: 1, 4: 1}, "DECODE")


@pytest.mark.parametrize("cache", CACHES)
def test_a_captured_step_serves_other_requests_and_lengths(cache: str):
    """As SGLang captures and replays one: its inputs are copied into buffers, and nothing else is done on the host."""
    made = served(cache)
    backend = made.backend
    with mock.patch.dict(os.environ, {rows.KV_FORMAT: cache}):
        backend.init_cuda_graph_state(4, 4)
        static, fused = made.batch({1: 1, 2: 1}, "DECODE", 4)
        backend.init_forward_metadata_out_graph(static, in_capture=True)

        def step() -> torch.Tensor:
            backend.init_forward_metadata_in_graph(static)
            return made.run(static, fused)

        step()  # compiles and loads what it launches
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        graph.replay()
        seam_attention.assert_close(out[:2], made.expected({1: 1, 2: 1}, fused))
        for new in ({2: 1}, {2: 1, 1: 1}, {1: 1}):
            batch, fresh = made.batch(new, "DECODE", 4)
            for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
                getattr(static, name).copy_(getattr(batch, name))
            fused.copy_(fresh)
            backend.init_forward_metadata_out_graph(static)
            graph.replay()
            seam_attention.assert_close(out[: len(new)], made.expected(new, fused))
