"""Checks of layers of experts."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.vllm.checks import check, hopper


@check
def experts_of_every_checkpoint_give_what_it_says() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for checkpoint, bits, group_size, zero_point, dtype in layers.EXPERTS:
        form = layers.Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype, n=96, k=128)
        layer, made = layers.serve_experts(form, "cpu")
        for expert_map in (None, torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)):
            error = layers.error_of_experts(layer, made, 7, dtype, expert_map)
            assert error < (2**-6 if dtype == torch.bfloat16 else 2**-9), (str(form), error)
        assert layer.layer.w13_weight.dtype == torch.uint8


@check
def other_experts_are_left_to_vllm_with_a_reason() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    source = moe.SOURCES["CompressedTensorsWNA16MarlinMoEMethod"]

    def reason(form: Any, **changes: Any) -> str:
        experts = layers.make_experts(form, "cpu")
        for name, value in changes.items():
            setattr(experts.layer, name, value)
        return str(moe.reason_against(experts.method, experts.layer, source))

    usual = {"checkpoint": "ct", "group_size": 32, "n": 96, "k": 128}
    assert reason(layers.Checkpoint(**usual)) == "None"
    assert "act-order" in reason(layers.Checkpoint(**usual, act_order=True))
    assert "experts of 80 features" in reason(layers.Checkpoint(**{**usual, "n": 80, "group_size": 0}))
    assert "the activation" in reason(layers.Checkpoint(**usual), activation=SimpleNamespace(value="gelu"))
    assert "biases or limits" in reason(layers.Checkpoint(**usual), w13_bias=torch.zeros(1))
    assert "weights on the input" in reason(layers.Checkpoint(**usual), apply_router_weight_on_input=True)
