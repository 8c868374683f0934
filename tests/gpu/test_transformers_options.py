"""What users ask of transformers models, on a GPU: kept caches, later turns, checked calls, adapters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear, arguments, quantize_model
from cute_kernels.integrations.transformers.graphs import StepReplay
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.llamas import small_llama
from tests.integrations.test_adapters import adapted, dense_of, gradients, replaced

pytestmark = pytest.mark.gpu

IDS = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(5))
FIRST, ENDS = 24, (19, 24, 22)


def built(name: str = "llama") -> Any:
    return DECODERS[name].build(torch.bfloat16).cuda()


@torch.no_grad()
def turn(model: Any, cache: Any, start: int, end: int, hidden: bool) -> torch.Tensor:
    mask = torch.ones(3, end, dtype=torch.long, device="cuda")
    for row, stop in enumerate(ENDS if hidden else ()):
        mask[row, stop:FIRST] = 0
    positions = (mask.cumsum(1) - 1)[:, start:]
    given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return model(IDS[:, start:end].cuda(), **given).logits.double()


@pytest.mark.parametrize("kv_format", ["bf16", "int8_token_head"])
@pytest.mark.parametrize("end", [25, 30])
def test_a_later_turn_hides_tokens_behind_the_end_of_a_row_and_its_steps_are_recorded(kv_format, end):
    model, plain, wanted = built(), DynamicCache(), []
    spans = [(0, FIRST, False), (FIRST, end, True), *((i, i + 1, True) for i in range(end, end + 6))]
    for span in spans:
        wanted.append(turn(model, plain, *span))
    ck.accelerate(model, kv_format=kv_format)
    cache = ck.DecodeCache(kv_format, 64)
    for span, want in zip(spans, wanted, strict=True):
        found = turn(model, cache, *span)
        assert (found - want).norm() <= 0.05 * want.norm(), span
    assert isinstance(model.forward, StepReplay) and model.forward.reason is None and model.forward.replays >= 4


def saved(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kept", [saved, copy.deepcopy], ids=["file", "copy"])
def test_a_cache_that_was_kept_amid_recorded_steps_goes_on(kept):
    model = built()
    ck.accelerate(model, kv_format="int4_g4")
    cache = ck.DecodeCache("int4_g4", 64)
    turn(model, cache, 0, 20, False)
    for i in range(20, 26):
        turn(model, cache, i, i + 1, False)
    again = kept(cache)
    for i in range(26, 34):
        found, want = (turn(model, one, i, i + 1, False) for one in (again, cache))
        assert torch.equal(found, want)


@pytest.mark.parametrize("weights", [None, "w4g64"])
def test_a_model_generates_while_every_call_is_checked(weights):
    model, other = built(), built()
    ck.accelerate(other, kv_format="int8_token_head", weights=weights)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    ids, mask = IDS.cuda(), torch.ones_like(IDS).cuda()
    mask[0, :7] = 0
    with arguments.checking_values():
        ck.accelerate(model, kv_format="int8_token_head", weights=weights)
        found = model.generate(ids, attention_mask=mask, **options)
    want = other.generate(ids, attention_mask=mask, **options)
    assert not isinstance(model.forward, StepReplay)
    assert (found == want).float().mean() > 0.95  # recorded steps fuse more: a tie may fall the other way


def test_adapters_have_the_gradients_of_the_dense_model():
    model = quantize_model(
        small_llama(hidden_size=128, intermediate_size=64, head_dim=64), bits=8, group_size=32
    ).cuda()
    dense = replaced(copy.deepcopy(model), QuantizedLinear, dense_of)
    found = gradients(adapted(model, QuantizedLinear).cuda(), "cuda")
    wanted = gradients(adapted(dense, torch.nn.Linear).cuda(), "cuda")
    assert found.keys() == wanted.keys() and len(found) == 2 * 3 * 2
    assert all((found[name] - wanted[name]).norm() <= 0.05 * wanted[name].norm() for name in found)
