"""Steps of an engine through the plugin's attention backend, on a GPU; needs vLLM. `steps` has what is served."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.integrations.vllm.steps import (
    BATCHES,
    Layer,
    TorchLaunches,
    constants_file,
    serve_shared,
    serve_steps,
)

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
    Layer("auto", "int4_g4", caches=ALL_EXTEND, fused=False),
    Layer("auto", "int8_token_head,int4_g4", caches=ALL_EXTEND),
    Layer("auto", "fp16,int4_g4", caches=ALL_EXTEND),
    Layer("auto", "fp16,int4_g4", caches={"extend": False}),  # as many new tokens go
    Layer("auto", "int8_token_head,fp16", window=24, caches=ALL_EXTEND),
    Layer("int4_per_token_head", caches=ALL_EXTEND),
    Layer("int4_per_token_head", window=24, sinks=True, speculative=3),
    Layer("auto", "fp16", shared=True),
    Layer("fp8", window=24, shared=True, caches=ALL_EXTEND),
    Layer("auto", "int4_g4", speculative=20),
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
LONG = (
    (((0, 700),), ((0, 1), (1, 900)), ((0, 1), (1, 1), (2, 333)), ((0, 1), (1, 1), (2, 1), (3, 1000))),
    (
        ((0, 512),),
        ((0, 188), (1, 300)),
        ((0, 1), (1, 500), (2, 11)),
        ((0, 1), (1, 100), (2, 322), (3, 1)),
        ((0, 1), (1, 2), (2, 1), (3, 1)),
        ((3, 998),),
    ),
)
"""Steps of many tokens, cut in two ways."""


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All kernels of the layers of chosen tests, compiled side by side where they are not there yet."""
    from cute_kernels.integrations import attention_kernels
    from cute_kernels.integrations.vllm import prepare

    constants = constants_file(str(tmp_path_factory.mktemp("constants")))
    device, specs = torch.device("cuda", 0), {}
    for item in request.session.items:
        if item.path != request.path:
            continue
        layer = item.callspec.params["layer"]
        if "calibrated" in item.originalname:
            layer = dataclasses.replace(layer, constants=constants)
        impl = layer.make("cuda")
        invariant = layer.caches.get("invariant", False)
        decodes = attention_kernels.Decodes(
            (1, 2, 3, 4), min(layer.speculative + 1, 16), 128, layer.page, torch.float16, invariant
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


CALIBRATED = (
    Layer("auto", "fp16", caches=ALL_EXTEND),
    Layer("auto", "fp16", window=24, sinks=True, speculative=3, caches={"extend": False}),
    Layer("auto", "int8_token_head,int4_g4", caches=ALL_EXTEND),
)
"""With a transform of K and V."""


@pytest.mark.parametrize("layer", CALIBRATED, ids=str)
def test_calibrated_steps_give_what_the_reference_gives(layer: Layer, tmp_path):
    test_steps_give_what_the_reference_gives(dataclasses.replace(layer, constants=constants_file(str(tmp_path))))


@pytest.mark.parametrize("layer", LAYERS[:2] + LAYERS[6:8], ids=str)
def test_a_page_is_shared_in_the_step_that_fills_it(layer: Layer):
    given, exact = serve_shared(layer, "cuda")
    assert (given.double() - exact).abs().max() < 4e-3


CAPTURED = tuple(
    Layer("auto", form, caches={"invariant": True}) for form in ("fp16", "int4_g4", "int8_token_head,fp16")
)
"""Whose steps are all served by extend attention, decoding ones, too."""


@pytest.mark.parametrize("layer", CAPTURED, ids=str)
def test_captured_steps_copy_no_queries(layer: Layer):
    """They are parts of a fused projection; a graph's replay gives what its launches give one by one."""
    noted: list[str] = []
    stream = torch.cuda.Stream()

    def capture(step: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), TorchLaunches() as mode:
            step()
        noted.extend(mode.names)
        *_, output = step.args
        output.fill_(torch.nan)
        graph.replay()

    given, _ = serve_steps(layer, "cuda", call=capture)
    assert not {"aten::clone", "aten::copy_", "aten::_to_copy"} & set(noted), noted
    assert torch.equal(given, serve_steps(layer, "cuda")[0])


def by_request(given: torch.Tensor, batches: tuple[tuple[tuple[int, int], ...], ...]) -> dict[int, torch.Tensor]:
    """The rows of each request, in the order of its tokens."""
    rows: dict[int, list[torch.Tensor]] = {}
    start = 0
    for request, count in (part for batch in batches for part in batch):
        rows.setdefault(request, []).append(given[start : start + count])
        start += count
    return {request: torch.cat(parts) for request, parts in rows.items()}


@pytest.mark.parametrize("layer", INVARIANT, ids=str)
@pytest.mark.parametrize("cuts", [(BATCHES, CUT_OTHERWISE), LONG], ids=["short", "long"])
def test_steps_that_are_cut_otherwise_give_the_same_bits(layer: Layer, cuts: tuple):
    served = dataclasses.replace(layer, pages=64)
    one, other = (by_request(serve_steps(served, "cuda", batches)[0], batches) for batches in cuts)
    assert {request: len(rows) for request, rows in one.items()} == {r: len(rows) for r, rows in other.items()}
    unlike = {request: (rows != other[request]).any(-1).any(-1).nonzero().flatten() for request, rows in one.items()}
    assert not any(map(len, unlike.values())), unlike
