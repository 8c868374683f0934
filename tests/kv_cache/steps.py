"""Steps of append and attention on any device, as one call and as the two that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, append_kv, decode_attention
from cute_kernels.kv_cache import step_ops, step_plan
from tests.kv_cache.cases import Shape, make_call

Arguments = dict[str, Any]
CACHE = ("k_cache", "v_cache", "seq_lens", "kv_format", "block_table", "cache_layout", "k_scale", "v_scale")
ATTENTION = ("softmax_scale", "causal", "window_size", "softcap", "sinks", "alibi_slopes", "attn_bias", "num_splits",
             "out")  # fmt: skip


def make_step(
    shape: Shape, lengths: tuple[int, ...], q_len: int = 1, device: Any = "cpu", *, blank: bool = False, **options: Any
) -> Arguments:
    """Arguments of `append_and_decode` for requests of these lengths; caches hold standard normal tokens.

    blank: caches are left as `make_call` has them, for calls of which only the shapes matter; scales are any.
    options: what attention takes beyond the cache.
    """
    max_seq_len, batch = max(*lengths, q_len, 1), len(lengths)
    new = 1 if blank else max_seq_len
    full = shape.with_(new=(new,) * batch, lengths=(max_seq_len,) * batch, seed=shape.seed + 1)
    call = make_call(full, device)
    if not blank:
        append_kv(**_of_append(call._asdict()))  # every place, so that all that may be read is a number
    tokens = make_call(shape.with_(new=(q_len,) * len(lengths), lengths=None), device)
    given = {name: getattr(call, name) for name in ("k_cache", "v_cache", "block_table", "k_scale", "v_scale")}
    given |= {name: getattr(tokens, name).unflatten(0, (-1, q_len)) for name in ("q", "k", "v")}
    given |= {name: getattr(tokens, name) for name in ("q_norm", "k_norm", "norm_eps", "rope", "cache_layout")}
    positions = tokens.position_ids
    given["position_ids"] = None if positions is None else positions.unflatten(0, (-1, q_len))
    given["qkv_bias"] = (tokens.q_bias, tokens.k_bias, tokens.v_bias)
    given["kv_format"] = shape.kv_format
    given["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return given | options


def _of_append(fields: Arguments) -> Arguments:
    """The fields of an `AppendCall` as `append_kv` takes them."""
    fields["kv_format"] = (fields.pop("k_format"), fields.pop("v_format"))
    fields["qkv_bias"] = tuple(fields.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
    return fields


def with_own_cache(step: Arguments) -> Arguments:
    """The same step on a copy of its caches."""
    return step | {name: step[name].clone() for name in ("k_cache", "v_cache")}


def run(step: Arguments, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The step as one call: (out, lse)."""
    return append_and_decode(**(step | changes), return_lse=True)


def run_separately(step: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The step as two calls: (out, lse)."""
    batch, q_len = step["q"].shape[:2]
    given = {name: x for name, x in step.items() if name not in ATTENTION}
    given |= {name: step[name].flatten(0, 1) for name in ("q", "k", "v")}
    given["qkv_bias"] = given.pop("qkv_bias")
    if step["position_ids"] is not None:
        given["position_ids"] = step["position_ids"].flatten()
    if q_len > 1:
        given["cu_seqlens"] = q_len * torch.arange(batch + 1, dtype=torch.int32, device=step["q"].device)
    turned: Any = append_kv(**given)
    options = {name: step[name] for name in (*CACHE, *ATTENTION) if name in step}
    return decode_attention(turned.unflatten(0, (batch, q_len)), **options, return_lse=True)


@contextmanager
def two_launches() -> Iterator[None]:
    """Steps take an append and attention after it, whichever kernels could do both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "chosen", lambda append, attention: None)
        step_ops.launch.plans.clear()
        yield
    step_ops.launch.plans.clear()


def assert_same(one: Arguments, two: Arguments) -> None:
    """The caches of two steps are alike, to the bit."""
    for name in ("k_cache", "v_cache"):
        assert torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)), name


def poison_new(step: Arguments) -> None:
    """Makes the places of the new tokens as loud as bytes of 0xFF are: NaN in codes or scales, but for INT8 codes."""
    q_len, table = step["q"].shape[1], step["block_table"]
    for request, length in enumerate(step["seq_lens"].tolist()):
        at = torch.arange(max(length - q_len, 0), length, device=step["q"].device)
        for name in ("k_cache", "v_cache"):
            cache = step[name].view(torch.uint8)
            cache = cache.transpose(1, 2) if step["cache_layout"] == "HND" else cache
            page_size = cache.shape[1]
            pages = torch.full_like(at, request) if table is None else table[request, at // page_size].long()
            cache[pages, at % page_size] = 0xFF
