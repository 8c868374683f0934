"""Decode attention's calls that keys times queries serve, with CPU tensors for CUDA ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import decode_attention
from cute_kernels.attention import ops
from cute_kernels.attention.arguments import EXTEND
from cute_kernels.attention.extend_schedule import DECODE_ROWS
from cute_kernels.formats.kv import format_of
from tests.launchers import recording

BATCH, HEADS, KV_HEADS = 40, 8, 2


@pytest.fixture
def launches():
    """What would be launched."""
    with recording() as recorded:
        yield recorded.launches


def given(q_len: int, batch: int = BATCH, kv_format: str = "e4m3_tensor", **options: Any) -> dict[str, Any]:
    cache = torch.zeros(batch, 256, KV_HEADS, format_of(kv_format).row_bytes(128), dtype=torch.uint8)
    scale = torch.ones(()) if format_of(kv_format).given_scale else None
    return {
        "q": torch.zeros(batch, q_len, HEADS, 128).bfloat16(),
        "k_cache": cache,
        "v_cache": cache,
        "seq_lens": torch.full((batch,), 100, dtype=torch.int32),
        "kv_format": kv_format,
        "k_scale": scale,
        "v_scale": scale,
        **options,
    }


def serves(launches) -> bool:
    (launch, *_) = launches
    return launch.symbol.startswith("extend")


def test_many_rows_of_queries_are_columns_of_products(launches):
    group = HEADS // KV_HEADS
    for q_len in (1, 4, DECODE_ROWS // group, DECODE_ROWS // group + 1, 16):
        launches.clear()
        out = decode_attention(**given(q_len))
        assert out.shape == (BATCH, q_len, HEADS, 128)
        assert serves(launches) == (q_len * group > DECODE_ROWS), q_len


def test_the_launch_is_one_of_extend_attention_over_equal_requests(launches):
    call = given(16, softmax_scale=0.25)
    out, lse = decode_attention(**call, return_lse=True)
    found = dict(zip(EXTEND.names, launches[0].arguments, strict=True))
    assert found["q"].shape == found["out"].shape == (BATCH * 16, HEADS, 128)
    assert found["out"].data_ptr() == out.data_ptr() and found["lse"] == lse.data_ptr()
    assert found["cu_seqlens"].tolist() == list(range(0, 16 * BATCH + 1, 16)) and found["seq_lens"] is call["seq_lens"]
    assert (found["softmax_scale"], found["prefix_only"], found["num_splits"]) == (0.25, 0, 1)
    assert lse.shape == (BATCH, 16, HEADS)


def test_every_option_of_a_call_arrives(launches):
    sinks, table = torch.randn(HEADS), torch.zeros(BATCH, 4, dtype=torch.int32)
    call = given(16, sinks=sinks, window_size=9, block_table=table)
    call |= {name: torch.zeros(4, 64, *call[name].shape[2:], dtype=torch.uint8) for name in ("k_cache", "v_cache")}
    decode_attention(**call)
    assert serves(launches)
    found = dict(zip(EXTEND.names, launches[0].arguments, strict=True))
    assert (found["sinks"], found["block_table"]) == (sinks.data_ptr(), table.data_ptr())
    scales = [found[f"{name}_scale"] for name in "kv"]
    assert scales == [call[f"{name}_scale"].data_ptr() for name in "kv"] and found["window"] == 9


def test_queries_of_a_fused_projection_are_read_where_they_lie(launches):
    """By the kernel of others of the same shape."""
    fused = torch.zeros(BATCH, 16, 2 * HEADS, 128).bfloat16()[:, :, :HEADS]
    for q in (fused, fused.contiguous(), fused):
        launches.clear()
        decode_attention(**given(16, q=q))
        (launch,) = launches
        assert serves(launches)
        assert launch.arguments[0].data_ptr() == q.data_ptr() and launch.arguments[0].stride() == q.stride()[1:]


def test_queries_of_uneven_distances_are_copied(launches):
    q = torch.zeros(BATCH, 17, 2 * HEADS, 128).bfloat16()[:, :16, :HEADS]
    for _ in range(2):
        decode_attention(**given(16, q=q))
        assert serves(launches) and launches[-1].arguments[0].is_contiguous()


@pytest.mark.parametrize(
    "options",
    [{"num_splits": 1}, {"softcap": 3.0}, {"alibi_slopes": torch.zeros(HEADS)}, {"batch": 3}, {"kv_format": "int4_g1"}],
    ids=str,
)
def test_what_key_rows_do_not_take_is_decode_s(options, launches):
    """Nor few work tiles, whose parts decode attention merges sooner; INT4's keys would be rounded."""
    decode_attention(**given(16, **options))
    assert not serves(launches)


def test_caches_that_begin_between_pieces_of_16_bytes_are_refused(launches):
    """By decode attention's own plan, which names them."""
    call = given(16)
    moved = torch.zeros(call["k_cache"].numel() + 16, dtype=torch.uint8)[4:]
    call["v_cache"] = moved[: call["k_cache"].numel()].view(call["k_cache"].shape)
    with pytest.raises(ValueError, match="v_cache: got a tensor that starts 4 bytes past a multiple of 16"):
        decode_attention(**call)
    assert not launches


def test_the_same_plan_serves_the_next_call(launches):
    for _ in range(3):
        decode_attention(**given(16))
    assert len(launches) == 3 and len(ops.launch.plans) == 1
