"""Cache transforms on a GPU: what is appended are rows of k' and v', and attention over them is attention over k and v.

The yardstick is fp64: of the cache as the GPU has left it, what it stands for before the transform, and queries that
nothing has transformed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels import append_and_decode, append_kv, decode_attention, merge_states
from cute_kernels.kv_cache import CacheTransform, Rope, step_ops
from cute_kernels.kv_cache import reference as append_reference
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.plan import config_of
from cute_kernels.kv_cache.step_config import StepConfig
from cute_kernels.runtime import arch_of, load_many
from tests.gpu.specs import step_specs
from tests.kv_cache.cases import assert_appended, clone_caches, make_call
from tests.kv_cache.steps import Arguments, assert_same, poison_new, two_launches, with_own_cache
from tests.kv_cache.transformed import make_transform, with_transform
from tests.kv_cache.transformed_steps import BASE, BOTH, CASES, FORMATS, Case, assert_near, calls_of, expected

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transform_kernels")]

CUDA = "cuda"
APART = ("int4_g4", "one token", "a cap", "sinks", "sinks, a cap, a window", "4 new tokens, a cap", "contiguous")
HEADS_FIRST = BASE.with_(layout="HND", page_size=64)
ALONE = {name: Case(HEADS_FIRST.with_(kv_format=name), BOTH) for name in FORMATS if name != "fp16"}
ALONE |= {
    "a center": Case(HEADS_FIRST, {"parts": "center"}),
    "factors": Case(HEADS_FIRST, {"parts": "factor v_factor"}),
    "V's factors": Case(HEADS_FIRST, {"parts": "v_factor"}),
    "rotations": Case(HEADS_FIRST, {"parts": "", "k_rotation": 128, "v_rotation": 128}),
    "fp16": Case(HEADS_FIRST.with_(dtype="fp16"), BOTH),
    "no rope": Case(HEADS_FIRST.with_(rope=None), BOTH),
    "pairs side by side": Case(HEADS_FIRST.with_(rope=Rope(128, interleaved=True)), BOTH),
    "contiguous": Case(HEADS_FIRST.with_(place="contiguous"), BOTH),
    "rows of 64, splits": Case(HEADS_FIRST.with_(head_dim=64, rope=Rope(64)), {"v_rotation": 64}, (3000, 70, 1), 1,
                               {"num_splits": 5}),
    "rows of 256": Case(HEADS_FIRST.with_(kv_format="bf16", head_dim=256, rope=Rope(64)),
                        {"k_rotation": 64, "v_rotation": 256}),
    "a window": Case(HEADS_FIRST, BOTH, options={"window_size": 100}),
    "many queries of a head": Case(HEADS_FIRST.with_(num_q_heads=16, num_kv_heads=1), BOTH),
    "heads of a CTA": Case(BASE.with_(num_q_heads=32, num_kv_heads=8, page_size=64), BOTH),
    "tokens first": Case(BASE.with_(kv_format="bf16", num_q_heads=32, num_kv_heads=8), BOTH),
    "more requests than SMs": Case(HEADS_FIRST.with_(num_q_heads=8, num_kv_heads=2), BOTH, (65,) * 140),
    "a pair of formats": Case(HEADS_FIRST.with_(kv_format=("int8_token_head", "int4_g4")), BOTH),
}  # fmt: skip
"""Steps whose rows attention writes itself; nobody sees what a center takes off their scores."""
APPENDS = {
    "decode": {"new": (1,) * 9},
    "prefill": {"new": (3, 0, 50, 17)},
    "slots": {"place": "slots", "positions": "int32"},
}


def specs():
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    steps = {name: case.step("cpu", blank=True) for name, case in CASES.items()}
    found = [spec for step in steps.values() for spec in step_specs(step, fused=True)]
    for name in APART:
        step = CASES[name].of_keys().step("cpu", blank=True)
        found += [spec for fused in (True, False) for spec in step_specs(step, fused)]
    plain = steps["int4_g4"] | {"transform": None}
    found += [spec for lse in (True, False) for spec in step_specs(plain | {"return_lse": lse}, fused=False)]
    found += step_specs(plain, fused=True)
    alone = [unseen(case, "cpu", blank=True) for case in ALONE.values()]
    found += [spec for step in alone for spec in step_specs(step, fused=True)]
    with two_launches():
        found += [spec for step in alone for spec in step_specs(step, fused=True)]
    leading = [spec.config for spec in found if isinstance(spec, AppendSpec) and spec.config.leads]
    apart = [replace(config, leads=False) for config in leading]
    many = [config_of(many_tokens("cpu"))]
    decode = (config.for_decode() for config in apart)
    return list(dict.fromkeys([*found, *(AppendSpec(config) for config in (*apart, *decode, *many))]))


def unseen(case: Case, device: str, *, blank: bool = False) -> Arguments:
    """A step that does not ask for the log-sum-exp, with as many splits in one launch as in two."""
    return {"num_splits": 2} | case.step(device, blank=blank) | {"return_lse": False}


def many_tokens(device: str) -> AppendCall:
    """So many that their CTAs are several waves."""
    case = CASES["int4_g4"]
    return with_transform(make_call(case.shape.with_(new=(1,) * 515), device), case.transform(device))


@pytest.fixture(scope="module")
def transform_kernels() -> None:
    load_many(specs(), arch_of())


# -- append ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", APPENDS)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_transformed_keys_and_values(case, name):
    """Bit for bit where nothing but the transform is computed; q comes out transformed, and its shifts."""
    given = CASES[case]
    check_rows(with_transform(make_call(given.shape.with_(**APPENDS[name]), CUDA), given.transform(CUDA)))


def test_rows_of_many_tokens():
    check_rows(many_tokens(CUDA))


def check_rows(call: AppendCall) -> None:
    """`append_kv` writes what the reference does."""
    before = clone_caches(call)
    fields = call._asdict()
    fields["kv_format"] = (fields.pop("k_format"), fields.pop("v_format"))
    fields["qkv_bias"] = tuple(fields.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
    q_out = append_kv(**fields)
    assert_appended(call, before, q_out)
    if call.q_shift is not None:
        plain = call._replace(transform=None, q_shift=None)
        q, _, _ = append_reference.transform(plain, append_reference.places(plain)[0], torch.float64)
        want = append_reference.shifts(call, q)
        assert (call.q_shift - want).abs().max() <= 1e-5 * want.abs().max()


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_attention_over_the_keys_and_values_before_the_transform(case):
    step = CASES[case].step(CUDA)
    out, lse = append_and_decode(**step)
    assert_near(out, lse, *expected(step))


@pytest.mark.parametrize("case", ALONE)
def test_a_step_in_one_launch_is_attention_before_the_transform_and_two_launches_to_the_bit(case):
    step = unseen(ALONE[case], CUDA)
    poison_new(step)
    other = with_own_cache(step)
    step_ops.launch.plans.clear()
    out = append_and_decode(**step)
    (plan,) = step_ops.launch.plans.values()
    assert isinstance(plan.products[0], StepConfig)
    with two_launches():
        assert torch.equal(append_and_decode(**other), out)
    assert_same(step, other)
    assert_near(out, None, *expected(step))


@pytest.mark.parametrize("case", APART)
def test_a_step_is_its_two_calls(case):
    """Bit for bit where V has no part: append_kv that hands on q' and its shifts, then attention."""
    step: Arguments = CASES[case].step(CUDA)
    step["transform"] = CASES[case].of_keys().transform(CUDA)
    other = with_own_cache(step)
    out, lse = append_and_decode(**step)
    append, attention = calls_of(other)
    fields = append._asdict() | {"q_shift": torch.empty(append.q.shape[:2], device=CUDA)}
    fields["kv_format"] = (fields.pop("k_format"), fields.pop("v_format"))
    fields["qkv_bias"] = tuple(fields.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
    turned = append_kv(**fields)
    assert turned is not None
    names = ("k_cache", "v_cache", "seq_lens", "kv_format", "block_table", "cache_layout", "k_scale", "v_scale",
             "softcap", "window_size", "sinks", "num_splits")  # fmt: skip
    options = {name: other[name] for name in names if name in other}
    shape = attention.q.shape
    shift = fields["q_shift"].view(shape[:3])
    want, want_lse = decode_attention(turned.view(shape), **options, q_shift=shift, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)


@pytest.mark.parametrize("case", ["int4_g4", "a cap", "sinks"])
def test_attention_alone_takes_queries_that_nothing_has_transformed(case):
    step = CASES[case].step(CUDA)
    append_and_decode(**step)
    append, attention = calls_of(step)
    plain = append._replace(transform=None, q_shift=None)
    q, _, _ = append_reference.transform(plain, append_reference.places(plain)[0], torch.float64)
    assert q is not None
    names = ("k_cache", "v_cache", "seq_lens", "kv_format", "block_table", "softcap", "sinks", "transform")
    options = {name: step[name] for name in names if name in step}
    q = q.view(attention.q.shape).to(step["q"].dtype)
    out, lse = decode_attention(q, **options, return_lse=True)
    assert_near(out, lse, *expected(step))
    given = torch.empty_like(out)
    assert decode_attention(q, **options, out=given) is given
    assert_near(given, None, *expected(step))


def test_parts_of_a_context_with_other_centers_merge():
    """Their log-sum-exps are of the scores as they are without any center."""
    parts = []
    for seed in (1, 2):
        step = CASES["int4_g4"].step(CUDA)
        step["transform"] = make_transform(2, 128, device=CUDA, k_rotation=64, parts="center", seed=seed)
        step["seq_lens"] = step["seq_lens"].clamp(min=4)
        parts.append((append_and_decode(**step), expected(step)))
    (one, want_one), (two, want_two) = parts
    out, lse = merge_states(one[0], one[1], two[0], two[1])
    total = torch.logaddexp(want_one[1], want_two[1])
    of_one, of_two = (w[0] * torch.exp(w[1] - total)[..., None] for w in (want_one, want_two))
    assert_near(out, lse, of_one + of_two, total)


def test_a_captured_graph_and_other_layers_use_their_own_constants():
    """One plan serves every layer whose transform is of the same kind."""
    case = CASES["int4_g4"]
    steps: list[Arguments] = [case.step(CUDA) for _ in range(2)]
    for seed, step in enumerate(steps):
        step["transform"] = make_transform(2, 128, device=CUDA, seed=seed, **BOTH)
    for step in steps:
        append_and_decode(**with_own_cache(step))  # warm
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in steps:
            results.append(append_and_decode(**step))
    graph.replay()
    for step, (out, lse) in zip(steps, results, strict=True):
        assert_near(out, lse, *expected(step))
    assert not torch.equal(results[0][0], results[1][0])


def test_the_identity_is_no_transform_at_all():
    step = CASES["int4_g4"].step(CUDA)
    other: Arguments = {**with_own_cache(step), "transform": None}
    identity: Arguments = {**step, "transform": CacheTransform()}
    out, lse = append_and_decode(**identity)
    want, want_lse = append_and_decode(**other)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert_same(step, other)
