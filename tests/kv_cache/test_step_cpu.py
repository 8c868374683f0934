"""append_and_decode on CPU tensors: what the two calls give, its errors, and the operator under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cute_kernels import append_and_decode
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import KVCache, Rope
from tests.kv_cache.cases import ALL_FORMATS, Shape
from tests.kv_cache.steps import Arguments, assert_same, make_step, run, run_separately, with_own_cache

SMALL = Shape(head_dim=64, num_q_heads=4, num_kv_heads=2)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("place", ["table", "contiguous"])
@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_a_step_is_an_append_and_then_attention(kv_format, place, q_len):
    dtype = "fp16" if kv_format == "fp16" else "bf16"
    step = make_step(SMALL.with_(kv_format=kv_format, dtype=dtype, place=place, rope=Rope(64)), (3, 17, 32), q_len)
    other = with_own_cache(step)
    out, lse = run(step)
    want, want_lse = run_separately(other)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4"])
def test_a_request_may_have_fewer_tokens_than_come(kv_format):
    """The first ones go nowhere, and their queries see nothing: as the two calls, of the tokens that have a place."""
    lengths = (2, 0, 9)
    step = make_step(SMALL.with_(kv_format=kv_format), lengths, 3)
    out, lse = run(step)
    for request, length in enumerate(lengths):
        without = max(3 - length, 0)
        assert not out[request, :without].any() and torch.all(lse[request, :without] == -torch.inf)
        assert lse[request, without:].isfinite().all() and out[request, without:].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    kv_format=st.tuples(st.sampled_from(ALL_FORMATS[2:]), st.sampled_from(ALL_FORMATS[2:])),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    q_len=st.sampled_from([1, 2, 5]),
    layout=st.sampled_from(["NHD", "HND"]),
    rope=st.sampled_from([None, Rope(32, interleaved=True)]),
    bias=st.booleans(),
    norm=st.booleans(),
    positions=st.sampled_from(["none", "int32", "int64"]),
    options=st.fixed_dictionaries(
        {}, optional={"window_size": st.integers(1, 20), "softcap": st.just(5.0), "softmax_scale": st.just(0.3)}
    ),
    seed=st.integers(0, 2**31),
)
def test_so_it_is_with_every_option(lengths, q_len, options, **shape):
    assume(not cannot_read(format_of(shape["kv_format"][1]), 96))
    lengths = tuple(0 if length < q_len else length for length in lengths)
    step = make_step(Shape(head_dim=64, v_head_dim=96, **shape), lengths, q_len, **options)
    other = with_own_cache(step)
    out, lse = run(step)
    want, want_lse = run_separately(other)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)


def test_the_only_token_attends_to_itself():
    step = make_step(SMALL.with_(rope=Rope(64)), (1, 1))
    out = append_and_decode(**step)
    assert torch.equal(out, step["v"].repeat_interleave(2, dim=2))


def test_new_tokens_see_those_before_them():
    """The first of three new ones sees itself alone."""
    step = make_step(SMALL, (3,), q_len=3)
    out = append_and_decode(**step)
    assert torch.equal(out[:, 0], step["v"][:, 0].repeat_interleave(2, dim=1))
    assert not torch.equal(out[:, 1], step["v"][:, 1].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("q_len", [1, 2])
def test_a_request_without_tokens_appends_nothing(q_len):
    step = make_step(SMALL, (0, 20), q_len)
    before = with_own_cache(step)
    out, lse = run(step)
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    alone = {name: step[name][1:] for name in ("q", "k", "v", "block_table", "seq_lens")}
    want, _ = run(before | alone)
    torch.testing.assert_close(out[1:], want)
    assert_same(step, before)


def test_the_result_goes_where_it_shall():
    step = make_step(SMALL, (4, 9))
    want = append_and_decode(**step)
    out = torch.empty_like(want)
    assert append_and_decode(**step, out=out) is out
    assert torch.equal(out, want)


def test_fused_projections_are_views():
    step = make_step(SMALL.with_(fused=True), (8, 9), q_len=2)
    assert not step["k"].is_contiguous()
    want, _ = run(step)
    got, _ = run(step | {name: step[name].contiguous() for name in ("q", "k", "v")})
    assert torch.equal(got, want)


# -- errors ------------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "flat q": (lambda s: {"q": s["q"][:, 0]}, "q: got 3 dimensions, want 4"),
    "flat k": (lambda s: {"k": s["k"][:, 0]}, r"k: got shape \[2, 2, 64\], want \[2, 1, heads, head_dim\]"),
    "fewer values": (lambda s: {"v": s["v"][:1]}, r"v: got shape \[1, 1, 2, 64\], want \[2, 1, heads, head_dim\]"),
    "no tensor": (lambda s: {"k": None}, "k: got NoneType, want a torch.Tensor"),
    "keys of floats": (lambda s: {"k": s["k"].float()}, "k: got dtype torch.float32"),
    "wide keys": (lambda s: {"k": s["k"].repeat(1, 1, 1, 2)}, "(k|q|k_cache): got .*(head_dim|elements)"),
    "more lengths": (lambda s: {"seq_lens": s["seq_lens"].repeat(2)}, r"seq_lens: got shape \[4\], want \[2\]"),
    "long lengths": (lambda s: {"seq_lens": s["seq_lens"].long()}, r"seq_lens: got dtype torch\.int64"),
    "flat positions": (
        lambda s: {"position_ids": torch.zeros(2, dtype=torch.int32)},
        r"position_ids: got shape \[2\], want \[2, 1\]",
    ),
    "a negative scale": (lambda s: {"softmax_scale": -1.0}, "softmax_scale: got -1.0"),
    "a long bias": (lambda s: {"qkv_bias": (torch.zeros(5).bfloat16(), None, None)}, r"q_bias: got shape \[5\]"),
    "out of floats": (lambda s: {"out": s["q"].float()}, "out: got dtype torch.float32"),
    "unknown rope": (lambda s: {"rope": "half"}, "rope: got str, want a Rope"),
    "no window": (lambda s: {"window_size": 0}, "window_size: got 0"),
    "a long request": (lambda s: {"seq_lens": s["seq_lens"] + 100}, "seq_lens: request 0"),
    "no page": (lambda s: {"block_table": s["block_table"] * 0 - 1}, "block_table: request 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_appended(name):
    step = make_step(SMALL, (8, 9))
    change, message = BAD[name]
    before = with_own_cache(step)
    changed: Arguments = step | change(step)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        append_and_decode(**changed)
    assert_same(step, before)


def test_tokens_are_evenly_spaced():
    step = make_step(SMALL, (8, 9), q_len=2)
    apart: Arguments = step | {"k": torch.cat([step["k"], step["k"]], dim=1)[:, :2]}
    with pytest.raises(ValueError, match="^k: got strides .*, want tokens evenly spaced"):
        append_and_decode(**apart)


# -- the operator ------------------------------------------------------------------------------------------------------

COMPILED: dict[str, Arguments] = {
    "plain": make_step(SMALL.with_(place="contiguous"), (8, 9)),
    "every option": make_step(
        SMALL.with_(kv_format=("e4m3_head", "int8_channel"), rope=Rope(64), bias=True, norm=True, positions="int32"),
        (8, 9),
        q_len=2,
        window_size=5,
        softcap=9.0,
        sinks=torch.ones(4),
        num_splits=2,
    ),
}
every_compiled = pytest.mark.parametrize("name", COMPILED)


@every_compiled
def test_the_operator_passes_opcheck(name):
    step = with_own_cache(COMPILED[name])
    tensors = [step.pop(key) for key in ("q", "k", "v", "k_cache", "v_cache", "seq_lens")]
    formats, rope = step.pop("kv_format"), step.pop("rope")
    formats = (formats, formats) if isinstance(formats, str) else formats
    extras = [step.pop("position_ids"), *step.pop("qkv_bias"), step.pop("q_norm"), step.pop("k_norm")]
    arguments = (*tensors, *formats, None if rope is None else rope.text, step.pop("norm_eps"), *extras)
    torch.library.opcheck(torch.ops.cute_kernels.append_and_decode.default, arguments, step)


@every_compiled
def test_it_compiles_without_graph_breaks(name):
    torch.compiler.reset()
    eager, compiled = (with_own_cache(COMPILED[name]) for _ in range(2))

    def work(step):
        out, lse = run(step | {"q": step["q"] * 2})
        return out + 1, lse, step["k_cache"].view(torch.uint8).float().sum()

    want = work(eager)
    got = torch.compile(work, fullgraph=True, backend="aot_eager")(compiled)
    torch.testing.assert_close(got, want)
    assert_same(eager, compiled)


def test_a_compiled_step_writes_out():
    torch.compiler.reset()
    step = with_own_cache(COMPILED["plain"])
    want, out = append_and_decode(**step), torch.zeros_like(step["q"])
    torch.compile(lambda: append_and_decode(**step, out=out), fullgraph=True, backend="aot_eager")()
    assert torch.equal(out, want)


# -- KVCache -----------------------------------------------------------------------------------------------------------


def make_cache() -> KVCache:
    cache = KVCache(1, 8, 16, 2, 64, kv_format="int4_g4")
    for length, name in enumerate("ab"):
        cache.allocate(name, 15 + length)
    return cache


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_cache_takes_steps(q_len):
    caches = [make_cache() for _ in range(2)]
    q, k, v = (torch.randn(3, q_len, heads, 64).bfloat16() for heads in (8, 2, 2))
    results = []
    for cache in caches:
        cache.extend_all("ab", q_len)
        batch = cache.make_batch(3).update("ab", q_len, pad_to=3)
        if cache is caches[0]:
            results.append(cache.append_and_attend(0, batch, q, k, v, rope=Rope(64), window_size=9))
        else:
            turned = cache.append(0, batch, k.flatten(0, 1), v.flatten(0, 1), q=q.flatten(0, 1), rope=Rope(64))
            assert turned is not None
            results.append(cache.attend(0, batch, turned.view(q.shape), window_size=9))
    assert torch.equal(*results) and not results[0][2].any()
    assert all(torch.equal(*pages) for pages in zip(*((c.k_pages, c.v_pages) for c in caches), strict=True))


def test_a_cache_refuses_other_numbers_of_new_tokens_and_shared_pages():
    cache = make_cache()
    batch = cache.make_batch(2)
    cache.extend_all("ab", [2, 1])
    q, k, v = (torch.randn(2, 2, heads, 64).bfloat16() for heads in (8, 2, 2))
    with pytest.raises(ValueError, match="^batch: got a sequence with 1 new tokens, want 2 of each"):
        cache.append_and_attend(0, batch.update("ab", [2, 1]), q, k, v)
    cache.fork("a", "c")
    with pytest.raises(ValueError, match="^batch: got new tokens of 'c' in pages that it shares"):
        cache.append_and_attend(0, batch.update("c", 2), q[:1], k[:1], v[:1])
