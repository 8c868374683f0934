"""A later turn hides what was generated behind the end of a row, as transformers' caches let it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import cute_kernels.integrations.transformers as ck
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_accelerate import CACHES_LATENTS, assert_same_choices, record_on_cpu

IDS = torch.randint(3, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(5))
FIRST, ENDS = 14, (9, 14, 12)
"""Columns of the first turn, and where its rows ended."""


def mask_of(columns: int, hidden: bool) -> torch.Tensor:
    """The second row is padded on the left; with ``hidden`` rows end where they ended."""
    mask = torch.ones(3, columns, dtype=torch.long)
    mask[1, :3] = 0
    for row, end in enumerate(ENDS if hidden else ()):
        mask[row, end:FIRST] = 0
    return mask


@torch.no_grad()
def turn(model: Any, cache: Any, start: int, end: int, hidden: bool) -> torch.Tensor:
    mask = mask_of(end, hidden)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
    given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return model(IDS[:, start:end], **given).logits.double()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= 0.03 * wanted.norm())


LATENT_DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
CASES = [
    ("llama", "bf16", 20),  # as many tokens as a step has
    ("llama", "int8_token_head", 15),
    ("qwen3", ("int8_token_head", "bf16"), 20),
    ("mistral, window", "bf16", 20),
    pytest.param("deepseek-v3", "mla_bf16", 20, marks=pytest.mark.skipif(not CACHES_LATENTS, reason="caches K and V")),
]


@pytest.mark.parametrize(("name", "kv_format", "end"), CASES)
def test_tokens_behind_the_end_of_a_row_are_hidden_in_the_next_turn(name, kv_format, end):
    model = DECODERS[name].build(torch.bfloat16, **(LATENT_DIMS if name == "deepseek-v3" else {}))
    plain, wanted = DynamicCache(), []
    for start, stop, hidden in ((0, FIRST, False), (FIRST, end, True), (end, end + 1, True)):
        wanted.append(turn(model, plain, start, stop, hidden))
    ck.accelerate(model, kv_format=kv_format)
    cache = ck.DecodeCache(kv_format)
    turn(model, cache, 0, FIRST, hidden=False)
    assert close(turn(model, cache, FIRST, end, hidden=True), wanted[1])
    assert close(turn(model, cache, end, end + 1, hidden=True), wanted[2])
    assert cache.columns is not None
    assert cache.columns.seq_lens.tolist() == mask_of(end + 1, hidden=True).sum(1).tolist()
    with pytest.raises(ValueError, match="^attention_mask: got another mask of the first .*, want one that shows none"):
        turn(model, cache, end + 1, end + 2, hidden=False)


def test_a_recorded_step_that_hides_tokens_runs_as_usual():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    replay, found = record_on_cpu(model), []
    for steps in (0, 4):
        cache = ck.DecodeCache("bf16")
        turn(model, cache, 0, FIRST - steps, hidden=False)
        for column in range(FIRST - steps, FIRST):
            turn(model, cache, column, column + 1, hidden=False)
        before = replay.replays
        found.append(turn(model, cache, FIRST, FIRST + 1, hidden=True))
        assert replay.replays == before
    assert close(*found)


def test_generate_goes_on_behind_a_row_that_ended_early():
    model: Any = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    free = model.generate(IDS[:, :8], max_new_tokens=6, **options).sequences
    options["eos_token_id"] = int(free[0, 10])
    first = model.generate(IDS[:, :8], max_new_tokens=6, **options)
    told = first.sequences
    assert told[0, 11:].eq(0).all() and told.shape[1] == 14
    ids = torch.cat((told, IDS[:, 20:]), dim=1)
    options |= {"attention_mask": (ids != 0).long(), "max_new_tokens": 4, "output_logits": True}
    found = model.generate(ids, past_key_values=first.past_key_values, **options)
    assert_same_choices(found, model.generate(ids, use_cache=False, **options))
