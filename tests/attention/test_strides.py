"""Caches and queries with gaps: what is between rows is never looked at, and rows are found where they lie."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.arguments import overlaps, strides_of
from cute_kernels.attention.call import make_call
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.plan import problem_of
from cute_kernels.runtime import native
from simulator import PlainThread
from tests.attention import cases
from tests.attention.cases import ALL_FORMATS, Call
from tests.tensors import among_others, apart, fused, padded

GAPS = {"blocks": 1, "tokens (heads in HND)": 2, "rows": 3}
every_gap = pytest.mark.parametrize("dim", GAPS.values(), ids=GAPS)
every_layout = pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
every_place = pytest.mark.parametrize("page_size", [None, 16], ids=["contiguous", "paged"])


def spread(call: Call, dim: int) -> Call:
    """``call`` with poison between blocks (dim 1), what the second dimension counts (2) or rows (3)."""
    caches = [among_others(cache, dim)[0] for cache in (call.k_cache, call.v_cache)]
    return Call(fused(call.q), caches[0], caches[1], call.seq_lens, call.kv_format, call.options)


# -- what is looked at -------------------------------------------------------------------------------------------------


@every_gap
@every_layout
@every_place
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", ("e4m3_token_head", "int8_channel")])
def test_the_reference_does_not_look_between_rows(kv_format, page_size, cache_layout, dim):
    call = cases.make_call(
        kv_format, [40, 7], num_kv_heads=2, head_dim=64, page_size=page_size, cache_layout=cache_layout
    )
    strided = spread(call, dim)
    assert not strided.k_cache.is_contiguous() and not strided.q.is_contiguous()
    assert torch.equal(strided.run(), call.run())


@pytest.mark.skipif(native.dsl_version() is None, reason="the copier is written in nvidia-cutlass-dsl")
@every_gap
@every_layout
@every_place
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "int8_token_head"])
def test_copies_find_every_row(run_on, kv_format, num_kv_heads, page_size, cache_layout, dim):
    """`AddressedRows.open` and `RowSource.address`, with Python's integers: the place of every token, by every CTA."""
    from cute_kernels.attention.loads import copies

    run_on(PlainThread())
    dense = cases.make_call(
        kv_format, [32, 7], num_kv_heads=num_kv_heads, page_size=page_size, cache_layout=cache_layout, blank=True
    )
    call = call_of(spread(dense, dim))
    for config in candidate_configs(problem_of(call)):
        for index, operand in enumerate((call.k, call.v)):
            source: Any = SimpleNamespace(
                iterator=SimpleNamespace(toint=operand.cache.data_ptr), stride=operand.cache.stride()
            )
            source_operand: Any = copies.TileCopier(config).operands[index]
            row_bytes, token_bytes = operand.row_bytes, source_operand.tile.token_words * 4
            if source_operand.copy == "map":
                assert_words_are_found(call, operand.cache, source_operand, config.mainloop.num_heads)
                continue
            for first_head in range(0, num_kv_heads, config.mainloop.num_heads):
                place: Any = SimpleNamespace(first_head=first_head)
                opened = source_operand.open(source, None, place)
                for block, token in itertools.product((0, call.num_blocks - 1), (0, 1, call.page_size - 1)):
                    address = opened.address(block, token)
                    for head in range(config.mainloop.num_heads):
                        assert address + head * row_bytes == row_of(
                            call, operand.cache, block, token, first_head + head
                        )
                    if source_operand.copy == "bulk" and token % source_operand.run_tokens == 0:
                        assert address % 16 == 0 and token_bytes * min(4, source_operand.run_tokens) % 16 == 0
                entered = source_operand.enter(opened, call.num_blocks - 1)
                assert entered.address(None, 3) == opened.address(call.num_blocks - 1, 3)


@pytest.mark.skipif(native.dsl_version() is None, reason="the copier is written in nvidia-cutlass-dsl")
@every_place
@pytest.mark.parametrize("dim", [1, 2])  # gaps between rows: bulk copies
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g2", "int4_g4", ("int4_g1", "int4_g4")])
def test_maps_find_every_row(kv_format, head_dim, page_size, dim):
    """Of some of a token's heads, which begin within a vector where two of them are no whole vectors."""
    from cute_kernels.attention.loads import copies

    dense = cases.make_call(
        kv_format, [32, 7], num_kv_heads=8, q_len=2, head_dim=head_dim, page_size=page_size, blank=True
    )
    call, heads = call_of(spread(dense, dim)), set()
    for config in candidate_configs(problem_of(call)):
        if "map" in config.copies:
            heads.add(config.mainloop.num_heads)
            for operand, own in zip((call.k, call.v), copies.TileCopier(config).operands, strict=True):
                assert_words_are_found(call, operand.cache, own, config.mainloop.num_heads)
    assert 2 in heads


@pytest.mark.skipif(native.dsl_version() is None, reason="the copier is written in nvidia-cutlass-dsl")
@pytest.mark.parametrize("num_kv_heads", [2, 3, 8])
@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "int8_token_head", ("int8_token_head", "int4_g4")])
def test_maps_find_every_row_of_a_head_with_pages_of_its_own(kv_format, num_kv_heads):
    from cute_kernels.attention.loads import copies

    dense = cases.make_call(kv_format, [32, 7], num_kv_heads=num_kv_heads, page_size=16, blank=True)
    call = call_of(dense)
    problem = problem_of(call)
    problem = dataclasses.replace(problem, features=dataclasses.replace(problem.features, by_head=True))
    for config in candidate_configs(problem):
        vectors = all(operand.row_bytes * num_kv_heads % 16 == 0 for operand in (call.k, call.v))
        assert config.mainloop.num_heads == 1 and config.can_implement() is None and ("map" in config.copies) == vectors
        for operand, own in zip((call.k, call.v), copies.TileCopier(config).operands, strict=True):
            if own.copy == "map":
                assert_words_are_found(call, operand.cache, own, 1)


def assert_words_are_found(call: Any, cache: torch.Tensor, operand: Any, num_heads: int) -> None:
    """A tensor map over words has each row where it lies; its strides and its first coordinates are whole vectors."""
    (tokens, words, blocks), (token_words, one, block_words) = operand.words_of(cache.shape, cache.stride())
    assert (tokens, blocks, one) == (call.page_size, call.num_blocks, 1) and words * 4 == call.num_kv_heads * (
        cache.shape[3]
    )
    assert token_words % 4 == block_words % 4 == 0 == cache.data_ptr() % 16
    assert operand.box_words <= 256 and operand.box_words % 4 == 0
    for first_head in range(0, call.num_kv_heads, num_heads):
        first, before = operand.begin(first_head)
        assert first % 4 == 0 <= before and 4 * operand.box_words >= before + 4 * operand.tile.token_words
        for block, token, head in itertools.product((0, blocks - 1), (0, tokens - 1), range(num_heads)):
            place = 4 * (block * block_words + token * token_words + first + head * operand.tile.row_words) + before
            assert cache.data_ptr() + place == row_of(call, cache, block, token, first_head + head)


def call_of(call: Call) -> Any:
    return make_call(*call.tensors, kv_format=call.kv_format, **call.options)


def row_of(call: Any, cache: torch.Tensor, block: int, token: int, head: int) -> int:
    return (cache[block, head, token] if call.head_major else cache[block, token, head]).data_ptr()


@every_layout
def test_a_copy_of_several_tokens_needs_them_side_by_side(cache_layout):
    dense = cases.make_call("int4_g4", [32, 7], num_kv_heads=8, page_size=16, cache_layout=cache_layout, blank=True)
    assert problem_of(call_of(spread(dense, 1))).tokens_touch
    for dim in (2, 3):
        problem = problem_of(call_of(spread(dense, dim)))
        heads_apart_in_hnd = cache_layout == "HND" and dim == 2  # of each head all tokens touch
        assert problem.tokens_touch == heads_apart_in_hnd and problem.aligned
        assert problem.heads_touch == (cache_layout == "HND" or dim == 2)
        for config in candidate_configs(problem):
            assert config.runs.contiguous == heads_apart_in_hnd
            assert config.mainloop.num_heads == 1 or (cache_layout == "NHD" and dim == 2)


def test_blocks_that_do_not_begin_on_vectors_are_copied_by_words():
    dense = cases.make_call("int4_g4", [32, 7], num_kv_heads=8, page_size=16, blank=True)
    call = call_of(Call(dense.q, dense.k_cache, padded(dense.v_cache, 4), dense.seq_lens, "int4_g4", dense.options))
    assert not problem_of(call).aligned
    assert {config.copies for config in candidate_configs(problem_of(call))} == {("word", "word")}


def test_a_bulk_copy_that_the_end_of_a_block_cuts_off_takes_whole_vectors():
    """17 tokens of one head are 17 * 68 bytes, wherever the next request begins."""
    cache = torch.zeros(2, 20, 1, 68, dtype=torch.uint8)[:, :17]
    assert cache.stride(0) % 16 == 0
    call = make_call(torch.zeros(2, 1, 8, 128).bfloat16(), cache, cache, torch.zeros(2).int(), kv_format="int4_g1")
    assert not problem_of(call).aligned


@pytest.mark.parametrize("kv_format", [name for name in ALL_FORMATS if name.startswith(("bf16", "fp16", "e5m2"))])
def test_bare_rows_have_one_kernel_whatever_their_strides(kv_format):
    """A tensor map knows strides, the kernel does not."""
    dense = cases.make_call(kv_format, [32, 7], num_kv_heads=8, page_size=16, blank=True)
    wanted = candidate_configs(problem_of(call_of(dense)))
    assert all(candidate_configs(problem_of(call_of(spread(dense, dim)))) == wanted for dim in GAPS.values())


# -- strides -----------------------------------------------------------------------------------------------------------


def test_overlaps_are_found_and_gaps_are_none():
    x = torch.zeros(4, 6, 8)
    for apart_ in (x, x[:, ::2], x[..., ::2], x.transpose(0, 2), apart(x), x[:1].as_strided((1, 6, 8), (0, 8, 1))):
        assert not overlaps(apart_)
    for shared in (x[:1].expand(4, 6, 8), x.as_strided((4, 6, 8), (47, 8, 1)), x.as_strided((2, 2), (1, 1))):
        assert overlaps(shared)


def test_strides_of_single_elements_follow_from_the_shape():
    assert strides_of(torch.zeros(1, 6, 8).as_strided((1, 6, 8), (3, 8, 1))) == (48, 8, 1)
    assert strides_of(torch.zeros(2, 1, 8).as_strided((2, 1, 8), (8, 5, 1))) == (8, 8, 1)
    assert strides_of(torch.zeros(8).as_strided((2, 1, 1), (4, 7, 7))) == (4, 1, 1)
