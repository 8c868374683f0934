"""How the caches' rows lie in the kernel's shared memory, and which copies can bring them there."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from cute_kernels.kv_formats import HEAD_DIMS, ByteFormat, DenseFormat, Int4Format, KvFormat, format_of
from cute_kernels.sm90 import WARP_THREADS
from layouts.kv.swizzled_tile import SwizzledTile
from layouts.kv.tile import RowTile, plan_tiles

ROW_COPIES = ("bulk", "word")
BARE_COPIES = ("tma",)
MAX_BOX = 256  # tokens of one tensor-map copy
_GROUP_UNIT = 8  # columns: the narrowest piece of a row that an MMA takes


class TiledConfig(Protocol):
    """What decides the tiles of a configuration (`cute_kernels.attention.config.DecodeConfig`, which says what each
    is); hashable."""

    @property
    def k_format(self) -> str: ...
    @property
    def v_format(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def tile_tokens(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def k_copy(self) -> str: ...
    @property
    def v_copy(self) -> str: ...
    @property
    def copies(self) -> tuple[str, str]: ...


def has_headers(form: KvFormat) -> bool:
    """Whether rows carry their scales; they are copied and read as raw bytes then, bare elements by tensor maps."""
    return isinstance(form, Int4Format) or (isinstance(form, ByteFormat) and form.header_bytes > 0)


def num_groups(form: KvFormat) -> int:
    """Groups of columns that have scales of their own in a row."""
    return form.num_groups if isinstance(form, (Int4Format, ByteFormat)) else 1


def copies_of(form: KvFormat) -> tuple[str, ...]:
    """Ways of bringing a tile of the format into shared memory."""
    return ROW_COPIES if has_headers(form) else BARE_COPIES


def kernel_format(name: str) -> str:
    """The format whose kernel reads ``name``: a scale per tensor is one per head that all heads share."""
    form = format_of(name)
    if isinstance(form, ByteFormat) and form.granularity == "head":
        return f"{form.codes}_tensor"
    return name


def cannot_read(form: KvFormat, head_dim: int) -> str | None:
    """Why the kernels cannot read rows of the format, or None."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if has_headers(form):
        assert isinstance(form, (Int4Format, ByteFormat))
        width = head_dim // form.num_groups
        if width % _GROUP_UNIT:
            return f"groups of {width} columns ({form.name} at head_dim {head_dim}) are no multiple of {_GROUP_UNIT}"
    return None


@lru_cache(maxsize=4096)
def tiles_of(config: TiledConfig) -> tuple[RowTile | SwizzledTile, RowTile | SwizzledTile]:
    """The shared-memory images of K and of V of one tile, which agree about the order of tokens."""
    keys = _tile(config, "k", config.k_format, config.head_dim, config.k_copy)
    values = _tile(config, "v", config.v_format, config.v_head_dim, config.v_copy)
    return plan_tiles(keys, values)


def tokens_per_copy(config: TiledConfig, tile: RowTile | SwizzledTile) -> int:
    """Tokens that one bulk or tensor-map copy brings."""
    if isinstance(tile, RowTile):
        return min(tile.copy_tokens, config.page_tokens or tile.copy_tokens)
    return min(config.tile_tokens, config.page_tokens or MAX_BOX)


def copies_per_tile(config: TiledConfig) -> int:
    """Copies that bring one tile of K and V; tensor maps bring one head at a time."""
    heads = [1 if isinstance(tile, RowTile) else config.num_heads for tile in tiles_of(config)]
    tokens = [tokens_per_copy(config, tile) for tile in tiles_of(config)]
    return sum(h * -(-config.tile_tokens // t) for h, t in zip(heads, tokens, strict=True))


def lane_tokens(config: TiledConfig) -> int:
    """Tokens of a tile whose bulk copies one lane asks for; they lie in one page. Longer runs are the first lane's."""
    runs = [tokens_per_copy(config, tile) for tile in tiles_of(config) if isinstance(tile, RowTile)]
    if not runs:
        return min(config.page_tokens or config.tile_tokens, config.tile_tokens)
    even = 1 << (-(-config.tile_tokens // WARP_THREADS) - 1).bit_length()
    return max(even, min(runs))


def most_copy_warps(config: TiledConfig) -> int:
    """Copying warps that all have something to copy in every whole tile."""
    if "word" in config.copies:
        return config.tile_tokens
    boxes = [
        config.tile_tokens // tokens_per_copy(config, tile)
        for tile in tiles_of(config)
        if isinstance(tile, SwizzledTile)
    ]
    return max(config.tile_tokens // lane_tokens(config), *boxes, 1)


def _tile(config: TiledConfig, operand: str, kv_format: str, head_dim: int, copy: str) -> RowTile | SwizzledTile:
    form = format_of(kv_format)
    if not has_headers(form):
        element_bytes = 2 if isinstance(form, DenseFormat) else 1
        return SwizzledTile(head_dim, element_bytes, config.num_heads, config.tile_tokens)
    assert isinstance(form, (Int4Format, ByteFormat))
    return RowTile(
        head_dim,
        4 if isinstance(form, Int4Format) else 8,
        form.num_groups,
        config.num_heads,
        config.tile_tokens,
        operand,
        config.contiguous,
        4 if copy == "bulk" else 1,
    )
