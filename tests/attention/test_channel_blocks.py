"""Keys with a scale for each channel of 32 tokens: the reader lane by lane, the call, the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention import decode_attention
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime import native
from layouts.kv.channel_blocks import BLOCK_TOKENS, LIMIT, TAIL_TOKENS, ChannelBlocks
from layouts.kv.tile import block_token
from simulator import ROW, Int32, Int64, Warp
from tests.attention.channel_cases import attention, make_cached
from tests.attention.rig import SOFTMAX_SCALE, Operand, heads, make_rig, random_operand, random_probabilities

KEYS = format_of("int4_channel32")
needs_dsl = pytest.mark.skipif(native.dsl_version() is None, reason="the kernels are written in nvidia-cutlass-dsl")


def configs(head_dim: int, v_format: str, num_q_heads: int, num_kv_heads: int, page_tokens: int = 0) -> list[Any]:
    problem = AttentionProblem(
        2, 4096, num_q_heads, num_kv_heads, head_dim, head_dim, "int4_channel32", v_format, "bf16",
        page_tokens=page_tokens, features=Features(paged=page_tokens > 0, tail=True),
    )  # fmt: skip
    return candidate_configs(problem)


CASES = [
    (128, "int4_g4", 8, 1, 0),
    (128, "int4_g4", 64, 8, 64),
    (128, "int4_g1", 16, 1, 0),
    (128, "int4_g1", 32, 1, 0),
    (64, "int4_g2", 9, 3, 64),
    (64, "int8_token_head", 16, 2, 64),
    (64, "bf16", 8, 8, 32),
]


def key_block(head_dim: int, seed: int) -> torch.Tensor:
    """Channels of very different offsets and ranges, [32, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    spread, center = (torch.randn(head_dim, generator=generator).mul(1.5).exp() for _ in range(2))
    return torch.randn(BLOCK_TOKENS, head_dim, generator=generator) * spread + center


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reader_scores_a_full_block_as_its_values(case, run_on):
    config = configs(*case)[0]
    assert config.can_implement() is None
    rows = KEYS.row(case[0]).quantize(key_block(case[0], 1))
    rig = make_rig(run_on, config, [Operand(KEYS, case[0], rows), random_operand(config, 1, 2)])
    scores = rig.scores() / (SOFTMAX_SCALE * Warp.LOG2_E)
    codes, scale, shift = KEYS.row(case[0]).unpack(rows)
    terms = codes.double() * scale.double() + shift.double().abs()
    wanted = rig.keys @ rig.queries.T
    assert (np.abs(scores - wanted) <= 2.0**-11 * (terms.numpy() @ np.abs(rig.queries).T) + 1e-9).all()
    p = random_probabilities(config, 3)
    weighted = rig.weighted_values(p)
    assert np.abs(weighted - p.T @ rig.values).max() <= 2.0**-9 * (p.T @ np.abs(rig.values)).max()


@needs_dsl
@pytest.mark.parametrize("exponent", [-12, 0, 9])
def test_keys_of_any_size_up_to_the_limit_are_read(exponent, run_on):
    config = configs(128, "int4_g4", 8, 1)[0]
    x = (key_block(128, 4) * 2.0**exponent).clamp(-LIMIT, LIMIT)
    x[:, 5] = torch.tensor([-LIMIT, LIMIT]).repeat(16) if exponent > 0 else x[:, 5]
    rows = KEYS.row(128).quantize(x)
    rig = make_rig(run_on, config, [Operand(KEYS, 128, rows), random_operand(config, 1, 2)])
    scores = rig.scores() / (SOFTMAX_SCALE * Warp.LOG2_E)
    assert np.isfinite(scores).all()
    codes, scale, shift = KEYS.row(128).unpack(rows)
    terms = codes.double() * scale.double() + shift.double().abs() + 2.0**-20
    assert (np.abs(scores - rig.keys @ rig.queries.T) <= 2.0**-11 * (terms.numpy() @ np.abs(rig.queries).T)).all()


@needs_dsl
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("length", "slot"), [(33, 0), (95, 1), (1, 1)])
def test_the_reader_scores_the_rows_that_wait(case, length, slot, run_on):
    config = configs(*case)[0]
    head_dim, num_kv_heads = case[0], 3
    operand = Operand(KEYS, head_dim, KEYS.row(head_dim).quantize(key_block(head_dim, 1)))
    rig = make_rig(run_on, config, [operand, random_operand(config, 1, 2)])
    generator = torch.Generator().manual_seed(length)
    tail = torch.randn(2, TAIL_TOKENS, num_kv_heads, head_dim, generator=generator).half()
    memory = np.concatenate([np.array([0, slot], dtype=np.int32).view(np.uint8), np.zeros(8, np.uint8)])
    rig.warp.global_memory = np.concatenate([memory, tail.numpy().view(np.uint8).reshape(-1)])
    place = SimpleNamespace(shape=SimpleNamespace(num_kv_heads=Int32(num_kv_heads)), first_head=Int32(1))
    work = SimpleNamespace(request=Int32(1), place=place, length=Int32(length))
    reader: Any = rig.key_reader
    reader.open_tail(rig.key_state, SimpleNamespace(rows=Int64(16), slots=Int64(0)), work, Int32(1))
    first = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    firsts = [first - BLOCK_TOKENS, first, first + BLOCK_TOKENS]
    assert [bool(np.all(reader.in_tail(rig.key_state, Int32(at)))) for at in firsts] == [False, True, False]
    for at in firsts:
        reader.ask_tail(rig.key_state, Int32(at))
    starts = [
        16 + 2 * head_dim * (num_kv_heads * (TAIL_TOKENS * slot + first % TAIL_TOKENS + i) + 2) for i in range(32)
    ]
    assert rig.warp.prefetched == {start + line for start in starts for line in range(0, 2 * head_dim, 128)}
    scores = np.full((BLOCK_TOKENS, config.warp_queries), np.nan)
    for j, columns in enumerate(reader.tail_scores(rig.key_state, Int32(first))):
        for column, score in enumerate(columns):
            scores[np.asarray(block_token(config.token_bits, ROW, j)), heads(column)] = (
                score * rig.key_state.score_scale
            )
    keys = tail[slot, first % TAIL_TOKENS :][:BLOCK_TOKENS, 2].double().numpy()
    terms = np.abs(keys) @ np.abs(rig.queries).T
    assert (np.abs(scores / (SOFTMAX_SCALE * Warp.LOG2_E) - keys @ rig.queries.T) <= 1e-5 * terms).all()


# -- the call ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "layout"), [(64, "NHD"), (32, "HND"), (None, "NHD"), (None, "HND")])
@pytest.mark.parametrize(("q_len", "window"), [(1, None), (3, 40)])
def test_the_reference_attends_over_full_blocks_and_the_rows_that_wait(page_size, layout, q_len, window):
    cached = make_cached([0, 1, 31, 32, 33, 100, 128], page_size=page_size, layout=layout)
    q = torch.randn(7, q_len, 8, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    out = decode_attention(q, window_size=window, **cached.arguments)
    wanted = attention(q, cached, window)
    assert float((out.double() - wanted).abs().max()) <= 2.0**-8 * float(wanted.abs().max())


def test_a_request_without_tokens_needs_no_slot():
    """As one that pads a batch; append needs none either."""
    cached = make_cached([40, 0, 33])
    q = torch.randn(3, 1, 8, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    want = decode_attention(q, **cached.arguments)
    for slot in (-1, 2**31 - 1):
        slots = cached.arguments["tail_slots"].clone()
        slots[1] = slot
        assert torch.equal(decode_attention(q, **cached.arguments | {"tail_slots": slots}), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k_tail": None},
            r"k_tail: got None, want fp16 \[slots, 64, 2, 128\], where .* wait, for int4_channel32",
        ),
        ({"tail_slots": None}, r"tail_slots: got None, want int32 \[2\], a slot of k_tail .*, for int4_channel32 keys"),
        (
            {"k_tail": torch.zeros(4, 32, 2, 128).half()},
            r"k_tail: got shape \[4, 32, 2, 128\], want \[slots, 64, 2, 128\]",
        ),
        ({"k_tail": torch.zeros(4, 64, 2, 128)}, "k_tail: got dtype torch.float32, want torch.float16"),
        ({"tail_slots": torch.zeros(3, dtype=torch.int32)}, r"tail_slots: got shape \[3\], want \[2\]"),
        ({"tail_slots": torch.tensor([0, 9], dtype=torch.int32)}, "tail_slots: got 9 for request 1, want 0 to 4"),
        (
            {"kv_format": ("int4_g4", "int4_channel32")},
            "kv_format: got int4_channel32 for v_cache, which is for keys alone",
        ),
        ({"kv_format": "int4_g4"}, "k_tail: got a tensor, want None for int4_g4 keys"),
    ],
)
def test_what_a_call_with_keys_in_blocks_cannot_have_is_named(changes, message):
    cached = make_cached([40, 64])
    q = torch.zeros(2, 1, 4, 128, dtype=torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match=message):
        decode_attention(q, **(cached.arguments | changes))


def test_pages_of_half_a_block_are_refused():
    cached = make_cached([40, 64])
    halves = {
        name: cached.arguments[name].view(-1, 16, 2, cached.arguments[name].shape[3]) for name in ("k_cache", "v_cache")
    }
    with pytest.raises(ValueError, match="got pages of 16 tokens, want a multiple of 32 for int4_channel32"):
        decode_attention(torch.zeros(2, 1, 4, 128).bfloat16(), **(cached.arguments | halves))


@pytest.mark.parametrize("head_dim", [80, 256])
def test_other_head_dims_are_refused(head_dim):
    assert cannot_read(KEYS, head_dim) == f"head_dim {head_dim} of int4_channel32 is not 64 or 128"


def test_extend_attention_refuses_such_caches_by_name():
    cached = make_cached([40, 64])
    a = cached.arguments
    with pytest.raises(
        ValueError, match="got int4_channel32 for k_cache, want one of those that extend attention reads: bf16, "
    ):
        extend_attention(
            torch.zeros(2, 4, 128).bfloat16(), a["k_cache"], a["v_cache"], a["seq_lens"], block_table=a["block_table"],
            cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), kv_format=a["kv_format"],
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_layout_is_proved(head_dim):
    assert len(ChannelBlocks(head_dim).verify()) == 4
    with pytest.raises(ValueError, match="want whole blocks of 32 tokens"):
        ChannelBlocks(head_dim).quantize(torch.zeros(33, head_dim))
