"""A decode step over a `DecodeCache` compiles as one graph, and for all lengths at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cute_kernels.integrations.transformers as ck
from tests.integrations.architectures import DECODERS, VOCABULARY

IDS = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(7))
PROMPT = 9
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :3] = 0


@torch.no_grad()
def steps(model: Any, forward: Any, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens behind the prompt, one step each by ``forward``."""
    cache = ck.DecodeCache("int4_g4", 64)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def given(start: int, end: int) -> dict[str, Any]:
        own = {"input_ids": IDS[:, start:end], "attention_mask": mask[:, :end].contiguous()}  # as `generate` has it
        return {**own, "position_ids": positions[:, start:end], "past_key_values": cache}

    model(**given(0, PROMPT))
    return torch.cat([forward(**given(i, i + 1)).logits for i in range(PROMPT, IDS.shape[1])], dim=1).double()


@pytest.mark.parametrize(
    ("name", "layers", "dynamic"),
    [
        ("qwen3", 1, True),
        ("gemma 2", 2, None),  # every other layer has a window
    ],
)
def test_a_decode_step_of_padded_rows_compiles_as_one_graph(name, layers, dynamic):
    """layers: one of each kind. dynamic: True if all numbers are traced for all values from the first step on."""
    torch.compiler.reset()
    model = DECODERS[name].build(torch.bfloat16, num_hidden_layers=layers)
    ck.accelerate(model, kv_format="int4_g4", cuda_graphs=False)
    want = steps(model, model.forward, LEFT_PADDED)
    counter = CompileCounter()
    got = steps(model, torch.compile(model.forward, fullgraph=True, backend=counter, dynamic=dynamic), LEFT_PADDED)
    assert counter.frame_count == 2  # the first length, and all others, of which a sliding window hides some
    assert (got - want).norm() <= 4e-2 * want.norm()


@pytest.mark.parametrize("name", ["llama", "phi-3"])
def test_quantised_blocks_are_computed_once_in_a_compiled_step(name):
    """Without padding: these are one graph of the first length and one of all others, too."""
    torch.compiler.reset()
    model = DECODERS[name].build(torch.bfloat16, num_hidden_layers=1)
    ck.accelerate(model, kv_format="int4_g4", weights="w4g64", cuda_graphs=False)
    mask = torch.ones_like(IDS)
    want = steps(model, model.forward, mask)
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products.append(sum("linear" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    got = steps(model, torch.compile(model.forward, fullgraph=True, backend=backend), mask)
    assert (got - want).norm() <= 4e-2 * want.norm()
    projections = 6 if name == "llama" else 4  # q, k, v; o; gate and up; down
    assert products == [projections + 1] * 2  # and the output layer
