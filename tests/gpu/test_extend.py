"""Extend attention on a GPU is attention: every format against fp64 on the dequantised cache, and where it could break.

All that no query of a request sees is poisoned: NaN rows, table entries that are no pages.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.configured import bind_config
from cute_kernels import append_kv, decode_attention
from cute_kernels.attention import mixed_attention
from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import UnpackConfig
from cute_kernels.attention.extend_schedule import choose, choose_fp8, choose_unpacked
from cute_kernels.attention.plan import configs_of, problem_of
from cute_kernels.compat.flash_attn import flash_attn_varlen_func
from cute_kernels.formats.kv import format_of
from cute_kernels.runtime.spec import KernelSpec
from tests.extend import cases
from tests.extend.cases import FORMATS, Call, appended, assert_close, fused, make_call, writable
from tests.gpu.extend_graphs import assert_a_graph_serves

pytestmark = [pytest.mark.gpu]

CUDA = "cuda"
# Work tiles of 128 rows, blocks of 128 keys: ends of all kinds, requests without queries, keys, or either.
Q_LENS, LENGTHS = [130, 0, 1, 64, 257, 3, 0], [700, 5, 129, 64, 300, 0, 0]

FEATURES = {"window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True}
MIXED = [("bf16", "int4_g4"), ("bf16", "int8_token_head"), ("bf16", "int8_channel"), ("fp16", "e4m3_tensor")]
MIXED += [("int8_token_head", "bf16"), ("int4_g4", "bf16"), ("e4m3_head", "fp16"), ("int8_channel", "bf16")]
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{name}": (name, {}) for name in FORMATS},
    "pages of 16": ("bf16", {"page_size": 16}),
    "pages of 16, codes": ("int8_token_head", {"page_size": 16}),
    "pages of 48, HND": ("bf16", {"page_size": 48, "cache_layout": "HND"}),
    "pages of 256, HND, codes": ("int4_g4", {"page_size": 256, "cache_layout": "HND"}),
    "contiguous": ("bf16", {"page_size": None}),
    "contiguous, codes": ("int8_token_head", {"page_size": None}),
    "one head a group": ("bf16", {"group": 1, "num_kv_heads": 3}),
    "7 heads a group": ("bf16", {"group": 7}),
    "8 heads a group": ("int4_g1", {"group": 8}),
    "head_dim 64": ("bf16", {"head_dim": 64}),
    "head_dim 64, bytes": ("int8_token_head", {"head_dim": 64}),
    "head_dim 64, int4": ("int4_g4", {"head_dim": 64}),
    "head_dim 256": ("bf16", {"head_dim": 256}),
    "head_dim 256, bytes": ("int8_token_head", {"head_dim": 256}),
    "head_dim 256, e4m3": ("e4m3_tensor", {"head_dim": 256}),
    "head_dim 256, int4": ("int4_g4", {"head_dim": 256}),
    "head_dim 80": ("bf16", {"head_dim": 80}),
    "head_dim 80, bytes": ("e4m3_token_head", {"head_dim": 80, "num_splits": 2}),
    "head_dim 96": ("bf16", {"head_dim": 96, "page_size": 16, "num_splits": 3}),
    "head_dim 96, int4": ("int4_g4", {"head_dim": 96}),
    "head_dim 96, new tokens": ("int8_token_head", {"head_dim": 96, "new": True}),
    "head_dim 192": ("bf16", {"head_dim": 192, "page_size": None, "num_splits": 2}),
    "head_dim 192, bytes": ("int8_token_head", {"head_dim": 192, "new": True}),
    "head_dim 192, int4": ("int4_g4", {"head_dim": 192}),
    "all keys": ("bf16", {"causal": False}),
    "all keys, codes": ("int8_token_head", {"causal": False}),
    "window": ("bf16", {"window_size": 100}),
    "window, codes": ("int4_g4", {"window_size": 33}),
    "all features": ("bf16", {"window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True}),
    "all features, codes": ("int8_token_head", {"window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True}),
    "fp16 queries, bytes": ("int8_token_head", {"q_dtype": "fp16"}),
    "fp16 queries, int4": ("int4_g4", {"q_dtype": "fp16"}),
    "new tokens": ("bf16", {"new": True}),
    "new tokens, codes": ("int8_token_head", {"new": True}),
    "new tokens, all features": (
        "int4_g4",
        {"new": True, "window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True},
    ),
    "new tokens, contiguous, fp16": ("fp16", {"new": True, "page_size": None}),
    "splits": ("bf16", {"num_splits": 3}),
    "splits, codes": ("int8_token_head", {"num_splits": 2}),
    "32 splits, all features": (
        "int4_g4",
        {"num_splits": 32, "window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True},
    ),
    "splits, new tokens": ("e4m3_tensor", {"num_splits": 4, "new": True, "sinks": True}),
    "splits, head_dim 64": ("bf16", {"num_splits": 5, "head_dim": 64, "q_dtype": "bf16"}),
    "splits, head_dim 256": ("bf16", {"num_splits": 5, "head_dim": 256}),
    "tree": ("bf16", {"tree": True}),
    "tree, codes": ("int8_token_head", {"tree": True, "sinks": True, "softcap": 20.0}),
    "tree, int4, splits": ("int4_g4", {"tree": True, "num_splits": 3}),
    "tree, new tokens": ("int4_g4", {"tree": True, "new": True, "sinks": True}),
    "tree, head_dim 256": ("bf16", {"tree": True, "head_dim": 256, "group": 1}),
    "a pair": (("int8_token_head", "int4_g4"), {}),
    "a pair, HND": (("int8_token_head", "int4_g4"), {"page_size": 64, "cache_layout": "HND", "window_size": 100}),
    **{f"{k}, {v}": ((k, v), {}) for k, v in MIXED},
    "K of 16 bits, pages of 16": (("bf16", "int8_token_head"), {"page_size": 16, "num_splits": 3}),
    "V of 16 bits, contiguous": (("e4m3_token_head", "bf16"), {"page_size": None, "group": 7}),
    "K of 16 bits, all features": (("bf16", "e4m3_token_head"), {"cache_layout": "HND", **FEATURES}),
    "V of 16 bits, new tokens": (("int4_g4", "bf16"), {"new": True, **FEATURES}),
    "V of 16 bits, tree": (("int8_token_head", "bf16"), {"tree": True}),
    "K of 16 bits, head_dim 80": (("bf16", "int4_g1"), {"head_dim": 80}),
    "K of 16 bits, head_dim 256": (("bf16", "int8_token_head"), {"head_dim": 256}),
    "V of 16 bits, head_dim 256": (("int8_token_head", "bf16"), {"head_dim": 256, "window_size": 100}),
    "2 groups, all features": ("int8_g2", {"num_splits": 3, **FEATURES}),
    "4 groups, head_dim 256": ("int8_g4", {"head_dim": 256}),
    "8 groups, head_dim 64, HND": ("int8_g8", {"head_dim": 64, "cache_layout": "HND", "page_size": 48}),
    "4 groups, head_dim 96, new tokens": ("int8_g4", {"head_dim": 96, "new": True}),
    "8 groups, pages of 16": ("int8_g8", {"page_size": 16, "q_dtype": "fp16"}),
    "K in groups": (("int8_g4", "int4_g4"), {"page_size": None}),
    "V in groups, K of 16 bits": (("bf16", "int8_g2"), {}),
    "channels, all features": (
        "int8_channel",
        {**FEATURES, "num_splits": 3},
    ),
    "channels, fp16 queries": ("int8_channel", {"q_dtype": "fp16", "group": 7}),
    "channels, head_dim 80": ("int8_channel", {"head_dim": 80, "num_splits": 2}),
    "channels, head_dim 256": ("int8_channel", {"head_dim": 256, "page_size": None}),
    "channels, new tokens": ("int8_channel", {"new": True, "cache_layout": "HND"}),
    "K's channels": (("int8_channel", "int4_g4"), {"page_size": 16}),
    "V's channels": (("e4m3_token_head", "int8_channel"), {}),
}
FP8: dict[str, dict[str, Any]] = {
    "pages of 64": {},
    "pages of 16": {"page_size": 16},
    "HND": {"cache_layout": "HND"},
    "contiguous": {"page_size": None},
    "fp16 queries": {"q_dtype": "fp16"},
    "7 heads a group": {"group": 7},
    "all keys": {"causal": False},
    "window": {"window_size": 100},
    "splits": {"num_splits": 3},
    "tree": {"tree": True},
    "new tokens": {"new": True},
    "all features": {"window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True},
}
UNPACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in cases.UNPACKED},
    "pages of 256, HND, codes": ("int4_g4", {"page_size": 256, "cache_layout": "HND"}),
    "pages of 16, HND, bytes": ("int8_token_head", {"page_size": 16, "cache_layout": "HND", "window_size": 100}),
    "a pair, HND": (("int8_token_head", "int4_g4"), {"cache_layout": "HND"}),
    "contiguous, codes": ("int8_token_head", {"page_size": None}),
    "7 heads a group": ("e4m3_token_head", {"group": 7}),
    "head_dim 64": ("e4m3_tensor", {"head_dim": 64}),
    "head_dim 80": ("e4m3_token_head", {"head_dim": 80, "num_splits": 2}),
    "head_dim 192": ("int8_token_head", {"head_dim": 192, "new": True}),
    "head_dim 256": ("int4_g4", {"head_dim": 256}),
    "all keys": ("int8_token_head", {"causal": False}),
    "window": ("int4_g4", {"window_size": 33}),
    "all features": ("int8_token_head", FEATURES),
    "fp16 queries": ("int8_token_head", {"q_dtype": "fp16"}),
    "new tokens": ("int8_token_head", {"new": True}),
    "new tokens, all features": ("int4_g4", {"new": True, **FEATURES}),
    "splits": ("int8_token_head", {"num_splits": 3}),
    "tree": ("int8_token_head", {"tree": True, "sinks": True, "softcap": 20.0}),
    "tree, new tokens": ("int4_g4", {"tree": True, "new": True, "sinks": True}),
    "a pair": (("int8_token_head", "int4_g4"), {}),
    "another pair": (("e4m3_tensor", "int8_token_head"), {}),
}
# The others read the cache as it is, whatever the schedule says of so few queries.
VARIANTS = {name: (form, {"unpack": False, **options}) for name, (form, options) in VARIANTS.items()}
FUSED = ("bf16", "int4_g4", "int8_token_head", "head_dim 80", "head_dim 256, int4", "contiguous", "new tokens, codes")
FUSED += ("new tokens", "splits", "tree, int4, splits", "fp16 queries, bytes", "all features", "window, codes")
FUSED += ("int4_g4, unpacked", "new tokens, all features, unpacked", "pages of 64, FP8 products")
FUSED += ("V of 16 bits, new tokens", "int8_channel", "channels, new tokens", "bf16, int8_token_head", "int4_g4, bf16")
VARIANTS |= {f"{name}, FP8 products": ("e4m3_tensor", {"fp8_products": True, **given}) for name, given in FP8.items()}
VARIANTS |= {f"{name}, unpacked": (form, {"unpack": True, **given}) for name, (form, given) in UNPACKED.items()}


def variant(name: str, q_lens=Q_LENS, lengths=LENGTHS, device: str = CUDA, seed: int = 0, **more: Any) -> Call:
    kv_format, given = VARIANTS[name]
    options = given | more
    if "new" in options:  # all of them are there
        lengths = [max(pair) for pair in zip(q_lens, lengths, strict=True)]
    return make_call(kv_format, q_lens, lengths, device=device, seed=seed, **options)


def specs() -> list[KernelSpec]:
    """For tests.gpu.prepare."""
    # Lengths beyond every window: one that all tokens fit is left out of a kernel.
    calls = [variant(name, [1], [300], device="cpu") for name in VARIANTS]
    calls += [fused(variant(name, [1], [300], device="cpu")) for name in FUSED]
    configs: dict[ExtendConfig, None] = {}
    unpacking: dict[UnpackConfig, None] = {}
    for call in calls:
        first, *newer = configs_of(check_call(*call.tensors, **call.keywords))
        if call.options.get("unpack") or call.options.get("fp8_products"):
            chosen = choose_fp8 if call.options.get("fp8_products") else choose_unpacked
            unpack, first = chosen(first)
            unpacking[unpack] = None
        configs |= dict.fromkeys((first, *newer))
    combines = dict.fromkeys(CombineConfig(config.q_dtype) for config in configs)
    return [*map(AttentionSpec, configs), *map(AttentionSpec, unpacking), *map(AttentionSpec, combines)]


def check(call: Call, *, rounded: bool = True) -> torch.Tensor:
    """Runs the public call into an output full of NaN and compares with fp64; returns the output. rounded: see
    `assert_close`."""
    out = torch.full_like(call.q, torch.nan)
    result, lse = call.run(out=out, return_lse=True)
    assert result is out
    assert_close(call, out, lse, rounded=rounded)
    return out


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_attention(name):
    out = check(call := variant(name))
    again = torch.full_like(out, torch.nan)
    call.run(out=again)
    assert torch.equal(out, again), "equal inputs give bitwise equal outputs"


@pytest.mark.parametrize("name", FUSED)
def test_parts_of_a_fused_projection_give_the_same_bits(name):
    """q, and new tokens, where a projection has put them: what lies between is NaN."""
    call = variant(name)
    want, want_lse = call.run(return_lse=True)
    for pad in (0, 8):
        apart, out = fused(call, pad), torch.full_like(want, torch.nan)
        assert not apart.q.is_contiguous()
        _, lse = apart.run(out=out, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_close(call, want, want_lse)


def test_a_single_query_may_have_any_stride():
    """Also one that would lead the next query off its 16 bytes."""
    call = variant("bf16", [1], [70])
    memory = torch.full((call.q.numel() + 3,), torch.nan, dtype=call.q.dtype, device=CUDA)
    odd = memory.as_strided(call.q.shape, (call.q.stride(0) + 3, *call.q.stride()[1:])).copy_(call.q)
    assert torch.equal(replace(call, q=odd).run(), call.run())


def test_a_graph_of_queries_that_lie_apart_serves_other_lengths():
    name = "int8_token_head"
    other = fused(variant(name, [100, 3, 0, 40, 200, 3, 1], [690, 5, 100, 64, 200, 4, 1], seed=5))
    assert_a_graph_serves(fused(variant(name)), other)


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "int8_token_head", "int4_g4", "window, codes", "new tokens, codes", "splits", "tree, int4, splits"),
        *("bf16, int8_token_head", "int8_token_head, bf16", "int8_channel", "int8_g4"),
        *("int8_token_head, unpacked", "window, unpacked", "new tokens, unpacked"),
    ],
)
def test_random_batches(name):
    generator = random.Random(name)
    for seed in range(8):
        count = generator.choice([1, 2, 33, 70])
        lengths = [generator.choice([0, 1, 127, 128, 129, generator.randrange(1500)]) for _ in range(count)]
        q_lens = [generator.choice([0, 1, 2, 5, 33, generator.randrange(300)]) for _ in lengths]
        check(variant(name, q_lens, lengths, seed=seed))


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 77), (True, 128)])
@pytest.mark.parametrize(
    "kv_format, unpack",
    [("bf16", False), *((name, unpack) for name in ("int8_token_head", "int4_g4") for unpack in (False, True))],
)
def test_zero_scores_show_the_mask(kv_format, unpack, causal, window):
    """With q = 0 every key that is seen weighs the same: a mask that is off by one key is off by a row of V."""
    call = make_call(
        kv_format, [130, 5, 300], [400, 5, 290], causal=causal, window_size=window, unpack=unpack, device=CUDA
    )
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 77)])
@pytest.mark.parametrize("kv_format", [*MIXED, "int8_channel"], ids=str)
def test_zero_scores_show_the_mask_of_mixed_pairs(kv_format, causal, window):
    call = make_call(kv_format, [130, 5, 300], [400, 5, 290], causal=causal, window_size=window, device=CUDA)
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 77), (True, 128)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_zero_scores_show_the_mask_of_fp8_products(num_splits, causal, window):
    """Probabilities are then alike, and E4M3 holds them: every value has to be where its key is, to the last bits."""
    lengths, options = [400, 5, 290], {"causal": causal, "window_size": window, "num_splits": num_splits}
    call = make_call("e4m3_tensor", [130, 5, 300], lengths, fp8_products=True, device=CUDA, **options)
    call.q.zero_()
    check(call, rounded=False)


@pytest.mark.parametrize("options", [{"tree": True}, {"softcap": 20.0, "sinks": True, "window_size": 200}], ids=str)
def test_what_leaves_zero_scores_alike_leaves_fp8_products_exact(options):
    """Their kernels multiply values before the next scores, not behind the softmax."""
    call = make_call("e4m3_tensor", [130, 5, 64], [400, 5, 290], fp8_products=True, device=CUDA, **options)
    call.q.zero_()
    check(call, rounded=False)


def test_fp8_products_of_signs_are_exact():
    """Scores are integers, and differ by 2 or not at all: E4M3 holds a softmax of those alike, and others are next to
    nothing. So a query gets the average of the values of those keys whose signs agree most with its own."""
    call = make_call("e4m3_tensor", [130, 64], [400, 64], fp8_products=True, device=CUDA)

    def signs(like: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 2, like.shape, device=CUDA).float() * 2 - 1

    call.q.copy_(signs(call.q))
    call.k_cache.copy_(signs(call.k_cache).to(torch.float8_e4m3fn).view(call.k_cache.dtype))
    call.options["k_scale"].fill_(1.0)
    call.options["softmax_scale"] = 6.0
    out, lse = call.run(return_lse=True)
    assert_close(call, out, rounded=False)
    assert (lse - call.reference()[1]).abs().max() < 1e-3, "of scores of some 200"


@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("kv_format", ["int8_token_head", "e4m3_tensor", "int8_head", "int4_g4"])
def test_zeros_over_keys_of_zeros_are_no_nan(kv_format, unpack):
    """Both are scaled by the least powers of 2 that there are, whose product must not be 0: masked scores are -inf."""
    call = make_call(kv_format, [130, 5], [400, 5], unpack=unpack, device=CUDA)
    for tensor in (call.q, call.k_cache, *(call.options[name] for name in ("k_scale",) if name in call.options)):
        tensor.zero_()
    check(call)


@pytest.mark.parametrize(
    "name", ["bf16", "int8_token_head", "int4_g4", "int4_g4, unpacked", "pages of 64, FP8 products"]
)
def test_a_query_with_an_infinite_number_is_nan_and_leaves_the_others_alone(name):
    call = variant(name)
    want = call.run()
    call.q[3, 1, 17], call.q[140, 0, 100] = torch.inf, -torch.inf
    found, infinite = call.run(), call.q.isinf().any(-1)
    assert found[infinite].isnan().all() and torch.equal(found[~infinite], want[~infinite])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("kv_format", ["bf16", "int8_token_head", "int4_g4"])
def test_zero_scores_show_a_tree_s_mask(kv_format, new, num_splits):
    """Of few older tokens and many new ones; a tree's mask must never become the causal one."""
    call = make_call(
        kv_format, [130, 5, 64], [131, 5, 400], tree=True, new=new, num_splits=num_splits, group=1, device=CUDA
    )
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("name", ["new tokens, codes", "new tokens, unpacked", "new tokens"])
def test_new_tokens_may_be_appended_meanwhile(name):
    """Theirs are rows that such a call does not use, poison before and numbers behind."""
    call, side = variant(name), torch.cuda.Stream()
    want, options = call.run(), call.options
    poisoned = call.k_cache.clone(), call.v_cache.clone()
    table = options["block_table"].clone()  # with pages for new tokens, in which the call's own has none
    lengths, pages = call.seq_lens.tolist(), itertools.count(len(call.k_cache))
    rooms = [-(-length // call.k_cache.shape[1]) for length in lengths]
    for request, room in enumerate(rooms):
        for entry in range(room):
            if not 0 <= int(table[request, entry]) < len(call.k_cache):
                table[request, entry] = next(pages)
    more = next(pages) - len(call.k_cache)
    caches = [torch.cat([cache, cache[:1].expand(more, -1, -1, -1)]) for cache in poisoned]
    call = replace(call, k_cache=caches[0], v_cache=caches[1], options=options | {"block_table": table})
    for _ in range(10):
        for cache, old in zip(caches, poisoned, strict=True):
            cache[: len(old)].copy_(old)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            append_kv(
                options["new_k"], options["new_v"], *caches, kv_format=call.kv_format, seq_lens=call.seq_lens,
                cu_seqlens=call.cu_seqlens_q, block_table=table,
            )  # fmt: skip
        found = call.run()
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(found, want)


APPENDED = ("new tokens, codes", "new tokens", "V of 16 bits, new tokens", "channels, new tokens")


@pytest.mark.parametrize("name", APPENDED)
def test_new_tokens_are_appended_by_the_same_call(name):
    """Also in a graph."""
    call = fused(writable(variant(name)))
    options, caches = call.options, (call.k_cache, call.v_cache)
    want, blank = call.run(), [cache.clone() for cache in caches]
    of_append = {each: options[each] for each in ("cache_layout", "k_scale", "v_scale") if each in options}
    append_kv(
        options["new_k"], options["new_v"], *caches, kv_format=call.kv_format, seq_lens=call.seq_lens,
        cu_seqlens=call.cu_seqlens_q, block_table=options["block_table"], **of_append,
    )  # fmt: skip
    written, out = [cache.clone() for cache in caches], torch.full_like(want, torch.nan)

    def check_one(run: Any) -> None:
        for cache, rows in zip(caches, blank, strict=True):
            cache.copy_(rows)
        out.fill_(torch.nan)
        run()
        assert torch.equal(out, want)
        for mine, rows in zip(caches, written, strict=True):
            assert torch.equal(mine.view(torch.uint8), rows.view(torch.uint8)), "poison, too"

    for _ in range(5):
        check_one(lambda: appended(call, out=out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        appended(call, out=out)
    check_one(graph.replay)


def test_a_full_mask_is_full():
    call = make_call("bf16", [64, 33], [70, 33], tree=True, device=CUDA)
    call.q.zero_()
    call.options["tree_mask"].fill_(-1)
    out = check(call)
    everything = Call(
        *call.tensors, call.cu_seqlens_q, "bf16", {"causal": False, "block_table": call.options["block_table"]}
    )
    assert torch.equal(out, everything.run())


@pytest.mark.parametrize("sm_margin", [None, 16])
@pytest.mark.parametrize("name", ["bf16", "int8_token_head", "int4_g4"])
def test_a_mixed_batch_is_what_its_parts_are(name, sm_margin):
    """Also in a graph, and where queries that decode run beside the others."""
    call = variant(name, [1] * 9 + [300, 0, 70], [700, 1, 64, 65, 5, 900, 128, 3, 1000, 800, 30, 70])
    out = torch.full_like(call.q, torch.nan)
    arguments = {**call.keywords, "num_decodes": 9, "out": out, "sm_margin": sm_margin}
    mixed_attention(*call.tensors, **arguments)
    assert_close(call, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed_attention(*call.tensors, **arguments)
    want = out.clone()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)


def test_fewer_sms_give_the_same():
    call = variant("int8_token_head")
    assert torch.equal(call.run(num_splits=1), call.run(num_splits=1, sm_margin=130))


SCALED = [("int8_token_head", False), ("int8_token_head", True), ("int8_g4", None)]


@pytest.mark.parametrize("kv_format, unpack", SCALED)
def test_scales_far_from_one(kv_format, unpack):
    """Rows' scales are fp32: neither tile nor probability may overflow or vanish in fp16."""
    for factor in (1e-6, 1e5):
        call = make_call(kv_format, [70, 3], [300, 40], unpack=unpack, device=CUDA)
        for cache in (call.k_cache, call.v_cache):
            cache[..., : format_of(kv_format).header_bytes].view(torch.float32).mul_(factor)
        call.q.div_(factor)
        if factor > 1:
            call.q.mul_(0.5)
        check(call)


@pytest.mark.parametrize("unpack", [False, True])
def test_rows_of_one_tile_may_have_scales_of_all_sizes(unpack):
    call = make_call("int8_token_head", [70], [300], unpack=unpack, device=CUDA)
    scales = call.v_cache[..., :4].view(torch.float32)
    scales.mul_(torch.exp2(torch.randint(-12, 12, scales.shape, device=CUDA).float()))
    check(call)


@pytest.mark.parametrize("name", ["bf16", "int8_token_head, unpacked"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_request_does_not_depend_on_its_batch(num_splits, name):
    call = variant(name)
    call.options["num_splits"] = num_splits
    out = call.run()
    ends = call.cu_seqlens_q.tolist()
    for request in (0, 4):
        own = slice(ends[request], ends[request + 1])
        alone = Call(
            call.q[own].contiguous(),
            call.k_cache,
            call.v_cache,
            call.seq_lens[request : request + 1],
            torch.tensor([0, own.stop - own.start], dtype=torch.int32, device=CUDA),
            call.kv_format,
            call.options | {"block_table": call.options["block_table"][request : request + 1]},
        )
        assert torch.equal(alone.run(), out[own])


@pytest.mark.parametrize("name", ["bf16", "int4_g4", "e4m3_tensor"])
def test_a_query_does_not_depend_on_how_many_come_with_it(name):
    """A prompt at once, in chunks, or token by token: the same bits. Rows with a scale each agree within rounding: what
    a block's greatest scale is depends on which of its rows are seen."""
    call = variant(name, [150], [300])
    call.options["num_splits"] = 1
    out, before = call.run(), 150
    for start, stop in ((0, 150), (0, 70), (70, 71), (100, 150), (149, 150)):
        part = replace(
            call,
            q=call.q[start:stop].contiguous(),
            seq_lens=torch.full_like(call.seq_lens, before + stop),
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32, device=CUDA),
        )
        assert torch.equal(part.run(), out[start:stop])


@pytest.mark.parametrize("name", ["bf16", "int8_token_head", "int4_g4", "e4m3_tensor"])
def test_it_agrees_with_decode_attention(name):
    call = variant(name, [4] * 5, [700, 4, 129, 64, 300])
    batch, (heads, dim) = 5, call.q.shape[1:]
    options = {name: value for name, value in call.options.items() if name != "unpack"}
    want = decode_attention(call.q.view(batch, 4, heads, dim), *call.tensors[1:], kv_format=call.kv_format, **options)
    difference = (call.run() - want.view_as(call.q)).float()
    assert difference.norm() <= 4e-3 * want.float().norm()


@pytest.mark.parametrize("name", ["int8_token_head", "int8_token_head, unpacked"])
def test_a_graph_serves_other_lengths(name):
    other = variant(name, [100, 3, 0, 40, 200, 3, 1], [690, 5, 100, 64, 200, 4, 1], seed=5)
    assert_a_graph_serves(variant(name), other)


@pytest.mark.parametrize("exponent", [-60, 20, 40, 100])
@pytest.mark.parametrize("name", ["int8_token_head", "int8_token_head, unpacked", "int4_g4", "head_dim 64, unpacked"])
def test_queries_may_be_of_any_size(name, exponent):
    """Also where bf16 has no power of 2 that brings some rows into fp16, others beside them as they were."""
    call = variant(name)
    want = call.run()
    great = call.q.clone()
    great[:, 1:] *= 2.0**exponent
    scale = call.q.shape[-1] ** -0.5
    other = replace(call, q=great)
    assert torch.equal(other.run(softmax_scale=scale * 2.0**-exponent)[:, 1:], want[:, 1:])
    assert torch.equal(other.run(softmax_scale=scale)[:, :1], want[:, :1])


def test_many_launches_leave_the_counter_empty():
    call = variant("bf16")
    want = call.run()
    for _ in range(50):
        assert torch.equal(call.run(), want)


UNPACKING = ("int4_g4, unpacked", "int8_token_head, unpacked")


@pytest.mark.parametrize("name", UNPACKING)
def test_a_graph_that_unpacks_serves_other_lengths(name):
    other = variant(name, [100, 3, 0, 40, 200, 3, 1], [690, 5, 100, 64, 200, 4, 1], seed=5)
    assert_a_graph_serves(variant(name), other)


@pytest.mark.parametrize("name", UNPACKING)
def test_launches_that_unpack_run_on_two_streams(name):
    calls = [variant(name), variant(name, [200, 3], [3000, 900], seed=1)]
    wanted = [call.run() for call in calls]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(call.run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[i % 2]) for i, out in enumerate(found))


@pytest.mark.parametrize("name", ["int8_token_head", "int8_token_head, unpacked"])
def test_ends_and_lengths_that_cannot_be_do_no_harm(name):
    """Numbers on the device are not looked at: nothing may be written or read outside the tensors."""
    call = variant(name)
    call.seq_lens[0] = 2**30
    call.cu_seqlens_q[2] = -7
    call.cu_seqlens_q[-1] = 2**30
    call.options["block_table"][0] = -1
    call.run()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["int8_tensor", "e4m3_tensor", "e5m2", "int4_g1", "int4_g4"])
def test_unpacking_changes_no_bit_where_rows_have_no_fp32_scales(name):
    read, unpacked = variant(name), variant(f"{name}, unpacked")
    for num_splits in (1, 3):
        options = {"num_splits": num_splits, "return_lse": True}
        for mine, other in zip(read.run(**options), unpacked.run(**options), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", UNPACKING)
def test_the_last_cached_token_may_be_seen_by_no_query(name):
    """Of a window of 1 beside new tokens: its tile is loaded, and what nobody has written may be NaN."""
    call = variant(name, new=True, window_size=1)
    for _ in range(2):
        held = [torch.full((2**22,), torch.nan, device=CUDA) for _ in range(4)]
        del held
        check(call)


def test_the_memory_of_unpacked_keys_may_be_bounded():
    """By what the caller knows of lengths; the table has room for more."""
    call = variant("int8_token_head, unpacked", max_seq_len=20_000, num_splits=1)
    want = call.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # What is asked for: the allocator may have blocks at hand that are larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert torch.equal(call.run(max_seq_len=700), want)
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    bound = len(LENGTHS) * 2 * (768 * 2 * 128 * 2 + 6 * 16)  # requests, KV heads, K and V of 768 tokens
    assert most - before <= bound + call.q.numel() * 2 + 2**16


def test_every_configuration_that_can_be_tried_is_right():
    call = variant("int4_g1")
    config = choose(problem_of(check_call(*call.tensors, **call.keywords)))
    out = torch.full_like(call.q, torch.nan)
    tried = replace(config, pipeline=replace(config.pipeline, producer_warps=4))
    bind_config(tried, *call.tensors, out=out, **call.keywords)()
    assert_close(call, out)


@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (True, (40, 0))])
def test_flash_attention_s_ragged_calls_are_what_a_cpu_says(causal, window):
    q_lens, k_lens = (130, 0, 5, 300), (700, 20, 5, 333)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(total, heads, 128, generator=generator).bfloat16()
        for total, heads in ((sum(q_lens), 8), (sum(k_lens), 2), (sum(k_lens), 2))
    )
    ends = [torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (q_lens, k_lens)]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        queries, keys, values, cu_q, cu_k = tensors
        out = flash_attn_varlen_func(queries, keys, values, cu_q, cu_k, 300, 700, causal=causal, window_size=window)
        assert isinstance(out, torch.Tensor)
        return out.cpu()

    arguments = [q, k, v, *ends]
    want, out = call(*arguments), call(*(x.cuda() for x in arguments))
    difference = (out - want).float()
    assert not out.isnan().any() and difference.norm() <= 4e-3 * want.float().norm()


def test_caches_with_gaps():
    """K and V side by side in one tensor, as engines store them."""
    for name in ("bf16", "int8_token_head", "int4_g4"):
        call = variant(name)
        both = torch.stack((call.k_cache, call.v_cache), 1)
        k, v = both.unbind(1)
        assert not k.is_contiguous()
        apart = Call(call.q, k, v, call.seq_lens, call.cu_seqlens_q, call.kv_format, call.options)
        assert torch.equal(apart.run(), call.run())
