"""append_and_decode and decode_attention over transformed caches on a CPU: the reference, checks and the operators."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from cute_kernels import append_and_decode, decode_attention
from cute_kernels.kv_cache import CacheTransform
from cute_kernels.kv_cache import reference as append_reference
from tests.kv_cache.steps import Arguments, with_own_cache
from tests.kv_cache.transformed import make_transform
from tests.kv_cache.transformed_steps import CASES as ANY_LENGTH
from tests.kv_cache.transformed_steps import assert_near, calls_of, expected

CAPPED = "sinks, a cap, a window"
# The reference goes through long contexts as through short ones; kernels, which do not, have them in tests/gpu.
CASES = {
    name: replace(case, lengths=tuple(min(length, 150) for length in case.lengths)) for name, case in ANY_LENGTH.items()
}


def turned_query(step: Arguments) -> tuple[torch.Tensor, Arguments]:
    """q after RoPE in its dtype, and the options of attention alone."""
    append, attention = calls_of(step)
    plain = append._replace(transform=None, q_shift=None)
    q, _, _ = append_reference.transform(plain, append_reference.places(plain)[0], torch.float64)
    assert q is not None
    names = ("k_cache", "v_cache", "seq_lens", "kv_format", "block_table", "softcap", "sinks", "window_size")
    return q.view(attention.q.shape).to(step["q"].dtype), {name: step[name] for name in names if name in step}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_attention_over_the_keys_and_values_before_the_transform(name):
    step = CASES[name].step("cpu")
    out, lse = append_and_decode(**step)
    assert_near(out, lse, *expected(step))


@pytest.mark.parametrize("name", ["int4_g4", "4 new tokens, a cap", CAPPED, "head_dim 256"])
def test_a_compiled_step_is_the_same(name):
    torch.compiler.reset()
    step = CASES[name].step("cpu")
    own = with_own_cache(step)
    want, want_lse = append_and_decode(**step)
    out, lse = torch.compile(lambda: append_and_decode(**own), fullgraph=True, backend="aot_eager")()
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(own["k_cache"], step["k_cache"]) and torch.equal(own["v_cache"], step["v_cache"])


@pytest.mark.parametrize("name", ["int4_g4", CAPPED])
def test_attention_alone_takes_queries_that_nothing_has_transformed_or_their_shifts(name):
    step = CASES[name].step("cpu")
    append_and_decode(**step)
    q, options = turned_query(step)
    transform = step["transform"]
    transformed: Arguments = {**options, "transform": transform}
    out, lse = decode_attention(q, **transformed, return_lse=True)
    assert_near(out, lse, *expected(step))
    given: Arguments = {"q_shift": transform.shift(q), "return_lse": True}
    raw, same_lse = decode_attention(transform.queries(q), **options, **given)
    assert torch.equal(transform.restore(raw), out) and torch.equal(same_lse, lse)
    _, without = decode_attention(transform.queries(q), **options, return_lse=True)
    assert not torch.allclose(without, lse, atol=1e-3)  # the shift counts
    torch.compiler.reset()
    compiled = torch.compile(lambda: decode_attention(q, **transformed), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), out, rtol=2e-2, atol=2e-2)


def test_the_first_call_with_a_transform_may_be_a_compiled_one():
    step = CASES["int4_g4"].step("cpu")
    append_and_decode(**step)
    q, options = turned_query(step)
    transformed: Arguments = {**options, "transform": copy.deepcopy(step["transform"])}
    torch.compiler.reset()
    compiled = torch.compile(lambda: decode_attention(q, **transformed), fullgraph=True, backend="eager")
    assert torch.equal(compiled(), decode_attention(q, **transformed))


def test_what_does_not_fit_is_refused_by_name():
    step = CASES["int4_g4"].step("cpu")
    q, options = turned_query(step)
    shift = torch.zeros(q.shape[:3])

    def refused(message: str, error: type[Exception] = ValueError, **changes):
        with pytest.raises(error, match=message):
            decode_attention(q, **(options | changes))

    refused("q_shift: got a tensor together with transform", transform=make_transform(2, 128), q_shift=shift)
    refused("transform: got str, want a CacheTransform", TypeError, transform="hadamard")
    refused(r"k_center: got shape \[3, 128\], want \[2, 128\]", transform=make_transform(3, 128))
    refused("v_rotation: got 256", transform=CacheTransform(v_rotation=256))
    refused("q_shift: got dtype torch.float16, want torch.float32", TypeError, q_shift=shift.half())
    refused(r"q_shift: got shape \[9, 8\], want \[9, 1, 8\]", q_shift=shift[:, 0])
    refused(
        "q_shift: got strides", q_shift=shift.expand(2, *shift.shape).permute(1, 2, 3, 0).reshape(9, 1, 16)[..., ::2]
    )
    before, other = step["k_cache"].clone(), {**step}
    other["transform"] = make_transform(1, 128)
    with pytest.raises(ValueError, match=r"k_center: got shape \[1, 128\], want \[2, 128\]"):
        append_and_decode(**other)
    assert torch.equal(step["k_cache"], before)
