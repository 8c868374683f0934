"""Decode attention on a GPU is attention: every kernel against fp64 on the dequantised cache, and where it could break.

What a call does besides computing (graphs, streams, devices, errors, costs) is in `test_decode_calls`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.configured import bind_config
from cute_kernels.attention import decode_attention_splits
from cute_kernels.attention.reference import combine
from cute_kernels.compat.fbgemm import gqa_attn_splitk
from tests.attention.cases import FORMATS, Call, assert_close, make_call, poison_unseen, store
from tests.gpu.layout_table import LAYOUTS, HeadLayout, specs  # noqa: F401 (for tests.gpu.prepare)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

CUDA = "cuda"
EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)  # of blocks and tiles
FP32_STEPS = 2.0**-20  # how far an LSE of large scores may be off, relative to it: 8 steps of fp32

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

every_format = pytest.mark.parametrize("kv_format", FORMATS)


def check(call: Call, *, lse_slack: float = 0.0, **options) -> torch.Tensor:
    """Runs the public call into an output full of NaN and compares with fp64; returns the output."""
    out = torch.full_like(call.q, torch.nan)
    result, lse = call.run(out=out, return_lse=True, **options)
    assert result is out
    assert_close(call, out, lse, softmax_scale=options.get("softmax_scale"), lse_slack=lse_slack)
    return out


def call_for(layout: HeadLayout, group: int, lengths: list[int], max_seq_len: int, seed: int = 0) -> Call:
    return make_call(
        layout.kv_format,
        lengths,
        num_kv_heads=layout.num_kv_heads,
        group=group,
        head_dim=layout.head_dim,
        max_seq_len=layout.tokens(max_seq_len),
        q_dtype=layout.q_dtype,
        device=CUDA,
        seed=seed,
    )


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_kernel_with_every_kind_of_split(layout: HeadLayout):
    """All candidates of the schedule, also those that it would not choose here; merges of warps and splits."""
    call = call_for(layout, layout.groups[-1], [0, 1, 33, 256, 513, 1200], 1200)
    for config in layout.configs():
        for num_splits in (None, 1, 2, 5, 8, 19, 32):
            out = torch.full_like(call.q, torch.nan)
            run = bind_config(config, *call.tensors, out=out, num_splits=num_splits)
            assert_close(call, run())


@st.composite
def calls(draw) -> tuple[Call, int | None]:
    layout = draw(st.sampled_from(LAYOUTS))
    tokens = draw(st.one_of(st.integers(1, 600), st.integers(1, 2000)))
    length = st.one_of(st.integers(0, tokens), st.sampled_from([edge for edge in EDGES if edge <= tokens]))
    lengths = draw(st.lists(length, min_size=1, max_size=8))
    if layout.q_dtype == "fp16":
        lengths.append(tokens)  # see `assert_close`: one request of few tokens alone says little
    num_splits = draw(st.sampled_from([None, None, 1, 3, 17]))
    group = draw(st.sampled_from(layout.groups))
    return call_for(layout, group, lengths, tokens, seed=draw(st.integers(0, 2**31))), num_splits


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(calls())
def test_random_shapes(drawn: tuple[Call, int | None]):
    call, num_splits = drawn
    check(call, num_splits=num_splits)


@every_format
@pytest.mark.parametrize("group", [8, 1])
def test_lengths_at_every_edge_of_a_tile(kv_format, group):
    check(make_call(kv_format, [*EDGES, 1000, 1024], group=group, max_seq_len=1024, device=CUDA))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4"])
@pytest.mark.parametrize("batch", [100, 300, 1000])
def test_many_short_requests(kv_format, batch):
    """More rows than SMs: one split each, several CTAs to an SM, more than one wave."""
    check(make_call(kv_format, [(37 * i) % 301 for i in range(batch)], max_seq_len=304, device=CUDA))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4"])
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_a_request_of_131072_tokens(kv_format, num_splits):
    check(make_call(kv_format, [131072], device=CUDA), num_splits=num_splits)
    check(make_call(kv_format, [131070, 1], max_seq_len=131072, device=CUDA), num_splits=num_splits)


@every_format
def test_more_splits_than_tiles(kv_format):
    check(make_call(kv_format, [0, 1, 40, 300], max_seq_len=512, device=CUDA), num_splits=100)


@every_format
def test_a_scale_that_is_given(kv_format):
    call = make_call(kv_format, [500, 20, 0], device=CUDA)
    for scale in (0.3, 1, 1e-3):
        check(call, softmax_scale=scale)


@every_format
def test_nothing_to_attend_to(kv_format):
    for call in (
        make_call(kv_format, [0, 0, 0], max_seq_len=64, device=CUDA),
        make_call(kv_format, [0, 0], max_seq_len=0, device=CUDA),
        make_call(kv_format, [], max_seq_len=64, device=CUDA),
    ):
        out, lse = call.run(return_lse=True, out=torch.full_like(call.q, torch.nan))
        assert not out.any() and torch.all(lse == -torch.inf)
        splits = decode_attention_splits(*call.tensors, kv_format=kv_format, num_splits=3)
        assert not splits[0].any() and not splits[1].any() and not splits[3].any()
        assert torch.all(splits[2] == -torch.inf)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_int4_caches_may_start_on_any_word_and_hold_any_number_of_tokens():
    """Neither 517 rows of 68 bytes nor a start 4 bytes past a multiple of 16 suit bulk copies."""
    check(make_call("int4_g1", [517, 516, 1], max_seq_len=517, device=CUDA))
    call = make_call("int4_g1", [512, 300, 0], max_seq_len=512, device=CUDA)
    for cache in ("k_cache", "v_cache"):
        rows = getattr(call, cache)
        shifted = torch.empty(rows.numel() + 4, dtype=torch.uint8, device=CUDA)[4:].view_as(rows).copy_(rows)
        check(dataclasses.replace(call, **{cache: shifted}))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4"])
def test_a_batch_of_one_may_be_a_slice_of_longer_tensors(kv_format):
    """Contiguous to PyTorch, since a dimension of 1 has no stride to speak of; the strides say otherwise."""
    call = make_call(kv_format, [400], max_seq_len=512, device=CUDA)
    queries = call.q.repeat(1, 3, 1, 1)
    part = dataclasses.replace(call, q=queries[:, 1:2], k_cache=call.k_cache[:, :404], v_cache=call.v_cache[:, :404])
    assert part.q.is_contiguous() and part.q.stride(0) != call.q.stride(0)
    assert part.k_cache.is_contiguous() and part.k_cache.stride(0) == call.k_cache.stride(0)
    check(part)


@pytest.mark.parametrize(("kv_format", "batch", "tokens"), [("int4_g1", 80, 65536), ("bf16", 40, 65536)])
def test_requests_that_begin_beyond_two_to_the_31(kv_format, batch, tokens):
    """Only the first and the last rows of the caches are filled, and the rest is never looked at."""
    lengths = [0] * (batch - 2) + [300, 64]
    small = make_call(kv_format, lengths, num_kv_heads=8, group=2, max_seq_len=320, device=CUDA)
    caches = []
    for rows in (small.k_cache, small.v_cache):
        cache = torch.empty(batch, tokens, *rows.shape[2:], dtype=rows.dtype, device=CUDA)
        assert cache.numel() > 2**31
        cache[:, :320] = rows
        caches.append(cache)
    out, lse = dataclasses.replace(small, k_cache=caches[0], v_cache=caches[1]).run(return_lse=True)
    assert_close(small, out, lse)


@pytest.mark.parametrize(("kv_format", "tokens"), [("int4_g1", 4_200_000), ("bf16", 2_200_000)])
def test_tokens_that_lie_beyond_two_to_the_31_within_a_request(kv_format, tokens):
    """All rows are zero but the last 64, whose scores make up for their small number."""
    heads, tail = 8, 64
    last = make_call(kv_format, [tail], num_kv_heads=heads, group=1, device=CUDA)
    direction = last.q.float() / last.q.float().square().sum(-1, keepdim=True)  # q . direction = 1
    noise = torch.randn(1, tail, heads, 128, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    last = dataclasses.replace(last, k_cache=store(12 * 128**0.5 * direction + 0.3 * noise, kv_format))
    caches = []
    for rows in (last.k_cache, last.v_cache):
        cache = torch.zeros(1, tokens, *rows.shape[2:], dtype=rows.dtype, device=CUDA)
        assert cache.numel() > 2**31
        cache[:, -tail:] = rows
        caches.append(cache)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=CUDA)
    out, lse = Call(last.q, caches[0], caches[1], lengths, kv_format).run(return_lse=True)

    part, part_lse = last.reference()
    zero_rows = torch.tensor(tokens - tail, dtype=torch.float64, device=CUDA).log()  # each weighs exp(0)
    want_lse = torch.logaddexp(part_lse, zero_rows)
    want = part * (part_lse - want_lse).exp().unsqueeze(-1)
    assert 0.1 < float((part_lse - want_lse).exp().min()) < 0.9, "both parts should matter"
    assert float((out.double() - want).norm() / want.norm()) <= 4e-3
    assert float((lse.double() - want_lse).abs().max()) <= 1e-4


# -- values ------------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def powers_of_ten(low: float, high: float, *shape: int, seed: int = 8) -> torch.Tensor:
    uniform = torch.rand(shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))
    return 10 ** (low + (high - low) * uniform)


def call_with(kv_format: str, k: torch.Tensor, v: torch.Tensor, q_factor: float = 1.0, group: int = 8) -> Call:
    """Requests of ragged lengths over cache values [4, tokens, 1, head_dim]."""
    tokens, head_dim = k.shape[1], k.shape[3]
    lengths = [tokens, tokens - 1, tokens // 2 + 3, 65]
    call = make_call(kv_format, lengths, group=group, head_dim=head_dim, max_seq_len=tokens, device=CUDA)
    q = (call.q.float() * q_factor).to(call.q.dtype)
    call = dataclasses.replace(call, q=q, k_cache=store(k, kv_format), v_cache=store(v, kv_format))
    poison_unseen(call)
    return call


SHAPE = (4, 2000, 1, 128)


@every_format
@pytest.mark.parametrize("factor", [60.0, 1e-3, 1e-6])
def test_extreme_and_vanishing_logits(kv_format, factor):
    check(call_with(kv_format, normal(*SHAPE), normal(*SHAPE, seed=9), q_factor=factor), lse_slack=FP32_STEPS)


@every_format
@pytest.mark.parametrize("place", [0, 64, 1002])
def test_one_dominating_token(kv_format, place):
    """Its weight is 1: what comes out is its row of V. Wherever it stands, all that was summed before must shrink."""
    direction = normal(128)
    k = 0.1 * normal(*SHAPE)
    k[:, place] = 4 * direction
    call = call_with(kv_format, k, normal(*SHAPE, seed=9))
    q = (direction + 0.1 * call.q.float()).to(call.q.dtype)
    check(dataclasses.replace(call, q=q), lse_slack=FP32_STEPS)


@every_format
def test_scores_that_rise_all_the_way(kv_format):
    """The running maximum moves in every tile, by more than the kernel lets probabilities grow."""
    direction = normal(128) / 128**0.5
    k = 0.1 * normal(*SHAPE) + torch.linspace(0, 200, 2000, device=CUDA)[:, None, None] * direction
    call = call_with(kv_format, k, normal(*SHAPE, seed=9))
    q = (10 * direction + 0.1 * call.q.float()).to(call.q.dtype)
    check(dataclasses.replace(call, q=q), lse_slack=FP32_STEPS)


@every_format
def test_constant_rows_have_scale_zero(kv_format):
    k, v = normal(*SHAPE), normal(*SHAPE, seed=9)
    k[:, ::3], v[:, ::2] = 0.5, -1.25
    check(call_with(kv_format, k, v))
    check(call_with(kv_format, torch.ones(SHAPE, device=CUDA), torch.full(SHAPE, 2.0, device=CUDA)))
    check(call_with(kv_format, normal(*SHAPE), torch.full(SHAPE, -3.0, device=CUDA)))


@every_format
def test_rows_of_v_from_a_ten_thousandth_to_ten_thousand(kv_format):
    v = (normal(*SHAPE, seed=9) * powers_of_ten(-4, 4, 4, 2000, 1, 1)).clamp(-6e4, 6e4)
    check(call_with(kv_format, normal(*SHAPE), v))


@every_format
def test_rows_of_k_from_a_ten_thousandth_to_ten_thousand(kv_format):
    k = (normal(*SHAPE) * powers_of_ten(-4, 4, 4, 2000, 1, 1)).clamp(-6e4, 6e4)
    check(call_with(kv_format, k, normal(*SHAPE, seed=9), q_factor=1e-3), lse_slack=FP32_STEPS)


# fp16 probabilities below 6e-5 lose bits, which shows where a row of V 1e8 times larger than the likeliest token's has
# one of them. INT4 takes the rows' scales into the softmax reference, and bf16 has the range of fp32.
@pytest.mark.parametrize("kv_format", [name for name in FORMATS if name != "fp16"])
def test_small_probabilities_of_large_rows_count(kv_format):
    k = (normal(*SHAPE) * powers_of_ten(-4, 4, 4, 2000, 1, 1)).clamp(-6e4, 6e4)
    v = (normal(*SHAPE, seed=9) * powers_of_ten(-4, 4, 4, 2000, 1, 1, seed=10)).clamp(-6e4, 6e4)
    check(call_with(kv_format, k, v, q_factor=1e-3), lse_slack=FP32_STEPS)


# -- splits ------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("num_splits", [1, 3, 17])
def test_the_parts_make_the_whole(kv_format, num_splits):
    call = make_call(kv_format, [3000, 0, 300, 1], group=5, device=CUDA)
    out, *parts = decode_attention_splits(*call.tensors, kv_format=kv_format, num_splits=num_splits)
    assert [tuple(part.shape) for part in parts] == [(4, num_splits, 5, 128), (4, num_splits, 5), (4, num_splits, 5)]
    assert torch.equal(out, call.run(num_splits=num_splits))
    assert_close(call, out)
    whole = combine(*parts)
    lse = (whole.max + whole.sum.log()).unsqueeze(1)
    assert_close(call, whole.out.unsqueeze(1), lse)
    assert not parts[0][1].any() and torch.all(parts[1][1] == -torch.inf) and not parts[2][1].any()


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4"])
@pytest.mark.parametrize("num_split_ks", [1, 8, 13])
def test_fbgemms_call(kv_format, num_split_ks):
    call = make_call(kv_format, [1024, 1, 100], device=CUDA)
    groups = int(kv_format[-1]) if kv_format != "bf16" else 1
    out, split_out, metadata = gqa_attn_splitk(
        call.q, call.k_cache, call.v_cache, call.seq_lens - 1, 128**-0.5, num_split_ks, groups
    )
    assert_close(call, out)
    # FBGEMM's own reduction: outputs are not normalised.
    weight = (metadata[:, 0] - metadata[:, 0].amax(dim=1, keepdim=True)).exp()
    combined = (weight.unsqueeze(-1) * split_out).sum(1) / (weight * metadata[:, 1]).sum(1).unsqueeze(-1)
    assert_close(call, combined.unsqueeze(1))
