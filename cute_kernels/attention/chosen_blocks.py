"""Attention over chosen blocks: the checks of the calls, and the tables by which the kernels find a KV head's tokens.

The kernels read chosen blocks as if there were no others. Each KV head of a request has a row of pages and a length of
its own (`Features.by_head`). A kernel before the launch makes both from its list (:mod:`.block_tables_kernel`). So the
blocks of a list have to ascend: only the request's last one may hold fewer tokens, and a query's own tokens come last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.arguments import check_dtype, check_place, check_tensors, shape_of
from cute_kernels.attention.arguments import BLOCK_TABLES
from cute_kernels.attention.block_tables import BlockTablesConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan

if TYPE_CHECKING:
    from cute_kernels.attention.call import AttentionCall, Given
    from cute_kernels.attention.operands import CacheOperand

BLOCK_TOKENS = (64, 128)
NAMES = ("block_list", "block_counts", "block_tokens")
REFUSED = ("window_size", "alibi_slopes", "attn_bias", "score_options", "q_shift", "k_tail", "new_k", "tree_mask")
"""Options that need positions in the whole request, or keys outside the cache."""


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """The blocks of ``tokens`` tokens that each KV head of a request reads.

    list: int32 [batch, num_kv_heads, max_blocks], ascending; from ``counts`` on its entries may be anything. counts:
    int32 [batch, num_kv_heads].
    """

    list: torch.Tensor
    counts: torch.Tensor
    tokens: int

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns list, counts and tokens of a block, in the order of `NAMES`."""
        return self.list, self.counts, self.tokens

    def seen(self, keys_at: torch.Tensor) -> torch.Tensor:
        """Returns bool [batch, num_kv_heads, tokens]: whether each key at positions ``keys_at`` [tokens] lies in a
        chosen block."""
        known = torch.arange(self.list.shape[2], device=self.list.device) < self.counts[..., None]
        chosen = (self.list[..., None] == keys_at // self.tokens) & known[..., None]
        return chosen.any(dim=2)


def blocks_of(
    block_list: torch.Tensor | None,
    block_counts: torch.Tensor | None,
    block_tokens: int | None,
    heads: tuple[int, int],
    device: torch.device,
    **others: object,
) -> ChosenBlocks | None:
    """Returns the chosen blocks of a call; None for a call over all tokens.

    heads: batch and KV heads. others: options of the call, of which those in `REFUSED` are refused.

    Raises TypeError and ValueError, naming the argument, what came and what is wanted.
    """
    given = dict(zip(NAMES, (block_list, block_counts, block_tokens), strict=True))
    if all(value is None for value in given.values()):
        return None
    for name, value in given.items():
        if value is None:
            raise ValueError(f"{name}: got None, want {', '.join(NAMES)} together")
    assert block_list is not None and block_counts is not None and block_tokens is not None
    if type(block_tokens) is not int or block_tokens not in BLOCK_TOKENS:
        raise ValueError(f"block_tokens: got {block_tokens!r}, want {' or '.join(map(str, BLOCK_TOKENS))}")
    check_tensors(block_list=block_list, block_counts=block_counts)
    wanted = {"block_list": (block_list, 3, ", max_blocks"), "block_counts": (block_counts, 2, "")}
    for name, (tensor, dimensions, more) in wanted.items():
        check_place(name, tensor, device)
        check_dtype(name, tensor, torch.int32)
        if tensor.dim() != dimensions or tuple(tensor.shape[:2]) != heads or not tensor.shape[-1]:
            raise ValueError(
                f"{name}: got shape {shape_of(tensor)}, want [{heads[0]}, {heads[1]}{more}]: requests and KV heads"
            )
    for name in REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"{name}: got a value beside a block_list, want None: it goes by positions of all tokens")
    return ChosenBlocks(block_list, block_counts, block_tokens)


def check_pages(call: AttentionCall) -> None:
    """Raises ValueError unless whole pages of the call's caches make a block."""
    assert call.blocks is not None
    tokens = call.blocks.tokens
    if call.block_table is not None:
        if tokens % call.page_size:
            raise ValueError(
                f"block_tokens: got {tokens} over pages of {call.page_size} tokens, want whole pages to make a block"
            )
        return
    if call.head_major:
        raise ValueError("cache_layout: got 'HND' of contiguous caches beside a block_list, want 'NHD' or pages")
    for name, operand in (("k_cache", call.k), ("v_cache", call.v)):
        if call.max_seq_len % tokens or operand.block_stride != call.max_seq_len * operand.token_stride:
            raise ValueError(
                f"{name}: got {call.max_seq_len} tokens a request, {operand.block_stride} bytes apart, beside a "
                f"block_list, want whole blocks of {tokens} without gaps between requests"
            )


def check_values(call: AttentionCall) -> None:
    """Raises ValueError for a list that cannot be right. Reads the list, so it waits for the device."""
    assert call.blocks is not None
    blocks, ends = call.blocks, call.cu_seqlens_q
    q_lens = [call.q_len] * call.batch if ends is None else ends.diff().tolist()
    chosen, counts, lengths = blocks.list.tolist(), blocks.counts.tolist(), call.seq_lens.tolist()
    for request, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        there = -(-length // blocks.tokens)
        own = range(max(length - q_len, 0) // blocks.tokens, there) if q_len > 1 and call.causal else range(0)
        for head, (entries, count) in enumerate(zip(chosen[request], counts[request], strict=True)):
            where = f"request {request}, KV head {head}"
            if not 0 <= count <= len(entries):
                raise ValueError(f"block_counts: got {count} for {where}, want 0 to {len(entries)}")
            row = entries[:count]
            if any(entry < 0 or entry >= there for entry in row) or any(a >= b for a, b in itertools.pairwise(row)):
                raise ValueError(f"block_list: got {row} for {where}, want ascending blocks from 0 to {there - 1}")
            if own and row[-len(own) :] != list(own):
                raise ValueError(
                    f"block_list: got {row} for {where}, want it to end with {list(own)}, blocks of the queries' own "
                    "tokens"
                )


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
