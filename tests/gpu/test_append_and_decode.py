"""append_and_decode on a GPU is the two calls, bit for bit where splits are given or both have the same schedule, and
attention never reads what is not written yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, append_kv
from cute_kernels.kv_cache import KVCache, Rope
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.runtime import arch_of, load_many
from tests.attention.cases import Call, assert_close
from tests.gpu.specs import needed_by, step_specs
from tests.kv_cache.cases import ALL_FORMATS, Shape
from tests.kv_cache.steps import (
    CACHE,
    Arguments,
    assert_same,
    make_step,
    poison_new,
    run,
    run_separately,
    two_launches,
    with_own_cache,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("step_kernels")]

CUDA = "cuda"
LLAMA = Rope(128, theta=500000.0)
EDGES = (4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 0, 1024, 1025)  # of tiles of any size
STEPS = 100


@dataclass(frozen=True)
class Case:
    shape: Shape
    lengths: tuple[int, ...] = EDGES
    q_len: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, device: str = CUDA, *, blank: bool = False, **changes: Any) -> Arguments:
        return make_step(self.shape.with_(**changes), self.lengths, self.q_len, device, blank=blank, **self.options)


def of_format(kv_format: str, place: str, q_len: int, layout: str = "NHD") -> Case:
    dtype = "fp16" if kv_format == "fp16" else "bf16"
    shape = Shape(kv_format, dtype, rope=LLAMA, num_q_heads=8, num_kv_heads=1, place=place, page_size=64)
    shape = shape.with_(layout=layout)
    return Case(shape, q_len=q_len)


K8V4 = ("int8_token_head", "int4_g4")
GROUPED = Shape("int4_g4", rope=LLAMA, num_q_heads=16, num_kv_heads=8, page_size=16)
HEADS_FIRST = GROUPED.with_(layout="HND", page_size=64)
OTHERS = {
    "one long request": Case(GROUPED, (5000,), 1, {"num_splits": 9}),
    "one token each": Case(GROUPED, (1,) * 40),
    "ragged, some of them long": Case(GROUPED.with_(place="table", page_size=64), (6000, *range(1, 60), 2000)),
    "heads first, ragged, two parts each": Case(
        HEADS_FIRST.with_(num_q_heads=8, num_kv_heads=1), tuple(range(7, 4007, 100)), 1
    ),
    "contiguous": Case(GROUPED.with_(place="contiguous"), (3000, 1, 700)),
    "heads first": Case(GROUPED.with_(layout="HND"), (300, 1, 700)),
    "heads first, one long request": Case(HEADS_FIRST, (5000,)),
    "heads first, one token each": Case(HEADS_FIRST, (1,) * 40),
    "heads first, more requests than SMs": Case(HEADS_FIRST, (65,) * 200),
    "heads first, other groups": Case(HEADS_FIRST.with_(num_q_heads=24, rope=Rope(128, interleaved=True)), (300, 1)),
    "heads first, no RoPE, a window": Case(HEADS_FIRST.with_(rope=None), (300, 64, 2000), 1, {"window_size": 99}),
    "heads first, fixed splits": Case(HEADS_FIRST, (300, 1, 700), 1, {"num_splits": 5}),
    "heads first, many queries of a head": Case(HEADS_FIRST.with_(num_q_heads=16, num_kv_heads=1), (900, 33)),
    "heads first, a pair": Case(HEADS_FIRST.with_(kv_format=K8V4)),
    "3 new tokens, heads first": Case(HEADS_FIRST.with_(kv_format=K8V4), (300, 64, 2000), 3, {"window_size": 99}),
    "heads first, rows of 64": Case(HEADS_FIRST.with_(head_dim=64, rope=Rope(64)), (300, 1, 700)),
    "heads first, rows of 256": Case(HEADS_FIRST.with_(kv_format="bf16", head_dim=256, rope=Rope(64)), (300, 1, 700)),
    "heads of a CTA": Case(GROUPED.with_(num_q_heads=40, page_size=64), (300, 1, 700)),
    "tokens first, 16 bits": Case(GROUPED.with_(kv_format="bf16", num_q_heads=40, page_size=64), (300, 1, 700)),
    "tokens first, 8 bits": Case(GROUPED.with_(kv_format="e4m3_tensor"), (6000, *range(1, 60), 2000)),
    "16 new tokens": Case(GROUPED.with_(num_q_heads=8), (16, 31, 700, 1024), 16),
    "bias, norms, positions": Case(GROUPED.with_(bias=True, norm=True, positions="int32"), (300, 1, 700)),
    "norms, heads first": Case(HEADS_FIRST.with_(norm=True), (300, 1, 700)),
    "norms and biases": Case(GROUPED.with_(kv_format="bf16", norm=True, bias=True), (300, 1, 700)),
    "heads first, biases, wide positions": Case(HEADS_FIRST.with_(bias=True, positions="int64"), (300, 1, 700)),
    "heads first, all terms": Case(
        HEADS_FIRST.with_(bias=True, norm=True, positions="int64", num_q_heads=32), (300, 1, 700, 64)
    ),
    "a pair of formats and head dims": Case(
        Shape(("e4m3_head", "int8_channel"), head_dim=192, v_head_dim=128, rope=Rope(64)), (300, 1, 700)
    ),
    "a window, a cap": Case(GROUPED, (300, 1, 700, 2000), 2, {"window_size": 100, "softcap": 20.0}),
    "a window of one tile": Case(GROUPED, (64, 65, 128, 129), 1, {"window_size": 3}),
    "fixed splits": Case(GROUPED, (300, 1, 700), 1, {"num_splits": 5}),
    "rows at words": Case(Shape("int4_g1", num_q_heads=8, num_kv_heads=1, place="contiguous", rope=LLAMA), (62, 2, 30)),
}
FEW = {"one request": Case(GROUPED, (5000,)), "two requests": Case(GROUPED, (5000, 300))}
"""Attention by itself takes fewer heads a CTA for these (`candidates.FEW_REQUESTS`), so its last bits are others."""
RAGGED = Case(HEADS_FIRST.with_(page_size=16), (6000, *range(1, 60), 2000))
"""Long parts are recentred as often as tiles have gone round the ring; attention alone may have asked for one more."""
RAGGED_PAIR = replace(RAGGED, shape=HEADS_FIRST.with_(kv_format=K8V4))
RACES = ("bf16", "int4_g1", "e4m3_tensor", "int8_token_head")
RACE = {name: Case(Shape(name, rope=LLAMA, num_q_heads=8, num_kv_heads=1, page_size=64), (400,) * 16) for name in RACES}
RACE |= {f"{name}, heads first": replace(case, shape=case.shape.with_(layout="HND")) for name, case in RACE.items()}


def cases() -> list[Case]:
    found = [of_format(name, place, q_len) for name in ALL_FORMATS for place in PLACES for q_len in (1, 4)]
    found += [of_format(name, place, 1, "HND") for name in ALL_FORMATS for place in PLACES]
    return [*found, *OTHERS.values(), *FEW.values(), *RACE.values(), RAGGED, RAGGED_PAIR]


PLACES = ("table", "contiguous")


def specs():
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    steps = [case.step("cpu", blank=True) for case in cases()]
    found = [spec for step in steps for fused in (True, False) for spec in step_specs(step, fused)]
    with two_launches():
        found += [spec for case in BOTH.values() for spec in step_specs(case.step("cpu", blank=True), True)]
    # What fills the caches first is the kernel that leads attention, without leading.
    leading = [spec.config for spec in found if isinstance(spec, AppendSpec) and spec.config.leads]
    found += [AppendSpec(replace(config, leads=False)) for config in leading]
    return list(dict.fromkeys([*found, *needed_by(lambda: decode_in_a_cache("cpu", fused=True))]))


TOKENS_FIRST = ("one long request", "one token each", "ragged, some of them long", "fixed splits", "heads of a CTA")
BOTH = {"ragged": RAGGED, "ragged pair": RAGGED_PAIR} | {name: OTHERS[name] for name in TOKENS_FIRST}
BOTH |= {name: case for name, case in OTHERS.items() if name.startswith(("heads first, ", "tokens first, "))}


@pytest.fixture(scope="module")
def step_kernels() -> None:
    load_many(specs(), arch_of())


def check(case: Case) -> None:
    """One call and two give the same output and the same caches; what the append has not written yet is poison."""
    step = case.step()
    poison_new(step)
    other = with_own_cache(step)
    out, lse = run(step)
    want, want_lse = run_separately(other)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)
    assert not out[step["seq_lens"] == 0].any()


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_a_step_is_its_two_calls(kv_format, place, q_len):
    check(of_format(kv_format, place, q_len))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_a_step_over_heads_first_is_its_two_calls(kv_format, place):
    check(of_format(kv_format, place, 1, "HND"))


@pytest.mark.parametrize("name", BOTH)
def test_one_launch_is_two_to_the_bit(name):
    step = BOTH[name].step()
    poison_new(step)
    other = with_own_cache(step)
    out, lse = run(step)
    with two_launches():
        want, want_lse = run(other)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_the_shapes_and_options(name):
    check(OTHERS[name])


@pytest.mark.parametrize("name", FEW)
def test_a_step_of_few_requests_leaves_the_caches_of_its_two_calls_and_is_attention_in_fp64(name):
    step = FEW[name].step()
    poison_new(step)
    other = with_own_cache(step)
    run(step)
    run_separately(other)
    assert_same(step, other)
    check_against_fp64(FEW[name])


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "e4m3_tensor", "int8_channel"])
def test_a_step_is_attention_in_fp64_over_the_cache_that_it_leaves(kv_format, q_len):
    check_against_fp64(of_format(kv_format, "table", q_len))


@pytest.mark.parametrize("name", ["ragged, some of them long", "heads first, ragged, two parts each"])
def test_requests_that_one_wave_takes_are_attention_in_fp64(name):
    check_against_fp64(OTHERS[name])


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor", "int8_channel"])
def test_a_query_with_an_infinite_number_is_nan_and_leaves_the_others_alone(kv_format, q_len):
    step = of_format(kv_format, "table", q_len).step()
    want, _ = run(step)
    step["q"][0, 0, 3, 17], step["q"][-1, -1, 5, 100] = torch.inf, -torch.inf
    spoilt = ~step["q"].isfinite().all(-1)
    found, _ = run(step)  # appends what is there
    assert found[spoilt].isnan().all() and torch.equal(found[~spoilt], want[~spoilt])


def check_against_fp64(case: Case) -> None:
    step, kv_format, q_len = case.step(), case.shape.kv_format, case.q_len
    out, lse = run(step)
    given = {name: step[name].flatten(0, 1) for name in ("q", "k", "v")}
    given |= {name: step[name].clone() for name in ("k_cache", "v_cache")}
    given |= {name: step[name] for name in CACHE if name not in given}
    if q_len > 1:
        given["cu_seqlens"] = q_len * torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=CUDA)
    turned = append_kv(**given, rope=step["rope"])
    assert turned is not None
    options = {
        name: step[name] for name in ("block_table", "cache_layout", "k_scale", "v_scale") if step[name] is not None
    }
    tensors = (turned.view(step["q"].shape), step["k_cache"], step["v_cache"], step["seq_lens"])
    # Scales of channels are folded into the queries, whose 11 bits the LSE of a single token shows.
    assert_close(Call(*tensors, kv_format, options), out, None if kv_format == "int8_channel" else lse)


def test_requests_of_fewer_tokens_than_are_new():
    """Their first tokens have no place, and their queries see nothing."""
    step = of_format("int4_g4", "table", 4).step()
    step["seq_lens"][:4] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    poison_new(step)
    other = with_own_cache(step)
    out, _ = run(step)
    want, _ = run_separately(other)
    assert torch.equal(out, want)
    assert_same(step, other)
    assert not out[0, :3].any() and out[0, 3].any()


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", RACE)
def test_every_step_sees_its_own_tokens(kv_format):
    """Back to back, without a pause in which a late write would catch up."""
    step = RACE[kv_format].step()
    other = with_own_cache(step)
    numbers = [
        {name: torch.randn_like(step[name]) for name in ("q", "k", "v")}
        | {"seq_lens": torch.full_like(step["seq_lens"], 1 + 4 * i)}
        for i in range(STEPS)
    ]
    outs = [run(step | given)[0] for given in numbers]
    wants = [run_separately(other | given)[0] for given in numbers]
    wrong = [i for i, (out, want) in enumerate(zip(outs, wants, strict=True)) if not torch.equal(out, want)]
    assert not wrong
    assert_same(step, other)


@pytest.mark.parametrize("kv_format", RACE)
def test_what_comes_after_sees_the_append_and_what_came_before_is_seen(kv_format):
    """Writes of the kernel before the step, and a read of the caches directly after it."""
    step = RACE[kv_format].step()
    other = with_own_cache(step)
    run_separately(other)
    for _ in range(20):
        poison_new(step)
        step["k_cache"].view(torch.uint8)[:, 0] = 1
        other["k_cache"].view(torch.uint8)[:, 0] = 1
        out = append_and_decode(**step)
        caches = [step[name].clone() for name in ("k_cache", "v_cache")]
        want, _ = run_separately(other)
        assert torch.equal(out, want)
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
            assert torch.equal(cache.view(torch.uint8), other[name].view(torch.uint8))


@pytest.mark.parametrize("kv_format", RACE)
def test_one_captured_graph_serves_changing_lengths(kv_format):
    step = RACE[kv_format].step()
    other = with_own_cache(step)
    append_and_decode(**step)
    run_separately(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [append_and_decode(**step) for _ in range(3)]  # layers that share a cache
    for i in range(30):
        for given in (step, other):
            given["seq_lens"].copy_(torch.arange(16, device=CUDA) * (i % 7) + i)
        for name in ("q", "k", "v"):
            step[name].normal_()
        graph.replay()
        want, _ = run_separately(other | {name: step[name] for name in ("q", "k", "v")})
        assert all(torch.equal(out, want) for out in outs), i
        assert_same(step, other)


def decode_in_a_cache(device: str, *, fused: bool) -> list[torch.Tensor]:
    """Steps of three sequences and a row of padding, with pages that fill up, in two layers."""
    cache = KVCache(2, 64, 16, 2, 128, kv_format="int4_g4", device=device, max_seq_len=160)
    for name, length in zip("abc", (1, 15, 16), strict=True):
        cache.allocate(name, length)
    batch = cache.make_batch(4)
    generator = torch.Generator().manual_seed(0)
    outs = []
    for _ in range(4):
        cache.extend_all("abc")
        batch.update("abc", pad_to=4)
        for layer in range(2):
            q, k, v = (torch.randn(4, 1, h, 128, generator=generator).bfloat16().to(device) for h in (8, 2, 2))
            if fused:
                outs.append(cache.append_and_attend(layer, batch, q, k, v, rope=LLAMA))
            else:
                turned = cache.append(layer, batch, k[:, 0], v[:, 0], q=q[:, 0], rope=LLAMA)
                assert turned is not None
                outs.append(cache.attend(layer, batch, turned[:, None]))
    return outs


def test_a_cache_takes_steps():
    for out, want in zip(decode_in_a_cache(CUDA, fused=True), decode_in_a_cache(CUDA, fused=False), strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize(("name", "launches"), [("int4_g1", 1), ("int4_g1, heads first", 1), ("two tokens", 2)])
def test_a_step_is_as_few_launches_as_can_be(name, launches):
    from torch.profiler import ProfilerActivity, profile

    step = OTHERS["a window, a cap"].step() if name == "two tokens" else RACE[name].step()
    append_and_decode(**step)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        append_and_decode(**step)
        torch.cuda.synchronize()
    kernels = [event for event in (profiler.events() or []) if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("profiling is not allowed here")
    assert len(kernels) == launches, [event.name for event in kernels]
