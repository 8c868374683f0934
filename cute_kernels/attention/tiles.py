"""How a cache format's rows lie in the kernel's shared memory, and which copies can bring them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.kv_formats import DenseFormat, Int4Format, KvFormat
from layouts.kv.dense_tile import DenseTile
from layouts.kv.tile import Int4Tile

if TYPE_CHECKING:
    from cute_kernels.attention.config import DecodeConfig


def copies_of(form: KvFormat) -> tuple[str, ...]:
    """Ways of bringing a tile of the format into shared memory."""
    return ("tma",) if isinstance(form, DenseFormat) else ("bulk", "word")


def tile_of(config: DecodeConfig) -> DenseTile | Int4Tile:
    """The shared-memory image of one operand (K or V) of one tile."""
    return dense_tile(config) if isinstance(config.format, DenseFormat) else int4_tile(config)


def dense_tile(config: DecodeConfig) -> DenseTile:
    return DenseTile(config.head_dim, config.num_heads, config.tile_tokens)


def int4_tile(config: DecodeConfig) -> Int4Tile:
    assert isinstance(config.format, Int4Format)
    copy_words = 4 if config.copy == "bulk" else 1
    groups = config.format.num_groups
    return Int4Tile(config.head_dim, groups, config.num_heads, config.tile_tokens, config.contiguous, copy_words)
