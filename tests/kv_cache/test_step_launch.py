"""What a step on a GPU launches, whatever was launched before: attention that appends as well, or an append that leads
and attention after it.

With compiled functions that launch nothing (`tests.host_functions`), so that no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.launches import even_bounds
from cute_kernels.kv_cache import Rope, step_ops, step_plan
from cute_kernels.kv_cache.arguments import CONSTANTS
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.step_compile import StepSpec, step_arguments
from cute_kernels.runtime import native
from tests.kv_cache.cases import Shape
from tests.kv_cache.steps import Arguments, make_step
from tests.kv_cache.transformed import make_transform
from tests.launchers import assert_launched_alike_after_any_other, outcome, recording
from tests.observed import calls_of
from tests.tensors import apart, fused, offset, padded, side_by_side

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

PLAIN = Shape("int4_g4", rope=Rope(64), head_dim=64)
TURNED = make_transform(2, 64, k_rotation=64, parts="center")
SCALED = make_transform(2, 64, parts="factor")
OF_BOTH = make_transform(2, 64, k_rotation=64, v_rotation=64)


def function_of(spec: AppendSpec | AttentionSpec | StepSpec) -> Any:
    from tests.host_functions import append_function, attention_function, step_function

    if isinstance(spec, StepSpec):
        return step_function(spec.config)
    return append_function(spec.config) if isinstance(spec, AppendSpec) else attention_function(spec.config)


@pytest.fixture
def launches():
    with recording(function_of) as recorded:
        yield recorded.launches


def of(
    lengths: tuple[int, ...] = (8, 9), q_len: int = 1, options: Arguments | None = None, **changes: Any
) -> Arguments:
    return make_step(PLAIN.with_(**changes), lengths, q_len, **(options or {}))


def but(change: Callable[[Arguments], Arguments], *of_what: Any, **changes: Any) -> Arguments:
    step = of(*of_what, **changes)
    return step | change(step)


CALLS: dict[str, Callable[[], Arguments]] = {
    "plain": of,
    "another rope": lambda: of(rope=Rope(64, theta=1e6)),
    "no rope": lambda: of(rope=None),
    "more requests": lambda: of((8, 9, 10)),
    "3 tokens": lambda: of(q_len=3),
    "3 tokens, seen by all": lambda: of(q_len=3, options={"causal": False}),
    "as many queries in other heads": lambda: but(lambda s: {"q": s["q"].reshape(2, 1, 6, 64)}, num_q_heads=6),
    "more q heads": lambda: of(num_q_heads=8),
    "fewer k heads": lambda: but(lambda s: {"k": s["k"][:, :, :1]}),
    "keys of other shapes": lambda: but(lambda s: {"k": s["k"].reshape(2, 1, 1, 128)}),
    "columns apart": lambda: but(lambda s: {"v": apart(s["v"])}),
    "contiguous": lambda: of(place="contiguous"),
    "heads first": lambda: of(layout="HND"),
    "heads first, another rope": lambda: of(layout="HND", rope=Rope(64, theta=1e6)),
    "heads first, no rope": lambda: of(layout="HND", rope=None),
    "heads first, q at words": lambda: but(lambda s: {"q": offset(s["q"], 8)}, layout="HND", rope=None, head_dim=96),
    "heads first, contiguous": lambda: of(layout="HND", place="contiguous"),
    "heads first, 3 tokens": lambda: of(q_len=3, layout="HND"),
    "heads first, bias": lambda: of(layout="HND", bias=True),
    "heads first, norm": lambda: of(layout="HND", norm=True),
    "heads first, positions": lambda: of(layout="HND", positions="int32"),
    "heads first, wide positions": lambda: of(layout="HND", positions="int64"),
    "heads first, fewer k heads": lambda: but(lambda s: {"k": s["k"][:, :, :1]}, layout="HND"),
    "heads first, columns of v apart": lambda: but(lambda s: {"v": apart(s["v"])}, layout="HND"),
    "heads first, int8": lambda: of(kv_format="int8_tensor", layout="HND"),
    "heads first, rows at words": lambda: but(
        lambda s: {name: padded(s[name], 4) for name in ("k_cache", "v_cache")}, layout="HND"
    ),
    "heads first, a transform": lambda: of(layout="HND") | {"transform": TURNED},
    "heads first, V transformed": lambda: of(layout="HND") | {"transform": OF_BOTH},
    "heads first, a transform, lse": lambda: of(layout="HND") | {"transform": TURNED, "return_lse": True},
    "heads first, no center, lse": lambda: of(layout="HND") | {"transform": SCALED, "return_lse": True},
    "heads first, a transform, a cap": lambda: of(layout="HND", options={"softcap": 9.0}) | {"transform": TURNED},
    "heads first, lse": lambda: of(layout="HND") | {"return_lse": True},
    "heads first, out": lambda: but(lambda s: {"out": torch.empty_like(s["q"].contiguous())}, layout="HND"),
    "heads first, splits": lambda: of(layout="HND") | {"num_splits": 3},
    "heads first, window": lambda: of(layout="HND", options={"window_size": 5}),
    "int8": lambda: of(kv_format="int8_tensor"),
    "e4m3 of as many bytes": lambda: of(kv_format="e4m3_tensor"),
    "int8, signed": lambda: but(lambda s: {"k_cache": s["k_cache"].view(torch.int8)}, kv_format="int8_tensor"),
    "no scale": lambda: of(kv_format="int8_tensor") | {"k_scale": None},
    "caches with gaps": lambda: but(lambda s: {name: apart(s[name]) for name in ("k_cache", "v_cache")}),
    "blocks apart": lambda: but(lambda s: {name: padded(s[name], 16) for name in ("k_cache", "v_cache")}),
    "blocks far apart": lambda: but(lambda s: {name: padded(s[name], 4096) for name in ("k_cache", "v_cache")}),
    "blocks apart by words": lambda: but(lambda s: {"k_cache": padded(s["k_cache"], 4)}),
    "K and V side by side": lambda: but(
        lambda s: dict(zip(("k_cache", "v_cache"), side_by_side(s["k_cache"], s["v_cache"], 1), strict=True))
    ),
    "a wider table": lambda: but(lambda s: {"block_table": apart(s["block_table"])}),
    "out with requests apart": lambda: but(lambda s: {"out": fused(s["q"].contiguous())}),
    "a table with gaps": lambda: but(lambda s: {"block_table": s["block_table"].repeat(1, 2)[:, ::2]}),
    "more lengths": lambda: but(lambda s: {"seq_lens": s["seq_lens"].repeat(2)}),
    "lengths of 64 bits": lambda: but(lambda s: {"seq_lens": s["seq_lens"].long()}),
    "positions": lambda: of(positions="int32"),
    "wide positions": lambda: of(positions="int64"),
    "bias": lambda: of(bias=True),
    "norm": lambda: of(norm=True),
    "a negative eps": lambda: of() | {"norm_eps": -1.0},
    "out": lambda: but(lambda s: {"out": torch.empty_like(s["q"].contiguous())}),
    "out of floats": lambda: but(lambda s: {"out": s["q"].float()}),
    "out with gaps": lambda: but(lambda s: {"out": apart(s["q"])}),
    "lse": lambda: of() | {"return_lse": True},
    "splits": lambda: of() | {"num_splits": 3},
    "no splits": lambda: of() | {"num_splits": 0},
    "window": lambda: of(options={"window_size": 5}),
    "sinks": lambda: of(options={"sinks": torch.zeros(4)}),
    "a scale": lambda: of() | {"softmax_scale": 0.5},
    "a transform": lambda: of() | {"transform": TURNED},
    "a transform, lse": lambda: of() | {"transform": TURNED, "return_lse": True},
    "a transform without a center, lse": lambda: (
        of() | {"transform": make_transform(2, 64, parts="factor"), "return_lse": True}
    ),
    "a transform, a cap": lambda: of(options={"softcap": 20.0}) | {"transform": TURNED},
    "a transform, sinks, 3 tokens": lambda: of(q_len=3, options={"sinks": torch.zeros(4)}) | {"transform": TURNED},
    "a transform of other heads": lambda: of() | {"transform": make_transform(1, 64)},
    "a transform in words": lambda: of() | {"transform": "hadamard"},
    "a negative scale": lambda: of() | {"softmax_scale": -0.5},
}

ALONE = [
    *("heads first", "heads first, another rope", "heads first, no rope", "heads first, contiguous"),
    *("heads first, int8", "heads first, lse", "heads first, out", "heads first, splits", "heads first, window"),
    *("heads first, a transform", "heads first, V transformed", "heads first, no center, lse"),
    *("heads first, bias", "heads first, norm", "heads first, positions", "heads first, wide positions"),
    *("plain", "another rope", "no rope", "more requests", "as many queries in other heads", "more q heads"),
    *("int8", "e4m3 of as many bytes", "int8, signed", "caches with gaps", "blocks apart", "blocks far apart"),
    *("K and V side by side", "a wider table", "a table with gaps", "out", "lse", "splits", "window", "sinks"),
    *("a scale", "a transform", "a transform without a center, lse", "positions", "wide positions", "bias", "norm"),
]
IN_TWO = [
    *("heads first, 3 tokens", "heads first, rows at words"),
    *("heads first, a transform, lse", "heads first, a transform, a cap", "heads first, q at words"),
    *("contiguous", "3 tokens", "blocks apart by words", "a transform, a cap"),
]

made = functools.cache(lambda name: CALLS[name]())


def outcome_of(launches: list[Any], step: Arguments) -> Any:
    return outcome(launches, lambda: append_and_decode(**step), step)


def test_a_step_launches_the_same_after_any_other(launches):
    """All its kernels or, if it is refused, none."""
    plans = step_ops.launch.plans
    want = assert_launched_alike_after_any_other(CALLS, lambda call: outcome_of(launches, made(call)), plans)
    launched = {name: len(outcome) for name, outcome in want.items()}  # a refusal is an error and its message
    assert launched == {name: 1 if name in ALONE else 2 for name in CALLS}


@pytest.mark.parametrize("name", ["3 tokens", "3 tokens, seen by all", "contiguous"])
def test_attention_follows_the_append_and_takes_its_queries(name, launches):
    step = made(name)
    launches.clear()
    result = append_and_decode(**step)
    append, attention = launches
    assert append.symbol.endswith("_leads") and attention.symbol.endswith("_after_append")
    batch, q_len, heads, head_dim = step["q"].shape
    turned, queries = append.arguments[3], attention.arguments[0]
    assert turned.shape == (batch * q_len, heads, head_dim) and queries.shape == step["q"].shape
    assert turned.data_ptr() == queries.data_ptr() != step["q"].data_ptr()
    assert queries.is_contiguous() and attention.arguments[4].data_ptr() == result.data_ptr()
    assert [x.data_ptr() for x in append.arguments[:3]] == [step[name].data_ptr() for name in ("q", "k", "v")]


@pytest.mark.parametrize("name", ALONE)
def test_a_step_in_one_launch_is_given_its_own_tensors(name, launches):
    step = made(name)
    launches.clear()
    result = append_and_decode(**step)
    (alone,) = launches
    given = dict(zip(step_arguments(alone_config(name)).names, alone.arguments, strict=False))
    result = result[0] if isinstance(result, tuple) else result
    assert given["out"].data_ptr() == result.data_ptr()
    for part in ("q", "k", "v", "k_cache", "v_cache", "seq_lens"):
        assert given[part].data_ptr() == step[part].data_ptr(), part
    assert given["k"].shape == step["k"][:, 0].shape and given["q"].shape == step["q"].shape
    assert (given["phase_steps"] == 0) == (step["rope"] is None)
    extras = {name: step[name] for name in ("position_ids", "q_norm", "k_norm")}
    extras |= dict(zip(("q_bias", "k_bias", "v_bias"), step["qkv_bias"], strict=True))
    for part, tensor in extras.items():
        assert given.get(part, 0) == (0 if tensor is None else tensor.data_ptr()), part
    transform = step.get("transform")
    if transform is not None:
        assert tuple(given[part] for part in CONSTANTS) == transform.addresses != (0,) * 4
        if transform.out_factor is not None:
            assert given["out_factor"] == transform.out_factor.data_ptr()


def alone_config(name: str) -> Any:
    found = step_plan.chosen(*step_calls(name))
    assert found is not None
    return found[0]


def step_calls(name: str) -> Any:
    with calls_of(step_ops.make_calls) as calls:
        step_ops.launch.plans.clear()
        append_and_decode(**made(name))
    return step_ops.make_calls(calls[0].arguments["step"])


@pytest.mark.parametrize("name", IN_TWO)
def test_what_one_launch_does_not_serve_takes_two(name, launches):
    step = made(name)
    launches.clear()
    append_and_decode(**step)
    assert len(launches) == 2


@pytest.mark.parametrize("name", ["plain", "3 tokens", "lse", "out", "int8", "bias", "heads first"])
def test_a_repeated_step_is_not_checked_again_and_needs_no_plan(name, launches):
    step = made(name)
    want = outcome_of(launches, step)
    with calls_of(step_ops.make_calls, step_ops.make_plan) as repeated:
        assert outcome_of(launches, step) == want
    assert not repeated


def test_a_step_that_is_captured_first_keeps_nothing_of_the_graph():
    """The bounds of its requests are made in each capture that lacks them, else once, for all plans and for ever."""
    captures = iter((True, True, True, False))
    with recording(function_of, is_capturing=lambda: next(captures)):
        counts = []
        for _ in range(4):
            with calls_of(torch.arange) as made_bounds:
                append_and_decode(**made("3 tokens"))
            counts.append(len(made_bounds))
        step_ops.launch.plans.clear()
        kept = even_bounds(2, 3, torch.device("cpu"))
        append_and_decode(**made("3 tokens"))
        assert even_bounds(2, 3, torch.device("cpu")) is kept and kept.tolist() == [0, 3, 6]
    assert counts == [2, 1, 1, 0], "the first for its checks, too"


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(("head_dim", "restores"), [(64, True), (256, False)])
def test_what_the_kernel_restores_is_not_restored_once_more(head_dim, restores, q_len, launches):
    """V's transform is undone by attention where it can, else by operations behind it: once in either case."""
    transform = make_transform(2, head_dim, k_rotation=64, v_rotation=head_dim)
    given: dict[str, Any] = of(q_len=q_len, head_dim=head_dim, layout="HND") | {"transform": transform}
    launches.clear()
    append_and_decode(**given)
    assert len(launches) == (1 if q_len == 1 else 2)
    (plan,) = step_ops.launch.plans.values()
    config = plan.products[-1]
    assert getattr(config, "attention", config).features.restores == restores
    with calls_of(step_ops.restore) as done:
        append_and_decode(**given)
    assert len(done) == (not restores)
