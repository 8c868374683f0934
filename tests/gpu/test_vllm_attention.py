"""Steps of an engine through the plugin's attention backend, on a GPU; needs vLLM. `steps` has what is served."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch

from tests.integrations.vllm.steps import BATCHES, Layer, serve_steps

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

ALL_EXTEND = {"num_sms": 1}  # of prompts that go on hardly any goes in parts
LAYERS = (
    Layer("auto", "fp16"),
    Layer("auto", "fp16", caches=ALL_EXTEND),
    Layer("auto", "fp16", window=24, caches=ALL_EXTEND),
    Layer("auto", "fp16", sinks=True, caches=ALL_EXTEND),
    Layer("auto", "fp16", soft_cap=3.0, caches=ALL_EXTEND),
    Layer("auto", "fp16", window=24, sinks=True, speculative=3),
    Layer("auto", "fp16", caches={"extend": False}),
    Layer("auto", "fp16", caches={"invariant": True}),
    Layer("fp8", caches=ALL_EXTEND),
    Layer("fp8", window=24, sinks=True, soft_cap=3.0, speculative=3, caches=ALL_EXTEND),
    Layer("int8_per_token_head", caches=ALL_EXTEND),
    Layer("int8_per_token_head", speculative=3),
    Layer("fp8_per_token_head", caches=ALL_EXTEND),
    Layer("auto", "int4_g4", caches=ALL_EXTEND),
    Layer("auto", "int4_g4", soft_cap=3.0, speculative=3),
    Layer("auto", "int8_token_head,int4_g4", caches=ALL_EXTEND),
)
INVARIANT = tuple(
    Layer(kv, form, speculative=drafted, caches={"invariant": True})
    for kv, form in (("auto", "fp16"), ("fp8", ""), ("auto", "int4_g4"))
    for drafted in (0, 3)
)
CUT_OTHERWISE = (
    ((0, 20), (1, 5)),
    ((0, 3), (3, 7)),
    ((0, 8), (1, 1), (2, 40)),
    ((0, 1), (1, 19), (2, 3), (3, 27)),
    ((1, 23), (2, 20)),
    ((0, 1), (1, 4), (2, 5), (3, 41)),
    ((0, 1), (2, 1), (3, 1)),
)
"""The steps of BATCHES, cut otherwise: as many tokens of each request."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All kernels of these layers, compiled side by side where they are not there yet."""
    from cute_kernels.integrations.vllm import attention_kernels, prepare

    device, specs = torch.device("cuda", 0), {}
    for layer in LAYERS + INVARIANT:
        impl = layer.make("cuda")
        invariant = layer.caches.get("invariant", False)
        decodes = attention_kernels.Decodes(
            (1, 2, 3, 4), layer.speculative + 1, 128, layer.page, torch.float16, invariant
        )
        specs.update(dict.fromkeys(attention_kernels.specs([impl], decodes, device)))
    prepare.load(device, specs)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_steps_give_what_the_reference_gives(layer: Layer):
    given, exact = serve_steps(layer, "cuda")
    assert not given.isnan().any()
    with pytest.MonkeyPatch.context() as patch:
        from vllm.v1.attention.backends import fa_utils

        from tests.integrations.vllm.steps import flash_attention

        patch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention)
        reference, _ = serve_steps(layer, "cpu")
    # Both round to fp16, and probabilities are fp16 on the GPU; the reference differs from exact numbers by its format.
    error = (given.double() - reference.double()).norm() / reference.double().norm()
    assert error < 2e-3, float(error)
    assert (given.double() - exact).norm() <= 1.05 * (reference.double() - exact).norm() + 2e-3 * exact.norm()


@pytest.mark.parametrize("layer", INVARIANT, ids=str)
def test_steps_that_are_cut_otherwise_give_the_same_bits(layer: Layer):
    by_request = []
    for batches in (BATCHES, CUT_OTHERWISE):
        given, _ = serve_steps(layer, "cuda", batches)
        rows: dict[int, list[torch.Tensor]] = {}
        start = 0
        for request, count in (part for batch in batches for part in batch):
            rows.setdefault(request, []).append(given[start : start + count])
            start += count
        by_request.append({request: torch.cat(parts) for request, parts in rows.items()})
    one, other = by_request
    assert {request: len(rows) for request, rows in one.items()} == {r: len(rows) for r, rows in other.items()}
    assert all(torch.equal(rows, other[request]) for request, rows in one.items())
