"""The operands of a call besides q: caches with scales and tails, a bias, chosen blocks. Kernels and reference take
these objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels.arguments import Wanted, check_wanted, shape_of, strides_of
from cute_kernels.attention import checks
from cute_kernels.formats.kv import KvFormat

BLOCK_TOKENS = (64, 128)
BLOCK_NAMES = ("block_list", "block_counts", "block_tokens")
POSITIONAL = ("window_size", "alibi_slopes", "attn_bias", "score_options", "q_shift", "k_tail", "new_k", "tree_mask")
"""Options that need positions in the whole request, or keys outside the cache. Calls over chosen blocks refuse them."""
OF_POSITIONS = "it goes by positions of all tokens"


@dataclass(frozen=True, eq=False)
class GivenScale:
    """Scales that lie beside the cache. The scale of head h and column d is element h * head_stride + d *
    channel_stride.

    Attributes:
        tensor: fp32, on the cache's device.
        head_stride: 0 if all heads share a scale.
        channel_stride: 0 if all columns share a scale.
    """

    tensor: torch.Tensor
    head_stride: int
    channel_stride: int


@dataclass(frozen=True, eq=False)
class CacheOperand:
    """K or V of a call.

    Attributes:
        cache: a tensor of 4 dimensions, in the order of the call's layout. Rows are contiguous; other strides are free.
        form: the cache's format.
        head_dim: number of elements of K or V in a row.
        block_stride, token_stride, head_stride: strides in bytes of blocks (a page, or a request's contiguous cache),
            tokens and KV heads. A row's offset is block * block_stride + token of the block * token_stride + head *
            head_stride, which may exceed 32 bits.
        tokens_touch: whether there are no gaps between a block's tokens, each with all KV heads. In a head-major cache:
            whether there are no gaps between the tokens of one head.
        heads_touch: whether there are no gaps between a token's KV heads. In a head-major cache: whether there are no
            gaps between a block's heads, each with all tokens.
        scale: the scale beside the cache; None for a format without one.
    """

    cache: torch.Tensor
    form: KvFormat
    head_dim: int
    block_stride: int
    token_stride: int
    head_stride: int
    tokens_touch: bool
    heads_touch: bool
    scale: GivenScale | None

    @property
    def row_bytes(self) -> int:
        return self.cache.shape[3] * self.cache.element_size()


@dataclass(frozen=True, eq=False)
class Tail:
    """The keys of unfinished blocks, for a format in blocks of tokens. These keys are kept outside the cache.

    Attributes:
        rows: fp16 [slots, 64, num_kv_heads, head_dim], contiguous; the key at position p has row p % 64.
        slots: int32 [batch], each request's slot.
    """

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class Bias:
    """An additive bias, fp32 or bf16.

    strides: strides in elements for request, query, head and key; 0 for dimensions along which the bias is broadcast.
    """

    tensor: torch.Tensor
    strides: tuple[int, int, int, int]

    @staticmethod
    def of(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> Bias:
        """Checks a bias, and returns it with its strides over ``shape`` [batch, q_len, num_q_heads, max_seq_len].
        Raises as `checks.check_bias` does."""
        return Bias(bias, checks.check_bias(bias, shape))


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """The blocks that each KV head of a request reads.

    Attributes:
        list: int32 [batch, num_kv_heads, max_blocks], indices of blocks, ascending. Only the first ``counts`` entries
            of each KV head are used.
        counts: int32 [batch, num_kv_heads].
        tokens: number of tokens of a block.
    """

    list: torch.Tensor
    counts: torch.Tensor
    tokens: int

    @staticmethod
    def of(options: Mapping[str, Any], heads: tuple[int, int], device: torch.device) -> ChosenBlocks | None:
        """Returns the chosen blocks in a call's ``options``; None for a call over all tokens. heads: (batch,
        num_kv_heads).

        Raises TypeError and ValueError, naming the argument, what came and what is wanted.
        """
        given = [options[name] for name in BLOCK_NAMES]
        if all(value is None for value in given):
            return None
        for name, value in zip(BLOCK_NAMES, given, strict=True):
            if value is None:
                raise ValueError(f"{name}: got None, want {', '.join(BLOCK_NAMES)} together")
        block_list, block_counts, block_tokens = given
        if type(block_tokens) is not int or block_tokens not in BLOCK_TOKENS:
            raise ValueError(f"block_tokens: got {block_tokens!r}, want {' or '.join(map(str, BLOCK_TOKENS))}")
        int32, why = (torch.int32,), ": requests and KV heads"
        wanted_list = Wanted("block_list", block_list, int32, (*heads, "max_blocks"), device, "q", "", why)
        check_wanted([wanted_list, Wanted("block_counts", block_counts, int32, heads, device, "q", "", why)])
        if not block_list.shape[2]:
            raise ValueError(f"block_list: got shape {shape_of(block_list)}, want at least one block")
        checks.check_absent("a block_list", OF_POSITIONS, {name: options.get(name) for name in POSITIONAL})
        return ChosenBlocks(block_list, block_counts, block_tokens)

    def seen(self, keys_at: torch.Tensor) -> torch.Tensor:
        """Returns bool [batch, num_kv_heads, tokens]: whether the keys at positions ``keys_at`` [tokens] lie in chosen
        blocks."""
        known = torch.arange(self.list.shape[2], device=self.list.device) < self.counts[..., None]
        chosen = (self.list[..., None] == keys_at // self.tokens) & known[..., None]
        return chosen.any(dim=2)

    def check_whole_pages(
        self, caches: Blocks, k: CacheOperand, v: CacheOperand, block_table: torch.Tensor | None
    ) -> None:
        """Raises ValueError unless a chosen block consists of whole pages. With contiguous caches, raises it unless a
        request's memory consists of whole blocks."""
        tokens = self.tokens
        if block_table is not None:
            if tokens % caches.tokens:
                raise ValueError(
                    f"block_tokens: got {tokens} over pages of {caches.tokens} tokens, want whole pages to make a block"
                )
            return
        if caches.head_major:
            raise ValueError("cache_layout: got 'HND' of contiguous caches beside a block_list, want 'NHD' or pages")
        for name, operand in (("k_cache", k), ("v_cache", v)):
            if caches.max_seq_len % tokens or operand.block_stride != caches.max_seq_len * operand.token_stride:
                raise ValueError(
                    f"{name}: got {caches.max_seq_len} tokens a request, {operand.block_stride} bytes apart, beside a "
                    f"block_list, want whole blocks of {tokens} without gaps between requests"
                )


@dataclass(frozen=True)
class Blocks:
    """The blocks that the caches are cut into: pages, or one block per request."""

    num_blocks: int
    tokens: int  # of a block
    num_kv_heads: int
    head_major: bool
    max_seq_len: int


def check_caches(
    query: tuple[int, int],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    forms: tuple[KvFormat, KvFormat],
    head_major: bool,
    block_table: torch.Tensor | None,
) -> Blocks:
    """Checks the sizes that both caches must share, and returns their blocks. The size of rows is not checked. query:
    (batch of q, heads of q).
    """
    batch, num_q_heads = query
    tokens_name = "max_seq_len" if block_table is None else "page_size"
    inner = f"num_kv_heads, {tokens_name}" if head_major else f"{tokens_name}, num_kv_heads"
    dimensions = f"[{'batch' if block_table is None else 'num_pages'}, {inner}, row]"
    for name, cache, form in (("k_cache", k_cache, forms[0]), ("v_cache", v_cache, forms[1])):
        checks.check_cache(name, cache, form, dimensions)
        if block_table is None and cache.shape[0] != batch:
            raise ValueError(f"{name}: got a batch of {cache.shape[0]}, want {batch}, that of q")
    num_blocks = k_cache.shape[0]
    num_kv_heads, tokens = (k_cache.shape[1], k_cache.shape[2]) if head_major else (k_cache.shape[2], k_cache.shape[1])
    if num_kv_heads == 0:
        raise ValueError("k_cache: got no KV heads, want at least 1")
    checks.check_alike(k_cache, v_cache)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"q: got {num_q_heads} query heads, want a multiple of the cache's {num_kv_heads} KV heads")
    max_seq_len = tokens
    if block_table is not None:
        checks.check_block_table(block_table, batch, num_blocks, tokens)
        max_seq_len = block_table.shape[1] * tokens
    name = "k_cache" if block_table is None else "block_table"
    if max_seq_len > checks.MAX_TOKENS:
        raise ValueError(f"{name}: got {max_seq_len} tokens a request, want at most {checks.MAX_TOKENS}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tokens * num_kv_heads * cache.shape[3] * cache.element_size() >= 2**40:
            raise ValueError(f"{name}: got {shape_of(cache)}, want less than 2**40 bytes a request")
    return Blocks(num_blocks, tokens, num_kv_heads, head_major, max_seq_len)


def operand_of(
    scale_name: str, cache: torch.Tensor, form: KvFormat, head_dim: int, blocks: Blocks, scale: torch.Tensor | None
) -> CacheOperand:
    row = cache.shape[3] * cache.element_size()
    block_stride, outer_stride, inner_stride = (stride * cache.element_size() for stride in strides_of(cache)[:3])
    inner_touch = inner_stride == row
    outer_touch = inner_touch and outer_stride == cache.shape[2] * row
    token_stride, head_stride, tokens_touch, heads_touch = outer_stride, inner_stride, outer_touch, inner_touch
    if blocks.head_major:
        token_stride, head_stride, tokens_touch, heads_touch = inner_stride, outer_stride, inner_touch, outer_touch
    strides = checks.check_given_scale(scale_name, scale, form, blocks.num_kv_heads, head_dim)
    return CacheOperand(
        cache=cache,
        form=form,
        head_dim=head_dim,
        block_stride=block_stride,
        token_stride=token_stride,
        head_stride=head_stride,
        tokens_touch=tokens_touch,
        heads_touch=heads_touch,
        scale=None if scale is None or strides is None else GivenScale(scale, *strides),
    )


def part_of(operand: CacheOperand, part: slice) -> CacheOperand:
    """Returns the part of a contiguous cache that belongs to the requests ``part``."""
    return replace(operand, cache=operand.cache[part])
