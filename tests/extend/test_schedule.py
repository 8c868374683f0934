"""Work tiles and configurations: plain Python."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import REGISTERS, TILE_ROWS, ProducerPipeline, UnpackedKeys
from cute_kernels.attention.extend_schedule import (
    choose,
    choose_key_rows,
    choose_splits,
    choose_unpacked,
    count_tiles,
    decode_sms,
    decodes_with_key_rows,
    key_rows_of,
    queries_to_unpack_for,
    serves_key_rows,
)
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.scores.features import Features
from tests.each import each
from tests.extend.cases import FORMATS, UNPACKED


def slots_of(q_lens: list[int], group: int) -> list[tuple[int, int]]:
    """(request, work tile of it) by slot as the kernel finds them, None where a slot has none."""
    ends = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    firsts = [ends[b] * group // TILE_ROWS + b for b in range(len(q_lens))]
    found = []
    for slot in range(count_tiles(ends[-1], len(q_lens), group, 1)):
        request = max(b for b, first in enumerate(firsts) if first <= slot)
        tile = slot - firsts[request]
        if tile * TILE_ROWS < q_lens[request] * group:
            found.append((request, tile))
    return found


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_every_work_tile_has_one_slot(group):
    generator = random.Random(group)
    for _ in range(200):
        q_lens = [generator.choice([0, 1, 31, 32, 33, 128, generator.randrange(900)]) for _ in range(9)]
        want = [(b, m) for b, n in enumerate(q_lens) for m in range(-(-n * group // TILE_ROWS))]
        assert slots_of(q_lens, group) == want


@each("head_dim", [64, 128, 192, 256, 512])
@each("kv_format", FORMATS)
def test_every_format_has_a_kernel(kv_format, head_dim):
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    config = choose(
        AttentionProblem.ragged(head_dim, kv_format, kv_format, q_dtype, 64, Features(causal=True, paged=True))
    )
    assert config.can_implement() is None
    assert config.name.isidentifier()


@pytest.mark.parametrize(
    "total_q, batch, max_seq_len, splits",
    [
        (16384, 1, 16384, 1),  # 4096 work tiles
        (512, 1, 65536, 1),  # 128, which 132 CTAs take at once
        (64, 1, 65536, 8),  # 16
        (2048, 1, 32768, 1),  # 512: to cut them into 1.03 rounds of less is not worth it
        (544, 32, 8192, 1),
        (128, 4, 32768, 4),
        (64, 1, 1000, 1),
        (0, 3, 1000, 1),
        (1, 1, 131072, 16),
    ],
)
def test_few_work_tiles_are_cut(total_q, batch, max_seq_len, splits):
    assert choose_splits(total_q, batch, 32, 8, max_seq_len, 132) == splits


def test_splits_never_cost_much():
    """No number of work tiles leaves more CTAs idle than it would without splits."""
    for batch, q_len in itertools.product((1, 2, 5, 17, 32, 64), (1, 17, 40, 300, 2048)):
        tiles = batch * -(-q_len * 4 // TILE_ROWS) * 8
        splits = choose_splits(batch * q_len, batch, 32, 8, 32768, 132)
        assert -(-tiles * splits // 132) / splits <= -(-tiles // 132)


def test_what_cannot_be_is_said(monkeypatch):
    # A warp would wait for ever for registers that its CTA does not have.
    monkeypatch.setitem(REGISTERS, ("bytes", 4), (96, 208))
    good = ExtendConfig("bf16", "bf16", "bf16", 128)
    assert good.can_implement() is None
    for wrong, reason in (
        (ExtendConfig("bf16", "bf16", "fp16", 128), "q_dtype"),
        (choose_unpacked(choose(AttentionProblem.ragged(128, "bf16", "int4_g4", "bf16")))[1], "one of 16 bits"),
        (choose_unpacked(choose(AttentionProblem.ragged(128, "int8_g2", "int8_g2", "bf16")))[0], "2 scales a row"),
        (ExtendConfig("int4_channel32", "int4_g4", "bf16", 128), "does not read int4_channel32"),
        (ExtendConfig("e4m3_head", "e4m3_head", "bf16", 128), "e4m3_tensor"),
        (ExtendConfig("bf16", "bf16", "bf16", 72), "head_dim 72 is not one of 64, 80, 96, 128, 192, 256, 512"),
        (ExtendConfig("bf16", "bf16", "bf16", 256), "shared memory"),
        (ExtendConfig("bf16", "bf16", "bf16", 128, ProducerPipeline(producer_warps=5)), "producer_warps"),
        (ExtendConfig("int4_g1", "int4_g1", "bf16", 128, keys=UnpackedKeys()), "head by head"),
        (ExtendConfig("int8_tensor", "int8_tensor", "bf16", 128), "96 and 208 registers are more than 384 threads"),
        (ExtendConfig("bf16", "bf16", "bf16", 128, tree=True, features=Features(causal=True)), "a tree's mask"),
    ):
        assert reason in str(wrong.can_implement())


@each("head_dim", [64, 80, 128, 192, 256, 512])
@each("kv_format", UNPACKED)
def test_every_format_can_be_unpacked(kv_format, head_dim):
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    config = choose(
        AttentionProblem.ragged(head_dim, kv_format, kv_format, q_dtype, 16, Features(causal=True, paged=True))
    )
    unpack, attention = choose_unpacked(config)
    assert (unpack.can_implement() is None) == (config.can_implement() is None), "narrow groups are not read at all"
    assert attention.can_implement() is None
    assert attention.units == config.units and attention.operand_types == (unpack.dtype, unpack.dtype)
    assert not attention.decodes and attention.tile_scales == unpack.tile_scales


def test_formats_whose_unpacked_rows_are_alike_share_a_kernel():
    causal = Features(causal=True, paged=True)
    kernels = {
        name: choose_unpacked(choose(AttentionProblem.ragged(128, name, name, "bf16", 64, causal)))[1]
        for name in UNPACKED
    }
    assert kernels["int8_token_head"] == kernels["e4m3_token_head"]
    assert kernels["int8_tensor"] == kernels["e4m3_tensor"] == kernels["e4m3_head"]
    assert kernels["int4_g1"] == kernels["int4_g8"]
    assert len(set(kernels.values())) == 5, "and with scales of channels, and without any scale"


@pytest.mark.parametrize(
    "kv_format, page_tokens, least, most",
    [
        ("int8_token_head", 64, 128, 256),
        ("e4m3_tensor", 64, 200, 400),
        ("int4_g4", 64, 128, 256),
        ("bf16", 16, None, None),
        ("bf16", 0, None, None),
    ],
)
def test_unpacking_is_for_many_queries(kv_format, page_tokens, least, most):
    """Of 4 heads a KV head: chunks, not drafts that are verified; a request of a batch counts as its average."""
    problem = AttentionProblem.ragged(
        128, kv_format, kv_format, "bf16", page_tokens, Features(causal=True, paged=page_tokens > 0)
    )
    config = choose(problem)
    queries = queries_to_unpack_for(config, 1, 4, None)
    if least is None:
        assert queries is None
        return
    assert queries is not None and least <= queries <= most
    assert queries_to_unpack_for(config, 8, 4, None) == 8 * queries
    fewer = queries_to_unpack_for(config, 1, 8, None)
    assert fewer is not None and fewer <= queries // 2 + 1
    assert queries_to_unpack_for(config, 1, 4, queries - 1) is None, "a window lets few queries see a token"


def test_decoding_gets_the_sms_that_let_both_end_together():
    """63 requests over 8192 tokens of 8 KV heads in bf16 beside 2048 queries of 32 heads: 44 SMs were best on an
    H200."""
    decode_bytes, prefill_flops = 63 * 8192 * 8 * 512, 4 * 128 * 32 * 2048 * (8192 - 1024)
    sms = decode_sms(decode_bytes, prefill_flops, 132)
    assert sms is not None and 36 <= sms <= 48
    assert decode_sms(decode_bytes / 30, prefill_flops, 132) is None, "a prefill on fewer SMs would take longer"
    assert decode_sms(decode_bytes, prefill_flops / 30, 132) is None
    assert decode_sms(decode_bytes, prefill_flops, 1) is None


@each("tile_rows", [8, 40, 72])
@each("page_tokens", [0, 16, 64])
@each("name", ["int8_token_head", "e4m3_tensor", "e5m2", "int4_g1", "int4_g4"])
def test_key_rows_fit_an_sm(name, page_tokens, tile_rows):
    for features in (Features(causal=True, paged=page_tokens > 0), Features(head_major=True)):
        config = key_rows_of(choose(AttentionProblem.ragged(128, name, name, "bf16", page_tokens, features)), tile_rows)
        assert config is not None and config.can_implement() is None
        assert config.pipeline.num_stages >= 4, "memory's latency is hidden"
        assert config.smem_bytes <= config.limits.shared_bytes


def few(name: str = "e4m3_tensor", head_dim: int = 128, **features: Any) -> list[ExtendConfig]:
    return choose_key_rows(
        choose(AttentionProblem.ragged(head_dim, name, name, "bf16", 64, Features(paged=True, **features)))
    )


def test_key_rows_are_for_what_they_are_faster_for():
    none = [few("bf16"), few("int4_g8"), few(head_dim=64), few(head_dim=256)]
    assert not any([*none, few(soft_cap=True), few(alibi=True)])
    for served in (
        few(),
        *map(few, ("int8_token_head", "int4_g1", "int4_g4")),
        few(causal=True, window=True, sinks=True, head_major=True),
    ):
        assert [config.tile_rows for config in served] == [40, 72]


def test_tensor_maps_bring_rows_and_headers_that_lie_together():
    def mapped(name: str, heads: int = 1, **features: Any) -> bool:
        problem = AttentionProblem.ragged(128, name, name, "bf16", 64, Features(paged=True, **features))
        configs = choose_key_rows(choose(problem), mapped=True, tile_heads=heads)
        assert configs and len({config.mapped for config in configs}) == 1
        assert all(config.can_implement() is None for config in configs)
        return configs[0].mapped

    assert all(map(mapped, ("int8_token_head", "e4m3_token_head", "int4_g4")))
    assert not any(map(mapped, ("e4m3_tensor", "int4_g1", "int4_g2")))
    assert mapped("int4_g4", head_major=True) and not mapped("int8_token_head", head_major=True)
    assert mapped("int4_g1", heads=2), "two heads' rows lie in pieces of 16 bytes, one head's begin between them"
    assert not mapped("int4_g2", heads=2) and not mapped("int4_g1", heads=2, head_major=True)


def test_key_rows_serve_what_is_one_work_tile():
    narrow, wide = few()
    shape = (32, 32, 8, 132)
    assert serves_key_rows(wide, 18 * 32, *shape) and not serves_key_rows(wide, 18 * 32 + 1, *shape)
    assert serves_key_rows(narrow, 10 * 32, *shape) and not serves_key_rows(narrow, 10 * 32 + 1, *shape)
    assert serves_key_rows(wide, 9 * 8, 8, 64, 8, 132) and not serves_key_rows(wide, 10 * 8, 8, 64, 8, 132)
    assert not serves_key_rows(wide, 17, 1, 32, 8, 132), "8 work tiles leave SMs idle, or are cut"


@pytest.mark.parametrize(
    "name, q_len, tile_rows",
    [
        *(("e4m3_tensor", 8, None), ("e4m3_tensor", 9, 40), ("e4m3_tensor", 10, 40), ("e4m3_tensor", 16, 72)),
        *(("int8_tensor", 16, 72), ("int4_g1", 16, None), ("int8_token_head", 16, 72)),
    ],
)
def test_decode_attention_has_exact_operands_of_more_rows_than_its_warps(name, q_len, tile_rows):
    found = decodes_with_key_rows(few(name), 32, q_len, 32, 8, 132)
    assert (None if found is None else found.tile_rows) == tile_rows
