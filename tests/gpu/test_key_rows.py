"""Extend attention of few queries over codes, keys times queries, on a GPU: against fp64, and where it could break.

All that no query of a request sees is poisoned: NaN rows, table entries that are no pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.configured import bind_config
from cute_kernels import decode_attention
from cute_kernels.attention import launches as attention_launches
from cute_kernels.attention import ops as attention_ops
from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_schedule import choose, heads_of_tile, key_rows_of
from cute_kernels.attention.launches import ExtendLaunch
from cute_kernels.attention.plan import configs_of, lies_in_maps, make_plan, problem_of
from cute_kernels.runtime.spec import KernelSpec
from tests.extend.cases import Call, assert_close, fused, make_call
from tests.gpu.extend_graphs import assert_a_graph_serves

pytestmark = [pytest.mark.gpu]

CUDA = "cuda"
# 72 rows a work tile are 18 queries of 4 heads; blocks of 128 keys, of which a warpgroup has 64.
Q_LENS, LENGTHS = [17, 0, 1, 18, 5, 16, 40, 0, 2], [700, 5, 129, 64, 300, 128, 191, 0, 2]
FORMATS = ("int8_token_head", "int8_tensor", "e4m3_token_head", "e4m3_tensor", "e4m3_head", "e5m2")
FORMATS += ("int4_g1", "int4_g2", "int4_g4")

PUBLIC = (
    "int8_token_head",
    "e4m3_token_head",
    "e4m3_tensor",
    "int4_g1",
    "int4_g4",
    "tree, codes",
)  # that the schedule gives calls of few queries
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in FORMATS},
    "pages of 16": ("int8_token_head", {"page_size": 16}),
    "pages of 48, HND": ("e4m3_tensor", {"page_size": 48, "cache_layout": "HND"}),
    "pages of 256, HND": ("int4_g1", {"page_size": 256, "cache_layout": "HND"}),
    "a scale a row, HND": ("e4m3_token_head", {"page_size": 48, "cache_layout": "HND"}),
    "a scale a row, window, HND": ("int8_token_head", {"page_size": 64, "cache_layout": "HND", "window_size": 100}),
    "pages of 64, HND": ("int4_g4", {"page_size": 64, "cache_layout": "HND"}),
    "a pair, HND": (("int8_token_head", "int4_g4"), {"page_size": 64, "cache_layout": "HND"}),
    "a scale a row, 3 heads": ("int8_token_head", {"page_size": 16, "num_kv_heads": 3}),
    "contiguous": ("int8_token_head", {"page_size": None}),
    "contiguous, bytes": ("e4m3_tensor", {"page_size": None}),
    "pages of 16, bytes": ("int8_tensor", {"page_size": 16}),
    "contiguous, HND": ("int4_g4", {"page_size": None, "cache_layout": "HND"}),
    "6 heads a group": ("e4m3_token_head", {"group": 6}),
    "one head a group": ("int4_g4", {"group": 1, "num_kv_heads": 3}),
    "all keys": ("int8_token_head", {"causal": False}),
    "window": ("e4m3_tensor", {"window_size": 100}),
    "a narrow window, sinks": ("int4_g4", {"window_size": 7, "sinks": True}),
    "sinks": ("int8_token_head", {"sinks": True}),
    "sinks, new tokens": ("int4_g1", {"sinks": True, "new": True}),
    "tree, sinks": ("int8_token_head", {"tree": True, "sinks": True}),
    "fp16 queries": ("int8_token_head", {"q_dtype": "fp16"}),
    "fp16 queries, int4": ("int4_g4", {"q_dtype": "fp16"}),
    "new tokens": ("int8_token_head", {"new": True}),
    "tree": ("e4m3_token_head", {"tree": True}),
    "tree, codes": ("e4m3_tensor", {"tree": True}),
    "tree, new tokens": ("int4_g4", {"tree": True, "new": True}),
    "a pair": (("int8_token_head", "int4_g4"), {}),
    "another pair": (("int4_g1", "e4m3_tensor"), {}),
}

FUSED = ("int8_token_head", "int4_g4", "e4m3_tensor")


def variant(name: str, q_lens=Q_LENS, lengths=LENGTHS, device: str = CUDA, seed: int = 0, **more: Any) -> Call:
    kv_format, given = VARIANTS[name]
    options: dict[str, Any] = {"num_kv_heads": 4, **given, **more}
    if "new" in options:  # all of them are there
        lengths = [max(pair) for pair in zip(q_lens, lengths, strict=True)]
    return make_call(kv_format, q_lens, lengths, device=device, seed=seed, **options)


def config_of(call: Call, tile_rows: int = 72) -> ExtendConfig:
    """Of a call's launch over the cache."""
    checked = check_call(*call.tensors, **call.keywords)
    heads = heads_of_tile(checked.num_kv_heads)
    config = key_rows_of(choose(problem_of(checked)), tile_rows, lies_in_maps(checked), heads)
    assert config is not None
    return config


def specs() -> list[KernelSpec]:
    """For tests.gpu.prepare."""
    configs: dict[ExtendConfig, None] = {}
    calls = [(name, variant(name, [1], [1], device="cpu")) for name in VARIANTS]
    calls += [(name, fused(variant(name, [1], [1], device="cpu"))) for name in FUSED]
    for name, call in calls:
        checked = check_call(*call.tensors, **call.keywords)
        configs |= dict.fromkeys(configs_of(checked, config_of(call)))
        if name in PUBLIC:
            configs |= dict.fromkeys((choose(problem_of(checked)), config_of(call, 40)))
    combines = dict.fromkeys(CombineConfig(config.q_dtype) for config in configs)
    return [*map(AttentionSpec, configs), *map(AttentionSpec, combines)]


def check(call: Call, tile_rows: int = 72, **options: Any) -> torch.Tensor:
    """Runs the kernel, whether it is the one that serves the call or not, into an output full of NaN and compares with
    fp64; returns the output."""
    out = torch.full_like(call.q, torch.nan)
    given = call.keywords | options | {"out": out, "return_lse": True}
    run = bind_config(config_of(call, tile_rows), *call.tensors, **given)
    _, lse = run()
    assert_close(call, out, lse)
    again = out.clone()
    out.fill_(torch.nan)
    run()
    assert torch.equal(out, again), "equal inputs give bitwise equal outputs"
    return out


@pytest.mark.parametrize("tile_rows", [40, 72])
@pytest.mark.parametrize("name", PUBLIC)
def test_calls_of_few_queries_are_served_by_it(name, tile_rows):
    call = variant(name, Q_LENS if tile_rows == 72 else [min(q_len, 10) for q_len in Q_LENS])
    launch = make_plan(check_call(*call.tensors, **call.keywords)).products[0].launch_for(call.q.shape[0], None)
    assert isinstance(launch, ExtendLaunch) and launch.config == config_of(call, tile_rows)
    out = check(call, tile_rows)
    assert torch.equal(call.run(), out)


@pytest.mark.parametrize("name", FUSED)
def test_parts_of_a_fused_projection_give_the_same_bits(name):
    call = variant(name)
    apart = fused(call)
    assert not apart.q.is_contiguous()
    assert torch.equal(check(apart), check(call))
    assert torch.equal(apart.run(), call.run()), "whichever kernel serves it"


def equal_requests() -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns (queries of requests with equally many, a function that writes their decode attention into a tensor and
    returns it)."""
    call = variant("e4m3_tensor", [16] * 20, [37 * i + 16 for i in range(20)])
    q = call.q.view(20, 16, *call.q.shape[1:])

    def decode(out: torch.Tensor) -> torch.Tensor:
        decode_attention(q, *call.tensors[1:], kv_format=call.kv_format, out=out, **call.options)
        return out

    return q, decode


def test_a_plan_that_a_busy_stream_made_serves_another_one():
    """What it keeps of equal requests is there for whoever launches next."""
    q, decode = equal_requests()
    want, busy, other = decode(torch.empty_like(q)), torch.cuda.Stream(), torch.cuda.Stream()
    outs = [torch.full_like(q, torch.nan) for _ in range(2)]
    torch.cuda.synchronize()
    attention_ops.launch.plans.clear()  # kernels stay: loading one again would wait for the device
    attention_launches._kept_bounds.clear()
    for stream, out in zip((busy, other), outs, strict=True):
        with torch.cuda.stream(stream):
            if stream is busy:
                torch.cuda._sleep(200_000_000)
            decode(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_which_kernel_serves_decode_attention_does_not_depend_on_whether_its_first_call_was_captured():
    q, decode = equal_requests()
    want = decode(torch.empty_like(q))
    torch.cuda.synchronize()
    attention_ops.launch.plans.clear()  # kernels stay
    captured, graph = torch.full_like(q, torch.nan), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(captured)
    eager = decode(torch.full_like(q, torch.nan))
    graph.replay()
    del graph
    assert torch.equal(captured, want) and torch.equal(eager, want)
    assert torch.equal(decode(torch.full_like(q, torch.nan)), want), "once the graph's memory is gone"


@pytest.mark.parametrize("name", ["e4m3_tensor", "int8_token_head"])
@pytest.mark.parametrize("q_len, batch", [(10, 20), (16, 20)])
def test_decode_attention_s_calls_are_served_by_it(q_len, batch, name):
    call = variant(name, [q_len] * batch, [37 * i + q_len for i in range(batch)])
    q = call.q.view(batch, -1, *call.q.shape[1:])
    out, lse = decode_attention(q, *call.tensors[1:], kv_format=call.kv_format, return_lse=True, **call.options)
    assert_close(call, out.view_as(call.q), lse.view(call.q.shape[:2]))
    extended = call.run()
    assert torch.equal(out.view_as(call.q), extended)


@pytest.mark.parametrize("name", ["int8_token_head", "e4m3_tensor"])
def test_decode_attention_reads_queries_of_a_fused_projection_where_they_lie(name):
    """Also those that lie unevenly, as of requests whose first queries are left out."""
    call = variant(name, [16] * 20, [37 * i + 16 for i in range(20)])
    apart, out = fused(call).q, torch.full_like(call.q, torch.nan).unflatten(0, (20, 16))
    uneven = torch.full((20, 17, *call.q.shape[1:]), torch.nan, dtype=call.q.dtype, device=CUDA)[:, 1:]
    dense = call.q.unflatten(0, (20, 16))
    want = decode_attention(dense, *call.tensors[1:], kv_format=call.kv_format, **call.options)
    for q in (apart.unflatten(0, (20, 16)), uneven.copy_(dense)):
        assert not q.is_contiguous()
        decode_attention(q, *call.tensors[1:], kv_format=call.kv_format, out=out, **call.options)
        assert torch.equal(out, want)
        out.fill_(torch.nan)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_attention(name):
    check(variant(name))


@pytest.mark.parametrize("name", ["int8_token_head", "e4m3_tensor", "int4_g4", "new tokens", "tree"])
def test_random_batches(name):
    generator = random.Random(name)
    for seed in range(8):
        count = generator.choice([1, 2, 33, 70])
        lengths = [generator.choice([0, 1, 127, 128, 129, generator.randrange(1500)]) for _ in range(count)]
        check(variant(name, [generator.randrange(19) or 1 for _ in lengths], lengths, seed=seed))


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.parametrize("name", ["int8_token_head", "e4m3_tensor", "int4_g1", "a narrow window, sinks"])
def test_splits(name, num_splits):
    check(variant(name), num_splits=num_splits)


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 77), (True, 128)])
@pytest.mark.parametrize("kv_format", ["int8_token_head", "e4m3_tensor", "int4_g4"])
def test_zero_scores_show_the_mask(kv_format, causal, window):
    """With q = 0 every key that is seen weighs the same: a mask that is off by one key is off by a row of V."""
    call = make_call(kv_format, [18, 5, 17], [400, 5, 290], causal=causal, window_size=window, device=CUDA)
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("kv_format", ["int8_token_head", "int4_g4"])
def test_zero_scores_show_a_tree_s_mask(kv_format):
    """Of few older tokens and many new ones; a tree's mask must never become the causal one."""
    call = make_call(kv_format, [68, 5, 64], [69, 5, 400], tree=True, group=1, device=CUDA)
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("kv_format", ["int8_token_head", "e4m3_tensor", "int8_head", "int4_g4"])
def test_zeros_over_keys_of_zeros_are_no_nan(kv_format):
    """Both are scaled by the least powers of 2 that there are, whose product must not be 0: masked scores are -inf."""
    call = make_call(kv_format, [18, 5], [400, 5], device=CUDA)
    for tensor in (call.q, call.k_cache, *(call.options[name] for name in ("k_scale",) if name in call.options)):
        tensor.zero_()
    check(call)


@pytest.mark.parametrize("factor", [1e-6, 1e5])
def test_scales_far_from_one(factor):
    """Rows' scales are fp32: no probability may overflow or vanish in fp16."""
    call = make_call("int8_token_head", [17, 3], [300, 40], device=CUDA)
    for cache in (call.k_cache, call.v_cache):
        cache[..., :4].view(torch.float32).mul_(factor)
    call.q.div_(factor)
    if factor > 1:
        call.q.mul_(0.5)
    check(call)


def test_rows_of_one_tile_may_have_scales_of_all_sizes():
    call = make_call("int8_token_head", [17], [300], device=CUDA)
    scales = call.v_cache[..., :4].view(torch.float32)
    scales.mul_(torch.exp2(torch.randint(-12, 12, scales.shape, device=CUDA).float()))
    check(call)


def test_values_of_zeros_are_zeros():
    """Their scales are 0, which bound no probability."""
    call = make_call("int8_token_head", [17], [300], device=CUDA)
    call.v_cache.zero_()
    assert not check(call).any()


def test_growing_scores_raise_the_reference():
    """Keys are read from the last one on: the greatest scores come last, again and again."""
    call = make_call("int8_token_head", [17], [1500], device=CUDA)
    rows = call.k_cache[call.options["block_table"][0].long()[:24]]
    steps = torch.linspace(12.0, 0.1, rows.shape[0] * rows.shape[1], device=CUDA).view(*rows.shape[:2], 1, 1)
    scaled = rows[..., :4].contiguous().view(torch.float32) * steps
    rows[..., :4] = scaled.view(torch.uint8)
    call.k_cache[call.options["block_table"][0].long()[:24]] = rows
    check(call)


@pytest.mark.parametrize("name", ["int8_token_head", "e4m3_tensor", "int4_g4"])
def test_a_query_with_an_infinite_number_is_nan_and_leaves_the_others_alone(name):
    """A work tile's queries have a power of 2 in common."""
    call = variant(name)
    run = bind_config(config_of(call), *call.tensors, **call.keywords, out=(out := torch.empty_like(call.q)))
    run()
    want = out.clone()
    call.q[3, 2, 17], call.q[40, 5, 100] = torch.inf, -torch.inf
    out.fill_(torch.nan)
    run()
    infinite = call.q.isinf().any(-1)
    assert out[infinite].isnan().all() and torch.equal(out[~infinite], want[~infinite])


@pytest.mark.parametrize("name", ["int8_token_head", "e4m3_tensor", "int4_g4"])
def test_scores_that_fp32_has_in_steps_of_64_come_to_an_end(name):
    """A reference is raised once, though some logit then exceeds it by what it is rounded by."""
    call = variant(name)
    call.q.mul_(2.0**30)
    call.run()
    torch.cuda.synchronize()


def test_a_graph_serves_other_lengths():
    other = variant("e4m3_tensor", [3, 0, 40, 1, 5, 2, 17, 3, 0], [690, 5, 129, 60, 300, 100, 180, 3, 2], seed=5)
    assert_a_graph_serves(variant("e4m3_tensor"), other)


def test_ends_and_lengths_that_cannot_be_do_no_harm():
    """Numbers on the device are not looked at: nothing may be written or read outside the tensors."""
    call = variant("e4m3_tensor")
    call.seq_lens[0] = 2**30
    call.cu_seqlens_q[2] = -7
    call.cu_seqlens_q[-1] = 2**30
    call.options["block_table"][0] = -1
    call.run()
    torch.cuda.synchronize()


def test_many_launches_leave_the_counter_empty():
    call = variant("e4m3_tensor")
    want = call.run()
    for _ in range(50):
        assert torch.equal(call.run(), want)
