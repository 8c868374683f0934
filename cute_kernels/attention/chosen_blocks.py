"""Attention over chosen blocks: the call as kernels see it, and the tables by which they find a KV head's tokens.

The kernels read chosen blocks as if there were no others. Each KV head of a request has a row of pages and a length of
its own (`Features.by_head`). A kernel before the launch makes both from its list (:mod:`.block_tables_kernel`). So the
blocks of a list have to ascend: only the request's last one may hold fewer tokens, and a query's own tokens come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from cute_kernels.attention.arguments import BLOCK_TABLES
from cute_kernels.attention.block_tables import BlockTablesConfig
from cute_kernels.attention.call import AttentionCall, Given
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.operands import CacheOperand
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan


def as_paged(call: AttentionCall) -> AttentionCall:
    """Returns the call as kernels see it: each KV head has pages of its own. The values of its block table are
    undefined."""
    assert call.blocks is not None
    page_size = call.page_size if call.block_table is not None else call.blocks.tokens
    entries = call.blocks.list.shape[2] * (call.blocks.tokens // page_size)
    table = call.q.new_empty((call.batch, entries), dtype=torch.int32)
    k, v = call.k, call.v
    if call.block_table is None:
        k, v = (_in_pages(operand, page_size) for operand in (k, v))
    return replace(
        call, k=k, v=v, block_table=table, page_size=page_size, num_blocks=k.cache.shape[0],
        max_seq_len=entries * page_size,
    )  # fmt: skip


def _in_pages(operand: CacheOperand, page_size: int) -> CacheOperand:
    """Returns a contiguous cache as pages of ``page_size`` tokens."""
    return replace(operand, cache=pages_of(operand.cache, page_size), block_stride=page_size * operand.token_stride)


def pages_of(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns a cache [batch, max_seq_len, num_kv_heads, row] as [pages, page_size, num_kv_heads, row]."""
    return cache.unflatten(1, (-1, page_size)).flatten(0, 1)


def table_maker(call: AttentionCall) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function of ``seq_lens`` and ``options`` that launches the kernel of a call's tables.

    That function returns pages, int32 [num_kv_heads, batch, entries], and tokens of each list, int32 [num_kv_heads *
    batch].
    """
    assert call.blocks is not None
    tokens, table = call.blocks.tokens, call.block_table
    page_size = tokens if table is None else call.page_size
    entries = call.blocks.list.shape[2] * (tokens // page_size)
    new_pages = blank((call.num_kv_heads, call.batch, entries), torch.int32)
    new_tokens = blank((call.num_kv_heads * call.batch,), torch.int32)
    fixed = {
        "table_stride": 0 if table is None else table.stride(0),
        "pages_of_request": call.max_seq_len // page_size,
        "block_tokens": tokens,
    }
    function = load(AttentionSpec(BlockTablesConfig()), arch_of(call.q.get_device()))
    lists = {name: ("options", name) for name in ("block_list", "block_counts")}
    send = BLOCK_TABLES.bound(function, fixed, {"block_table": ("options", "block_table")}, lists)

    def make(seq_lens: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        pages, own_tokens = GPU.empty(*new_pages), GPU.empty(*new_tokens)
        send(seq_lens=seq_lens, pages=pages, tokens=own_tokens, options=options)
        return pages, own_tokens

    return make


def planned(call: AttentionCall, plan: Plan) -> Plan:
    """Returns the plan of a call with chosen blocks, made from ``plan``, the plan of the `as_paged` call."""
    assert call.blocks is not None
    page_size, make_tables = call.blocks.tokens, table_maker(call)

    def launch(given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        options, k_cache, v_cache = given.options, given.k_cache, given.v_cache
        assert options is not None
        pages, tokens = make_tables(given.seq_lens, options)
        if options["block_table"] is None:
            k_cache, v_cache = pages_of(k_cache, page_size), pages_of(v_cache, page_size)
        options = {**options, "block_table": pages}
        return plan.launch(given._replace(k_cache=k_cache, v_cache=v_cache, seq_lens=tokens, options=options))

    return Plan(plan.device_index, launch, plan.products)
