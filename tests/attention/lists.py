"""What lists of chosen blocks choose, as PyTorch's operations find it, and calls with lists of all kinds."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.attention.call import AttentionCall, make_call
from cute_kernels.attention.operands import ChosenBlocks

MAX_TOKENS, HEADS = 768, 3


def tables(
    blocks: ChosenBlocks,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    pages_of_request: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages int32 [num_kv_heads, batch, entries], tokens int32 [num_kv_heads * batch]).

    block_table: None where request b has pages b * pages_of_request and the next ones.
    """
    chosen, per_block = blocks.list.transpose(0, 1), blocks.tokens // page_size
    steps = torch.arange(per_block, device=chosen.device)
    entries = (chosen.long().unsqueeze(-1) * per_block + steps).flatten(2).clamp(0, pages_of_request - 1)
    if block_table is None:
        pages = entries + torch.arange(entries.shape[1], device=chosen.device)[:, None] * pages_of_request
    else:
        pages = block_table.expand(len(entries), *block_table.shape).gather(2, entries)
    before_last = blocks.counts.t().clamp(max=chosen.shape[2]) - 1
    last = chosen.gather(2, before_last.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    in_last = (seq_lens - last * blocks.tokens).clamp(0, blocks.tokens)
    tokens = (in_last + before_last * blocks.tokens).clamp(min=0)  # no block: a block less than in_last
    return pages.to(torch.int32), tokens.to(torch.int32).flatten()


def tables_of(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages and the tokens of a call's lists."""
    assert call.blocks is not None
    size = call.blocks.tokens if call.block_table is None else call.page_size
    return tables(call.blocks, call.seq_lens, call.block_table, call.max_seq_len // size, size)


LISTS = ("ascending", "any numbers", "strided", "one block", "many blocks")
"""What lists are: as they should be, with -1 behind; of any order, twice, of no block, with any counts; as
"ascending", but part of something larger; of one block; of more blocks than a request has."""


def odd_call(
    lists: str, page_size: int | None, tokens: int, batch: int = 5, device: Any = "cpu"
) -> tuple[AttentionCall, dict[str, Any]]:
    """A call of decode attention with the lists of a kind, and its options. No list is looked at, and no cache."""
    generator = torch.Generator().manual_seed(7)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    there, size = MAX_TOKENS // tokens, page_size or MAX_TOKENS
    longest = {"one block": 1, "many blocks": 150}.get(lists, there)
    listed = torch.rand(batch, HEADS, max(longest, there), generator=generator).argsort(-1)[..., :longest].int()
    counts = numbers(0, longest + 1, batch, HEADS)
    if lists == "any numbers":
        listed = numbers(-3, there + 3, batch, HEADS, longest)
        listed[0, 0], listed[0, 1], listed[-1, -1] = -(2**31), 2**31 - 1, -1
        counts = numbers(-2, longest + 3, batch, HEADS)
    elif lists != "many blocks":
        behind = torch.arange(longest) >= counts[..., None]
        listed = listed.masked_fill(behind, there).sort(-1).values.masked_fill(behind, -1)
    lengths = numbers(-1, MAX_TOKENS + 1, batch)
    table = None if page_size is None else numbers(0, 99, batch, MAX_TOKENS // size + 3)[:, :-3]
    if lists == "strided":
        wide = torch.full((batch, longest, HEADS, 2), 77, dtype=torch.int32)
        wide[..., 1] = listed.transpose(1, 2)
        listed, counts = wide[..., 1].transpose(1, 2), counts.t().contiguous().t()
    elif table is not None:
        table = table.contiguous()
    cache = torch.zeros(batch if page_size is None else 99, size, HEADS, 64, dtype=torch.bfloat16, device=device)
    q = torch.zeros(batch, 1, HEADS, 64, dtype=torch.bfloat16, device=device)

    def placed(x: torch.Tensor) -> torch.Tensor:
        """On the device, with its strides."""
        base = x if x._base is None else x._base
        return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    options: dict[str, Any] = {"block_list": placed(listed), "block_counts": placed(counts), "block_tokens": tokens}
    options["block_table"] = None if table is None else placed(table)
    return make_call(q, cache, cache, placed(lengths), kv_format="bf16", **options), options
