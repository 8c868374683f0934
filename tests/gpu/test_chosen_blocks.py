"""Attention over chosen blocks on a GPU, against fp64: decode and extend, formats, pages and whole caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import decode_attention, extend_attention
from cute_kernels.attention.reference import decode_attention_reference, extend_attention_reference
from cute_kernels.runtime import KernelSpec
from tests.attention import cases
from tests.attention.lists import HEADS, LISTS, odd_call, tables_of
from tests.attention.test_chosen_blocks import LENGTHS, Q_LENS, blocks_for
from tests.extend import cases as extend_cases
from tests.gpu.specs import products_needed_by

pytestmark = pytest.mark.gpu

FORMATS = (
    "bf16",
    "int8_token_head",
    "e4m3_tensor",
    "e4m3_head",
    "e4m3_token_head",
    "int8_channel",
    "int4_g1",
    "int4_g4",
)
FORMATS += (("int8_token_head", "int4_g4"), ("bf16", "int8_token_head"))
IN_HEADS = ("int4_g4", "int8_token_head", ("int8_token_head", "int4_g4"))


def specs() -> list[KernelSpec]:
    """Those of the tests of one call, and of one query of 8 KV heads over pages of 64: others are
    compiled when they are asked for."""

    def work() -> None:
        wide_call("cpu").run()
        calls = [small_call("cpu"), wide_call("cpu"), *(decode_call(name, 64, 1, 8, blank=True) for name in FORMATS)]
        calls += [decode_call(name, 64, 1, 8, blank=True, cache_layout="HND") for name in IN_HEADS]
        for call in calls:
            blocks = blocks_for(LENGTHS, [1] * len(LENGTHS), call.q.shape[2] // 4, 64, 768)
            for num_splits in (None, 1):
                call.run(**blocks, num_splits=num_splits)

    return products_needed_by(work)


def small_call(device: str) -> cases.Call:
    return cases.make_call(
        "int4_g4", LENGTHS, num_kv_heads=2, group=4, head_dim=128, page_size=64, max_seq_len=768, poison=False,
        device=device,
    )  # fmt: skip


def wide_call(device: str) -> cases.Call:
    return cases.make_call(
        "bf16", LENGTHS, num_kv_heads=8, group=4, head_dim=128, page_size=64, max_seq_len=768, poison=False,
        device=device,
    )  # fmt: skip


def decode_call(kv_format: Any, page_size: int | None, q_len: int, num_kv_heads: int, **options: Any) -> cases.Call:
    return cases.make_call(
        kv_format, LENGTHS, num_kv_heads=num_kv_heads, group=4, head_dim=128, q_len=q_len, page_size=page_size,
        max_seq_len=768, sinks=True, poison=False, **options,
    )  # fmt: skip


def on(device: str, blocks: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in blocks.items()}


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("page_size, tokens", [(None, 64), (None, 128), (16, 64), (64, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize("batch", [1, 5, 300])
def test_any_list_is_a_call_over_the_pages_that_pytorchs_operations_find(lists, page_size, tokens, batch):
    pages, lengths = (x.cuda() for x in tables_of(odd_call(lists, page_size, tokens, batch)[0]))
    call, options = odd_call(lists, page_size, tokens, batch, "cuda")
    q, cache = call.q.normal_(), call.k.cache.normal_()
    out, lse = decode_attention(q, cache, cache, call.seq_lens, kv_format="bf16", **options, return_lse=True)
    cache = cache.view(-1, page_size or tokens, *cache.shape[2:])
    for head, own_lengths in enumerate(lengths.view(HEADS, batch)):
        own = slice(head, head + 1)
        keys, queries = cache[:, :, own], q[:, :, own].contiguous()
        want, want_lse = decode_attention(
            queries, keys, keys, own_lengths, kv_format="bf16", block_table=pages[head].contiguous(), return_lse=True
        )
        torch.testing.assert_close(out[:, :, own], want, atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, :, own], want_lse, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_decode_attention_reads_what_is_chosen(kv_format, page_size, q_len, num_kv_heads):
    call = decode_call(kv_format, page_size, q_len, num_kv_heads, device="cuda")
    for tokens in (64, 128):
        blocks = on("cuda", blocks_for(LENGTHS, [q_len] * len(LENGTHS), num_kv_heads, tokens, 768))
        given = {"kv_format": kv_format, **call.options, **blocks}
        want, want_lse = decode_attention_reference(*call.tensors, **given, compute_dtype=torch.float64)
        for num_splits in (None, 1, 3):
            out, lse = decode_attention(*call.tensors, **given, num_splits=num_splits, return_lse=True)
            assert (out.double() - want).norm() <= cases.TOLERANCE[out.dtype] * want.norm()
            torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=0)
            again = decode_attention(*call.tensors, **given, num_splits=num_splits)
            assert torch.equal(again, out)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_extend_attention_reads_what_is_chosen(kv_format, page_size):
    call = extend_cases.make_call(kv_format, Q_LENS, LENGTHS, page_size=page_size, max_seq_len=768, device="cuda")
    for tokens in (64, 128):
        blocks = on("cuda", blocks_for(LENGTHS, Q_LENS, 2, tokens, 768))
        want, _ = extend_attention_reference(*call.tensors, **call.keywords, **blocks, compute_dtype=torch.float64)
        for num_splits in (None, 1, 3):
            out = extend_attention(*call.tensors, **call.keywords, **blocks, num_splits=num_splits)
            assert (out.double() - want).norm() <= cases.TOLERANCE[out.dtype] * want.norm()


def test_a_graph_follows_lists_that_change():
    call = small_call("cuda")
    given = [on("cuda", blocks_for(LENGTHS, [1] * len(LENGTHS), 2, 64, 768, seed)) for seed in range(3)]
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given[0].items()}
    out = torch.empty_like(call.q)
    call.run(out=out, **static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(out=out, **static)
    for blocks in given:
        for name in ("block_list", "block_counts"):
            static[name].copy_(blocks[name])
        graph.replay()
        assert torch.equal(out, call.run(**blocks))


@pytest.mark.parametrize("kv_format", IN_HEADS, ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
def test_head_major_pages_are_read_alike(kv_format, q_len):
    call = decode_call(kv_format, 64, q_len, 8, cache_layout="HND", device="cuda")
    blocks = on("cuda", blocks_for(LENGTHS, [q_len] * len(LENGTHS), 8, 64, 768))
    given = {**call.options, **blocks, "kv_format": kv_format}
    want, _ = decode_attention_reference(*call.tensors, **given, compute_dtype=torch.float64)
    for num_splits in (None, 3):
        out = decode_attention(*call.tensors, **given, num_splits=num_splits)
        assert (out.double() - want).norm() <= cases.TOLERANCE[out.dtype] * want.norm()


@pytest.mark.parametrize("kv_format", IN_HEADS, ids=str)
def test_prompts_read_chosen_blocks_of_head_major_pages(kv_format):
    call = extend_cases.make_call(
        kv_format, Q_LENS, LENGTHS, page_size=64, max_seq_len=768, cache_layout="HND", device="cuda"
    )
    blocks = on("cuda", blocks_for(LENGTHS, Q_LENS, 2, 64, 768))
    want, _ = extend_attention_reference(*call.tensors, **call.keywords, **blocks, compute_dtype=torch.float64)
    out = extend_attention(*call.tensors, **call.keywords, **blocks)
    assert (out.double() - want).norm() <= cases.TOLERANCE[out.dtype] * want.norm()


def test_a_list_of_all_blocks_is_a_call_over_all_tokens():
    call = wide_call("cuda")
    every = torch.arange(12, dtype=torch.int32, device="cuda").expand(len(LENGTHS), 8, 12).contiguous()
    counts = ((call.seq_lens + 63) // 64)[:, None].expand(-1, 8).contiguous()
    out = call.run(block_list=every, block_counts=counts, block_tokens=64)
    torch.testing.assert_close(out, call.run(), atol=2e-2, rtol=2e-2)
