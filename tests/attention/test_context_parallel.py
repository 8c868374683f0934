"""Every call gives the log-sum-exp of its scores: parts of a context, each attended to alone, merge into the whole."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels import (
    append_and_decode,
    append_kv,
    decode_attention,
    extend_attention,
    merge_over_ranks,
    merge_states,
    mixed_attention,
    mla_decode,
    quantize_kv,
    quantize_mla_kv,
    sparse_mla_decode,
)
from cute_kernels.kv_cache.append_and_extend import append_and_extend

HQ, HKV, DIM, PAGE = 8, 2, 64, 16
FORMATS = ("bf16", ("int8_token_head", "int4_g2"))
CUTS = (0, 37, 64, 90)  # tokens before each rank's part, and all


def merged(states):
    out, lse = states[0]
    for part in states[1:]:
        out, lse = merge_states(out, lse, *part)
    return out, lse


def check(states, whole):
    """The parts as the whole, up to bf16's rounding of their outputs; lse is fp32 and a natural logarithm."""
    out, lse = merged(states)
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:-1]
    torch.testing.assert_close(out.float(), whole[0].float(), rtol=0, atol=2**-6)
    torch.testing.assert_close(lse, whole[1], rtol=0, atol=2e-5)


def make(kv_format: Any, batch=3, tokens=CUTS[-1]) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """q [batch, HQ, DIM], K and V [batch, tokens, HKV, DIM], and caches of them."""
    names = kv_format if isinstance(kv_format, tuple) else (kv_format,) * 2
    q = torch.randn(batch, HQ, DIM).bfloat16()
    k, v = (torch.randn(batch, tokens, HKV, DIM).bfloat16() for _ in range(2))
    caches = [x if name == "bf16" else quantize_kv(x, kv_format=name) for x, name in zip((k, v), names, strict=True)]
    return q, k, v, (caches[0], caches[1])


def lengths_of(*lengths) -> Any:
    return torch.tensor(lengths, dtype=torch.int32)


def parts_of(caches) -> list[tuple[Any, Any]]:
    """Each rank's tokens, contiguous."""
    k, v = caches
    return [(k[:, a:b].contiguous(), v[:, a:b].contiguous()) for a, b in itertools.pairwise(CUTS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_parts_of_many_ranks_are_rounded_once(dtype: torch.dtype):
    states = [(torch.randn(5, HQ, DIM).to(dtype), torch.randn(5, HQ)) for _ in range(16)]

    def gather(into: list[torch.Tensor], own: torch.Tensor, group: None) -> None:
        for tensor, state in zip(into, states, strict=True):
            tensor.copy_(state[own.dim() == 2])

    ranks = mock.patch.multiple(torch.distributed, get_world_size=lambda group: len(states), all_gather=gather)
    with ranks:
        out, lse = merge_over_ranks(*states[0])
    outs, sums = (torch.stack(part).double() for part in zip(*states, strict=True))
    exact = (outs * sums.softmax(0)[..., None]).sum(0)
    half_a_step = torch.finfo(dtype).eps / 2 * exact.abs()
    assert out.dtype == dtype and ((out.double() - exact).abs() <= half_a_step + 1e-6).all()
    torch.testing.assert_close(lse.double(), sums.logsumexp(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_decode(kv_format: Any):
    q, _, _, caches = make(kv_format)
    options: dict[str, Any] = {"kv_format": kv_format, "return_lse": True, "softcap": 20.0}
    whole = decode_attention(q[:, None], *caches, lengths_of(90, 90, 50), **options)
    states = [  # the last request has nothing in the last part
        decode_attention(q[:, None], *part, lengths_of(*(max(0, min(n, b) - a) for n in (90, 90, 50))), **options)
        for part, a, b in zip(parts_of(caches), CUTS[:-1], CUTS[1:], strict=True)
    ]
    assert states[-1][1][2].eq(-torch.inf).all()
    check(states, whole)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_new_tokens_see_older_ones_of_other_ranks_and_each_other_where_they_are(kv_format: Any):
    """Queries 64 to 89 of each request; the first two parts are older than all of them."""
    _, _, _, caches = make(kv_format)
    new = CUTS[3] - CUTS[2]
    q, starts = torch.randn(3 * new, HQ, DIM).bfloat16(), torch.arange(4, dtype=torch.int32) * new
    options: dict[str, Any] = {"cu_seqlens_q": starts, "kv_format": kv_format, "return_lse": True}
    whole = extend_attention(q, *caches, lengths_of(90, 90, 90), **options)
    states = [
        extend_attention(q, *part, lengths_of(*[b - a] * 3), causal=i == 2, **options)
        for i, (part, a, b) in enumerate(zip(parts_of(caches), CUTS[:-1], CUTS[1:], strict=True))
    ]
    check(states, whole)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_mixed_batches_give_what_extend_gives(kv_format: Any):
    _, _, _, caches = make(kv_format)
    starts = lengths_of(0, 1, 2, 9)
    q = torch.randn(9, HQ, DIM).bfloat16()
    options: dict[str, Any] = {"cu_seqlens_q": starts, "kv_format": kv_format, "return_lse": True}
    want = extend_attention(q, *caches, lengths_of(90, 20, 70), **options)
    for decodes in range(3):
        found = mixed_attention(q, *caches, lengths_of(90, 20, 70), num_decodes=decodes, **options)
        check([found], want)
    wrong: dict[str, Any] = options | {"return_lse": 1}
    with pytest.raises(TypeError, match="return_lse: got 1"):
        mixed_attention(q, *caches, lengths_of(90, 20, 70), num_decodes=1, **wrong)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_the_rank_that_has_the_new_token_appends_it(kv_format: Any):
    q, k, v, caches = make(kv_format)
    whole = decode_attention(q[:, None], *caches, lengths_of(90, 90, 90), kv_format=kv_format, return_lse=True)
    *older, last = parts_of(caches)
    for cache in last:
        cache[:, -1] = 0  # not there yet
    options: dict[str, Any] = {"kv_format": kv_format, "return_lse": True}
    states = [decode_attention(q[:, None], *part, lengths_of(*[len(part[0][0])] * 3), **options) for part in older]
    new = (q[:, None], k[:, -1:], v[:, -1:])
    states.append(append_and_decode(*new, *last, lengths_of(26, 26, 26), **options))
    check(states, whole)


def test_a_prefill_that_is_appended_beside_attention():
    _, k, v, _ = make("bf16", batch=1)
    table = torch.arange(6, dtype=torch.int32)[None]
    q, starts = torch.randn(90, HQ, DIM).bfloat16(), lengths_of(0, 90)

    def pages() -> tuple[Any, Any]:
        return torch.zeros(6, PAGE, HKV, DIM).bfloat16(), torch.zeros(6, PAGE, HKV, DIM).bfloat16()

    filled = pages()
    append_kv(k[0], v[0], *filled, kv_format="bf16", seq_lens=lengths_of(90), cu_seqlens=starts, block_table=table)
    options: dict[str, Any] = {"cu_seqlens_q": starts, "kv_format": "bf16", "block_table": table, "return_lse": True}
    want = extend_attention(q, *filled, lengths_of(90), **options)
    check([append_and_extend(q, k[0], v[0], *pages(), lengths_of(90), **options)], want)


@pytest.mark.parametrize("kv_format", ["mla_bf16", "mla_fp8"])
def test_latents(kv_format: Any):
    """Pages of 16: the first request has its tokens in pages 0 to 3, a rank has two of them."""
    numbers = torch.randn(64, 576).bfloat16()
    cache = numbers if kv_format == "mla_bf16" else quantize_mla_kv(numbers, kv_format=kv_format)
    cache, q = cache.view(4, PAGE, -1), torch.randn(1, 1, 16, 576).bfloat16()
    pages = torch.arange(4, dtype=torch.int32)
    options: dict[str, Any] = {"kv_format": kv_format, "return_lse": True}

    def of_pages(some, tokens):
        return mla_decode(q, cache, lengths_of(tokens), block_table=some[None].contiguous(), **options)

    def chosen(indices):
        return sparse_mla_decode(q, cache, indices.view(1, 1, -1).contiguous(), **options)

    check([of_pages(pages[:2], 32), of_pages(pages[2:], 18), of_pages(pages[:1], 0)], of_pages(pages, 50))
    tokens = torch.randperm(64)[:40].int()
    none = torch.full((8,), -1, dtype=torch.int32)
    check([chosen(tokens[:24]), chosen(tokens[24:]), chosen(none)], chosen(tokens))
