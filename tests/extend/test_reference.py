"""The reference of extend attention is attention, written differently; and decode attention for few queries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cute_kernels import decode_attention
from cute_kernels.formats.kv import format_of, format_pair
from tests.extend.cases import FORMATS, Call, assert_close, make_call

Q_LENS, LENGTHS = [13, 0, 1, 6, 25, 3], [70, 5, 12, 6, 30, 0]


def naive(call: Call) -> torch.Tensor:
    """fp64 attention with a whole score matrix a request, of one head after the other."""
    out = torch.zeros(call.q.shape, dtype=torch.float64)
    keys, values = call.caches
    forms, (heads, dim) = list(map(format_of, format_pair(call.kv_format))), call.q.shape[1:]
    group, ends = heads // keys.shape[2], call.cu_seqlens_q.tolist()
    table, window, cap = (call.options.get(name) for name in ("block_table", "window_size", "softcap"))
    scales = [call.options.get(name) for name in ("k_scale", "v_scale")]
    for request, (start, stop) in enumerate(itertools.pairwise(ends)):
        length = int(call.seq_lens[request])
        first = 0 if window is None else max(0, length - (stop - start) - window + 1)
        at = torch.arange(first, length)
        if not len(at):
            continue
        pages = table[request, at // keys.shape[1]].long() if table is not None else torch.full_like(at, request)
        places = at % keys.shape[1]
        k, v = (
            form.dequantize(cache[pages, places], dim, torch.float64, scale)
            for form, cache, scale in zip(forms, (keys, values), scales, strict=True)
        )
        for query, head in itertools.product(range(start, stop), range(heads)):
            position = length - stop + query
            scores = k[:, head // group] @ call.q[query, head].double() * dim**-0.5
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if "alibi_slopes" in call.options:
                scores = scores + call.options["alibi_slopes"][head].double() * (at - position)
            seen = at >= 0
            if call.options.get("causal", True) or window is not None:
                seen = seen & (at <= position)
            if window is not None:
                seen = seen & (at > position - window)
            if "tree_mask" in call.options:
                seen = at < length - (stop - start)
                words = call.options["tree_mask"][query].tolist()
                for token in range(min(stop - start, 32 * len(words))):
                    if words[token // 32] >> token % 32 & 1:
                        seen = seen | (at == length - (stop - start) + token)
            if not seen.any():
                continue
            weights = torch.exp(scores.masked_fill(~seen, -torch.inf))
            total = weights.sum()
            if "sinks" in call.options:
                total = total + torch.exp(call.options["sinks"][head].double())
            out[query, head] = weights / total @ torch.where(seen.unsqueeze(-1), v[:, head // group], 0.0)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": 7},
        {"softcap": 3.0, "sinks": True, "alibi": True},
        {"page_size": None, "max_seq_len": 80},
        {"cache_layout": "HND", "group": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_format", ["bf16", "int8_tensor", "int4_g4", "int8_channel", ("bf16", "int4_g4")], ids=str)
def test_it_is_attention(kv_format, options):
    call = make_call(kv_format, Q_LENS, LENGTHS, head_dim=64, **{"page_size": 16, **options})
    torch.testing.assert_close(call.reference()[0], naive(call), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_call_on_a_cpu_is_the_reference_rounded(kv_format):
    call = make_call(kv_format, Q_LENS, LENGTHS, page_size=16, window_size=20)
    out = torch.full_like(call.q, torch.nan)
    result, lse = call.run(out=out, return_lse=True)
    assert result is out
    assert_close(call, out, lse)


def test_few_queries_are_what_decode_attention_says():
    call = make_call("int8_token_head", [4, 4, 4], [70, 4, 2], page_size=16, sinks=True)
    want, want_lse = decode_attention(
        call.q.view(3, 4, *call.q.shape[1:]),
        *call.tensors[1:],
        kv_format=call.kv_format,
        return_lse=True,
        **call.options,
    )
    out, lse = call.run(return_lse=True)
    assert torch.equal(out, want.view_as(out))
    # Of products in fp32, whose last bits depend on a CPU's BLAS and on how many there are.
    torch.testing.assert_close(lse, want_lse.view_as(lse), rtol=0, atol=2e-6)


def test_queries_of_no_request_are_zeros():
    call = make_call("bf16", [3, 2], [9, 9])
    call.cu_seqlens_q[-1] = 4
    out, lse = call.run(return_lse=True)
    assert out[:4].any(dim=(1, 2)).all() and not out[4:].any()
    assert (lse[4:] == -torch.inf).all()


def test_zero_scores_show_the_mask():
    """With q = 0 every key that is seen weighs the same: a wrong mask cannot hide."""
    call = make_call("bf16", [5, 40], [40, 40], window_size=9)
    call.q.zero_()
    out = call.run().double()
    ends, (_, v) = call.cu_seqlens_q.tolist(), call.caches
    table = call.options["block_table"]
    for request, (start, stop) in enumerate(itertools.pairwise(ends)):
        for query in range(start, stop):
            position = 40 - stop + query
            rows = v[table[request, 0]][max(0, position - 8) : position + 1].double().mean(0)
            want = rows.repeat_interleave(call.q.shape[1] // rows.shape[0], 0)
            torch.testing.assert_close(out[query], want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"window_size": 7}, {"softcap": 3.0, "sinks": True, "alibi": True}], ids=str)
def test_new_tokens_beside_the_cache_count_as_if_they_were_in_it(options):
    """An exact cache, so that only the place of the newest tokens differs."""
    call = make_call("bf16", [13, 0, 12, 6], [70, 5, 12, 9], head_dim=64, page_size=16, new=True, **options)
    (k, v), table = call.caches, call.options["block_table"].clone()
    ends, page_size = call.cu_seqlens_q.tolist(), k.shape[1]
    caches = [torch.cat((cache, cache.new_zeros(20, *cache.shape[1:]))) for cache in (k, v)]
    free = iter(range(len(k), len(k) + 20))
    for request, (start, stop) in enumerate(itertools.pairwise(ends)):
        length = int(call.seq_lens[request])
        for i, position in enumerate(range(length - (stop - start), length)):
            if not 0 <= table[request, position // page_size] < len(k) + 20:
                table[request, position // page_size] = next(free)
            page = int(table[request, position // page_size])
            for cache, name in zip(caches, ("new_k", "new_v"), strict=True):
                cache[page, position % page_size] = call.options[name][start + i]
    others = {name: value for name, value in call.options.items() if not name.startswith("new")}
    k, v = caches
    within = Call(call.q, k, v, call.seq_lens, call.cu_seqlens_q, "bf16", others | {"block_table": table})
    for mine, wanted in zip(call.reference(), within.reference(), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-9, rtol=1e-9)


def test_new_tokens_need_no_room_in_the_cache():
    call = make_call("int8_token_head", [5, 3], [5, 3], head_dim=64, page_size=16, new=True)
    empty = {"block_table": call.options["block_table"][:, :0]}
    alone = Call(*call.tensors, call.cu_seqlens_q, call.kv_format, call.options | empty)
    assert torch.equal(alone.run(), call.run())


@pytest.mark.parametrize("new", [False, True])
def test_zero_scores_show_a_tree_s_mask(new):
    """With q = 0 every key that is seen weighs the same; a full mask shows all new tokens to all of them."""
    for full in (False, True):
        call = make_call("bf16", [5, 0, 40], [5, 3, 60], tree=True, new=new)
        call.q.zero_()
        if full:
            call.options["tree_mask"].fill_(-1)
        out, _ = call.reference()
        (_, v), ends, table = call.caches, call.cu_seqlens_q.tolist(), call.options["block_table"]
        for request, (start, stop) in enumerate(itertools.pairwise(ends)):
            before = int(call.seq_lens[request]) - (stop - start)
            older = v[table[request, 0]][:before] if before else v[:0, 0]
            newer = v[table[request, 0]][before : before + stop - start]
            if new:
                newer = call.options["new_v"][start:stop]
            for query in range(start, stop):
                words = call.options["tree_mask"][query].tolist()
                seen = [token for token in range(stop - start) if words[token // 32] >> token % 32 & 1]
                assert len(seen) == stop - start or not full
                rows = torch.cat((older, newer[seen])).double().mean(0)
                want = rows.repeat_interleave(call.q.shape[1] // rows.shape[0], 0)
                torch.testing.assert_close(out[query], want, atol=1e-9, rtol=1e-9)


def test_new_tokens_without_a_word_are_seen_by_none():
    call = make_call("bf16", [40], [60], tree=True)
    mask = call.options["tree_mask"]
    assert mask.shape == (40, 2)
    short = call.run(tree_mask=mask[:, :1].contiguous())
    mask[:, 1] = 0
    assert torch.equal(short, call.run())


def test_pages_that_no_query_sees_may_be_any_with_a_window_and_new_tokens():
    """A window of one key is the query's own, which is not in the cache."""
    call = make_call("bf16", [4], [130], new=True, window_size=1)
    assert not (call.options["block_table"] >= 0).all(), "all are poison"
    assert call.run().isfinite().all()


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize(("pair", "window"), [((6, 0), 7), ([6, 0], 7), ((-1, 0), None), ((-1, -1), None)])
def test_the_reference_takes_both_forms_of_a_window(pair, window, new):
    call = make_call("bf16", [4, 20], [30, 20], new=new)
    want = replace(call, options=call.options | {"window_size": window}).reference()
    for got, wanted in zip(replace(call, options=call.options | {"window_size": pair}).reference(), want, strict=True):
        assert torch.equal(got, wanted)
