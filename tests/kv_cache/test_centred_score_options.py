"""Options that look at scores themselves, over keys that are centred: they want what the scores lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.formats import scores
from cute_kernels.formats.scores import OptionTensor, ScoreOption
from cute_kernels.kv_cache import KVCache, Moments


class OwnCap(ScoreOption):
    """own_bound[head] * tanh(score / own_bound[head])."""

    name, term = "own_cap", "no.device:Code"
    tensors = (OptionTensor("own_bound", ("num_q_heads",)),)

    def reference(self, scores, block):
        bound = block.by_head(block.call.score_tensors["own_bound"], scores.dtype)
        return bound * torch.tanh(scores / bound)


@pytest.fixture
def options(monkeypatch) -> dict[str, Any]:
    monkeypatch.setitem(scores._registered, "own_cap", OwnCap())
    return {"score_options": {"own_bound": torch.full((8,), 4.0)}}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def centred(kv_format: Any, **more: Any) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """A cache of 70 tokens whose keys are far from 0, and what went into it."""
    k, v = numbers(70, 2, 128) + 3 * numbers(1, 2, 128, seed=1), numbers(70, 2, 128, seed=2)
    transform = Moments().update(numbers(70, 8, 128, seed=3), k, v).transform(k_rotation=32)
    assert transform.k_center is not None
    cache = KVCache(1, 4, 64, 2, 128, kv_format=kv_format, transform=transform, **more)
    cache.allocate("a", 69)
    cache.append(0, cache.make_batch(1).update(["a"], 69), k[:69], v[:69])
    cache.extend("a")
    return cache, k, v


def test_transformed_queries_without_their_shift_are_refused(options):
    cache, k, v = centred("int4_g4")
    batch, q = cache.make_batch(1).update(["a"]), numbers(1, 8, 128, seed=4)
    shift = torch.empty(1, 8)
    turned = cache.append(0, batch, k[69:], v[69:], q=q, q_shift=shift)
    assert turned is not None
    with pytest.raises(ValueError, match="^q_shift: got None for layer 0, .* score_options"):
        cache.attend(0, batch, turned[None], q_transformed=True, **options)
    want = cache.attend(0, batch, q[None], q_transformed=False, **options)
    got = cache.attend(0, batch, turned[None], q_transformed=True, q_shift=shift[None], **options)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=0)


def test_a_step_of_keys_in_blocks_gives_them_their_shift(options):
    cache, k, v = centred(("int4_channel32", "int4_g4"), max_seqs=1)
    batch, q = cache.make_batch(1).update(["a"]), numbers(1, 1, 8, 128, seed=4)
    got = cache.append_and_attend(0, batch, q, k[69:][None], v[69:][None], **options)
    want = cache.attend(0, batch, q, q_transformed=False, **options)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
