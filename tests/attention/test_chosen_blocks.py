"""Attention over chosen blocks: what it means, what is refused, and what kernels are launched with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import decode_attention, extend_attention
from cute_kernels.attention import ops
from cute_kernels.attention.arguments import LIST_STRIDES, decode_arguments, extend_arguments
from cute_kernels.attention.call import Given
from cute_kernels.attention.call import make_call as check_call
from cute_kernels.attention.operands import ChosenBlocks
from cute_kernels.attention.options import NO_OPTIONS
from cute_kernels.attention.plan import problem_of
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.formats.kv import format_of
from tests.attention import cases
from tests.attention.lists import tables
from tests.extend import cases as extend_cases
from tests.launchers import recording
from tests.observed import calls_of

LENGTHS, Q_LENS = (300, 64, 129, 700), (3, 1, 70, 0)
FORMATS = ("bf16", "int8_token_head", "e4m3_head", "int4_g4", "int8_channel")


def blocks_for(
    lengths: Any, q_lens: Any, num_kv_heads: int, tokens: int, max_seq_len: int, seed: int = 0
) -> dict[str, Any]:
    """A random list for each request and KV head, with the queries' own blocks; what lies behind it is no block."""
    generator = random.Random(seed)
    columns = -(-max_seq_len // tokens)
    chosen = torch.full((len(lengths), num_kv_heads, columns), -(2**31), dtype=torch.int32)
    counts = torch.zeros((len(lengths), num_kv_heads), dtype=torch.int32)
    for request, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        there = -(-length // tokens)
        own = range(max(length - q_len, 0) // tokens, there)
        for head in range(num_kv_heads):
            row = sorted({*own, *generator.sample(range(there), generator.randrange(there + 1))})
            chosen[request, head, : len(row)] = torch.tensor(row, dtype=torch.int32)
            counts[request, head] = len(row)
    return {"block_list": chosen, "block_counts": counts, "block_tokens": tokens}


def case(
    name: str, *, page_size: int | None, tokens: int = 64, q_len: int = 1, **options: Any
) -> tuple[cases.Call, dict[str, Any]]:
    """(a call of decode attention, its blocks)."""
    call = cases.make_call(
        name, LENGTHS, num_kv_heads=2, group=4, head_dim=128, q_len=q_len, page_size=page_size, max_seq_len=768,
        poison=False, **options,
    )  # fmt: skip
    return call, blocks_for(LENGTHS, [q_len] * len(LENGTHS), 2, tokens, 768)


def seen(blocks: dict[str, Any], max_seq_len: int) -> torch.Tensor:
    """bool [batch, num_kv_heads, max_seq_len], written out token by token."""
    chosen, counts, tokens = (blocks[name] for name in ("block_list", "block_counts", "block_tokens"))
    result = torch.zeros((*counts.shape, max_seq_len), dtype=torch.bool)
    for request in range(len(counts)):
        for head in range(counts.shape[1]):
            for block in chosen[request, head, : counts[request, head]].tolist():
                result[request, head, block * tokens : (block + 1) * tokens] = True
    return result


def biased(call: Any, blocks: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp64 reference of all tokens, under a bias that hides those of blocks that are not chosen."""
    hidden = ~seen(blocks, 768).repeat_interleave(4, dim=1)[:, None]
    bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    return decode_attention_reference(
        *call.tensors, kv_format=call.kv_format, compute_dtype=torch.float64, **call.options, attn_bias=bias
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("q_len", [1, 5])
def test_tokens_of_other_blocks_are_not_seen(name, page_size, q_len):
    call, blocks = case(name, page_size=page_size, q_len=q_len, sinks=True)
    want, want_lse = biased(call, blocks)
    out, lse = decode_attention(*call.tensors, kv_format=name, **call.options, **blocks, return_lse=True)
    assert (out.double() - want).norm() <= cases.TOLERANCE[torch.bfloat16] * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, atol=cases.LSE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("tokens", [64, 128])
def test_the_table_has_anything_for_pages_that_no_head_chose(tokens):
    call, blocks = case("int4_g4", page_size=32, tokens=tokens)
    want = decode_attention(*call.tensors, kv_format="int4_g4", **call.options, **blocks)
    table = call.options["block_table"]
    unseen = ~seen(blocks, 768).any(dim=1)[:, ::32]
    assert unseen.any() and not unseen.all()
    for entry in (-1, 2**31 - 1):
        options = call.options | {"block_table": table.masked_fill(unseen, entry)}
        assert torch.equal(decode_attention(*call.tensors, kv_format="int4_g4", **options, **blocks), want)
    lost = call.options | {"block_table": table.masked_fill(~unseen, -1)}
    with pytest.raises(ValueError, match="block_table: got page -1 for request 0 at position"):
        decode_attention(*call.tensors, kv_format="int4_g4", **lost, **blocks)


@pytest.mark.parametrize("tokens", [64, 128])
def test_extend_attention_is_decode_attention_of_every_query(tokens):
    call = extend_cases.make_call("int4_g4", Q_LENS, LENGTHS, max_seq_len=768)
    blocks = blocks_for(LENGTHS, Q_LENS, 2, tokens, 768)
    out, lse = extend_attention(*call.tensors, **call.keywords, **blocks, return_lse=True)
    ends = call.cu_seqlens_q.tolist()
    for request, length in enumerate(LENGTHS):
        for query in range(ends[request], ends[request + 1]):
            at = torch.tensor([length - (ends[request + 1] - 1 - query)], dtype=torch.int32)
            part = slice(request, request + 1)
            own: dict[str, Any] = {name: x[part] if isinstance(x, torch.Tensor) else x for name, x in blocks.items()}
            own["block_counts"] = (own["block_list"] * tokens < at).logical_and(own["block_list"] >= 0).sum(2).int()
            own["block_counts"] = torch.minimum(own["block_counts"], blocks["block_counts"][part])
            want, want_lse = decode_attention_reference(
                call.q[query][None, None], call.k_cache, call.v_cache, at, kv_format="int4_g4",
                compute_dtype=torch.float64, block_table=call.options["block_table"][part], **own,
            )  # fmt: skip
            assert (out[query].double() - want[0, 0]).norm() <= 4e-3 * want.norm()
            torch.testing.assert_close(lse[query].double(), want_lse[0, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("tokens", [64, 128])
def test_a_list_is_a_call_over_all_of_its_tokens(page_size, tokens):
    """What kernels find by a list is what it says: also of several causal queries."""
    call, blocks = case("bf16", page_size=page_size, tokens=tokens, q_len=3)
    chosen, table = ChosenBlocks(*blocks.values()), call.options.get("block_table")
    size = page_size or tokens
    pages, lengths = tables(chosen, call.seq_lens, table, 768 // size, size)
    k, v = (x if page_size else x.view(-1, size, *x.shape[2:]) for x in (call.k_cache, call.v_cache))
    want, want_lse = biased(call, blocks)
    lengths = lengths.view(2, 4)
    for head in range(2):
        own = slice(head, head + 1), slice(head * 4, head * 4 + 4)
        out, lse = decode_attention_reference(
            call.q[:, :, own[1]].contiguous(), k[:, :, own[0]], v[:, :, own[0]], lengths[head], kv_format="bf16",
            compute_dtype=torch.float64, block_table=pages[head],
        )  # fmt: skip
        torch.testing.assert_close(out, want[:, :, own[1]])
        torch.testing.assert_close(lse, want_lse[:, :, own[1]])


def test_heads_of_no_block_give_nothing():
    call, blocks = case("bf16", page_size=64)
    blocks["block_counts"][1] = 0
    out, lse = decode_attention(*call.tensors, kv_format="bf16", **call.options, **blocks, return_lse=True)
    assert not out[1].any() and (lse[1] == -torch.inf).all()


def test_operators_take_chosen_blocks():
    call, blocks = case("bf16", page_size=64)
    options = {**NO_OPTIONS, **call.options, **blocks}
    given = Given(*call.tensors, "bf16", return_lse=True, options=options)
    out, lse = ops.dispatch(given)
    want, want_lse = ops.reference(given)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


WRONG: dict[str, tuple[str, Any, type[Exception], str]] = {
    "tokens": ("block_tokens", 96, ValueError, "block_tokens: got 96, want 64 or 128"),
    "no counts": ("block_counts", None, ValueError, "block_counts: got None, want block_list, block_counts"),
    "dtype": ("block_list", torch.zeros(4, 2, 3).long(), TypeError, "block_list: got dtype torch.int64"),
    "shape": ("block_list", torch.zeros(4, 3, 3).int(), ValueError, r"block_list: .* want \[4, 2, max_blocks\]"),
    "counts' shape": ("block_counts", torch.zeros(4).int(), ValueError, r"block_counts: .* want \[4, 2\]"),
    "too many": ("block_counts", torch.full((4, 2), 99).int(), ValueError, "block_counts: got 99 for request 0"),
    "order": ("block_list", torch.zeros(4, 2, 12).int(), ValueError, "block_list: got .* for request 0, KV head 0"),
    "a window": ("window_size", 7, ValueError, "window_size: got a value beside a block_list"),
    "slopes": ("alibi_slopes", torch.zeros(8), ValueError, "alibi_slopes: got a value beside a block_list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name):
    call, blocks = case("bf16", page_size=64)
    argument, value, error, message = WRONG[name]
    blocks["block_counts"] = torch.full((4, 2), 2, dtype=torch.int32) if name == "order" else blocks["block_counts"]
    with pytest.raises(error, match=message):
        decode_attention(*call.tensors, kv_format="bf16", **(call.options | blocks | {argument: value}))


def test_pages_and_caches_that_blocks_do_not_fit_are_refused():
    call, blocks = case("bf16", page_size=128)
    with pytest.raises(ValueError, match="block_tokens: got 64 over pages of 128 tokens"):
        decode_attention(*call.tensors, kv_format="bf16", **call.options, **blocks)
    call, blocks = case("bf16", page_size=None, cache_layout="HND")
    with pytest.raises(ValueError, match="cache_layout: got 'HND'"):
        decode_attention(*call.tensors, kv_format="bf16", **call.options, **blocks)
    call, blocks = case("bf16", page_size=None)
    short = (call.q, call.k_cache[:, :700], call.v_cache[:, :700], call.seq_lens)
    with pytest.raises(ValueError, match="k_cache: got 700 tokens a request"):
        decode_attention(*short, kv_format="bf16", **blocks)


def test_the_queries_own_blocks_are_asked_for():
    call, blocks = case("bf16", page_size=64, q_len=5)
    blocks["block_list"], blocks["block_counts"] = torch.zeros(4, 2, 3).int(), torch.ones(4, 2).int()
    with pytest.raises(ValueError, match=r"block_list: got \[0\] for request 0, KV head 0, want it to end with \[4\]"):
        decode_attention(*call.tensors, kv_format="bf16", **call.options, **blocks)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_a_kernel_of_one_kv_head_a_cta_is_all_that_is_launched(name, page_size):
    call, blocks = case(name, page_size=page_size)
    with recording() as recorded:
        for _ in range(2):
            decode_attention(*call.tensors, kv_format=name, **call.options, **blocks)
        with calls_of(ops.make_plan) as again:
            decode_attention(*call.tensors, kv_format=name, **call.options, **blocks)
    ((spec, _),) = recorded.loaded
    config, launch = spec.config, recorded.launches[-1]
    assert not again and [launch.symbol for launch in recorded.launches] == [spec.symbol] * 3
    assert config.can_implement() is None and config.name.endswith("_by_head") and config.mainloop.num_heads == 1
    given = dict(zip(decode_arguments(config.features, True).names, launch.arguments, strict=True))
    size = page_size or 64
    assert given["seq_lens"] is call.seq_lens and given["max_pages"] == given["table_stride"] == 768 // size
    assert given["page_size"] == size and (given["block_table"] == 0) == (page_size is None)
    assert given["block_list"] == blocks["block_list"].data_ptr() and given["max_blocks"] == 12
    assert [given[stride] for stride in LIST_STRIDES] == [24, 12, 1, 2, 1]


def test_extend_attention_launches_tiles_with_the_same_lists():
    call = extend_cases.make_call("e4m3_tensor", Q_LENS, LENGTHS, max_seq_len=768)
    blocks = blocks_for(LENGTHS, Q_LENS, 2, 64, 768)
    with recording() as recorded:
        extend_attention(*call.tensors, **call.keywords, **blocks)
        config = recorded.loaded[0][0].config
        given = dict(zip(extend_arguments(config.features).names, recorded.launches[0].arguments, strict=True))
        assert config.features.by_head and config.key_rows is None and not config.unpacked
        assert given["seq_lens"] is call.seq_lens and given["max_pages"] == given["max_blocks"] == 12
        assert given["block_counts"] == blocks["block_counts"].data_ptr() and given["block_tokens"] == 64
        new = torch.zeros(len(call.q), 2, 128).bfloat16()
        for name, value in {"unpack": True, "fp8_products": True, "new_k": new}.items():
            both = {"new_v": new} if name == "new_k" else {}
            with pytest.raises(ValueError, match=f"{name}: got .* beside a block_list"):
                call.run(**blocks, **both, **{name: value})


@pytest.mark.parametrize("name", [name for name in cases.ALL_FORMATS if not format_of(name).in_blocks])
def test_every_format_has_a_kernel(name):
    if format_of(name).decode is None:
        pytest.skip("no kernel of attention reads it")
    call, blocks = case(name, page_size=64, q_dtype="fp16" if name == "fp16" else "bf16")
    checked = check_call(*call.tensors, kv_format=name, **call.options, **blocks).in_pages()
    from cute_kernels.attention.decode_schedule import make_schedule

    schedule = make_schedule(problem_of(checked))
    assert schedule.config.can_implement() is None and schedule.more_rows == 0


def test_work_tiles_have_their_heads_lengths():
    """`Worker.find` lane by lane: a tile's keys end where its own KV head's tokens do."""
    pytest.importorskip("cutlass")
    from cute_kernels.attention.extend_schedule import choose
    from cute_kernels.attention.problem import AttentionProblem
    from cute_kernels.attention.work_tiles import ExtendSizes, Lengths, Work, Worker
    from cute_kernels.device.division import Divisor
    from cute_kernels.device.lists import Lists
    from cute_kernels.formats.scores.features import Features
    from cute_kernels.formats.scores.terms import ScoreTerms
    from simulator import LANES, Int32, Int64, Warp, running

    features = Features(causal=True, paged=True, by_head=True)
    config = choose(AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 64, features))
    worker: Any = Worker(config, ScoreTerms(config.features, 2))
    batch, heads, q_len, length = 1, 5, 5, 250  # of one request no lanes vote for it
    chosen = [0, 1, 2, 3], [3], [0, 2, 3], [1, 2], []
    rows = [block for blocks in chosen for block in [*blocks, *[-1] * (4 - len(blocks))]]
    memory = np.array([0, q_len, length, *map(len, chosen), *rows], np.int32).view(np.uint8)
    with running(Warp(np.zeros(64, np.uint8), memory)):
        sizes = ExtendSizes(
            *map(Int32, (q_len, batch, heads, 256)),
            *(Divisor.of(Int32(n)) for n in (1, heads, 1)),
            *map(Int32, (1, heads, 0)),
        )
        places = Int64(12 + 4 * heads), Int64(12)
        strides = (Int64(4 * heads), Int64(4), Int64(1)), (Int64(heads), Int64(1))
        lists = Lists(*places, *strides, Int32(4), Int32(4), Int32(64), Divisor.of(Int32(1)))
        for tile in range(heads):
            lengths = Lengths(Int64(0), Int64(8), Int64(0), Int32(0), lists)
            work = Work(*worker.find(sizes, lengths, Int32(tile), Int32(LANES)))
            head, stop = (int(np.asarray(x).flat[0]) for x in (work.head, work.kv_stop))
            want = sum(min(length - 64 * block, 64) for block in chosen[tile])
            assert head == tile and stop == want
