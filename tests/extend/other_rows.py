"""Queries from cu_seqlens_q[batch] on: their rows of ``out`` stay as they are, whoever serves a call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_kernels import append_and_extend, extend_attention, mixed_attention
from cute_kernels.kv_cache import CacheTransform
from tests.extend.cases import make_call, writable

KINDS = ("plain", "transform", "empty cache", "all decode", "mixed", "append")


def assert_other_rows_stay(kind: str, device: str) -> None:
    """A call of a kind writes the rows of requests' queries, and no other ones."""
    q_lens = [1, 1] if kind == "all decode" else [1, 4]
    call = writable(make_call("bf16", [*q_lens, 3], [9, 20, 30], new=kind == "append", page_size=16, device=device))
    used, batch = sum(q_lens), len(q_lens)
    lengths, ends = call.seq_lens[:batch].contiguous(), call.cu_seqlens_q[: batch + 1].contiguous()
    options = call.options | {"cu_seqlens_q": ends, "kv_format": "bf16", "out": torch.full_like(call.q, 7.0)}
    options["block_table"] = call.options["block_table"][:batch]
    if kind == "transform":
        center = torch.ones(2, 128, device=device)
        options["transform"] = CacheTransform(k_center=center, v_rotation=128)
    if kind == "empty cache":
        options["block_table"], lengths = options["block_table"][:, :0], torch.zeros_like(lengths)
    attend: Any = extend_attention
    if kind in ("all decode", "mixed"):
        attend = functools.partial(mixed_attention, num_decodes=batch if kind == "all decode" else 1)
    if kind == "append":
        new = options.pop("new_k"), options.pop("new_v")
        attend = lambda q, *cache, **given: append_and_extend(q, *new, *cache, **given)  # noqa: E731
    if kind == "operator":
        attend = torch.compile(extend_attention, backend="eager", fullgraph=True)
    attend(call.q, call.k_cache, call.v_cache, lengths, **options)
    out = options["out"]
    assert torch.all(out[used:] == 7.0) and not torch.any((out[:used] == 7.0).all(dim=-1))
