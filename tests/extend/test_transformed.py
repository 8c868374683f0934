"""Extend attention over a transformed cache is that over the cache as it was, or it is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.kv_cache import CacheTransform
from tests.extend.cases import Call, make_call
from tests.kv_cache.transformed import make_transform

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all of it": ({}, {"k_rotation": 64, "v_rotation": 128}),
    "sinks": ({"sinks": True}, {"k_rotation": 32}),
    "new tokens beside the cache": ({"new": True}, {"k_rotation": 128, "v_rotation": 32}),
    "new tokens, sinks": ({"new": True, "sinks": True}, {}),
    "a window": ({"window_size": 20}, {"k_rotation": 128}),
    "a cap, without a center": ({"softcap": 8.0}, {"parts": "factor v_factor", "k_rotation": 128}),
    "heads first": ({"cache_layout": "HND"}, {"v_rotation": 128, "parts": "center"}),
}


def transformed(call: Call, transform: CacheTransform) -> Call:
    """The call over a 16-bit cache that was written with the transform."""
    cache = replace(call, k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())
    for written, rows, change in zip(cache.caches, call.caches, (transform.keys, transform.values), strict=True):
        written.copy_(change(rows))
    return cache


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_over_the_cache_before_the_transform(name):
    options, of_transform = CASES[name]
    call = make_call("fp16", (5, 0, 33, 1), (40, 12, 33, 70), q_dtype="fp16", **options)
    transform = make_transform(2, 128, **of_transform)
    want, want_lse = call.reference()
    given = transformed(call, transform)
    out, lse = given.run(transform=transform, return_lse=True)
    assert (out - want).norm() / want.norm() < 4e-3
    assert (lse - want_lse).abs().max() < 1e-2
    alone = torch.empty_like(out)
    assert given.run(transform=transform, out=alone) is alone and torch.equal(alone, out)


def test_what_cannot_be_undone_is_refused():
    call = make_call("fp16", (5,), (40,), q_dtype="fp16", softcap=8.0)
    with pytest.raises(ValueError, match="softcap: got 8.0 over a cache with a k_center"):
        call.run(transform=make_transform(2, 128))
    plain = make_call("fp16", (5,), (40,), q_dtype="fp16")
    with pytest.raises(TypeError, match="transform: got str, want a CacheTransform"):
        plain.run(transform="hadamard")
    with pytest.raises(ValueError, match=r"q: got shape \[5, 8, 128\], want \[..., a multiple of 3, 128\]"):
        plain.run(transform=make_transform(3, 128))
