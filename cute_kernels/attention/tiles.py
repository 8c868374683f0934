"""The layout of the caches' rows in the decode kernel's shared memory, and the copies that can load them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.kv import GROUP_UNIT, HEAD_DIMS, KvFormat, format_of
from layouts.kv.swizzled_tile import SwizzledTile
from layouts.kv.tile import MMA_ROWS, WORD_BYTES, RowTile, plan_tiles, run_codes

if TYPE_CHECKING:
    from cute_kernels.attention.decode_config import DecodeConfig
    from cute_kernels.attention.policies import CacheLoad

ROW_COPIES = ("bulk", "map", "word")
BARE_COPIES = ("tma",)
MAX_BOX = 256  # tokens, and words of a token, of one tensor-map copy
MAP_UNIT = 16  # bytes that what a tensor map brings of a token is a multiple of, and begins at a multiple of
MAP_WORDS = MAP_UNIT // WORD_BYTES
BLOCK_HEAD_DIMS = (64, 128)  # of formats in blocks: the lanes of a warp take whole header words, at most four each


def map_paddings(token_words: int) -> tuple[int, ...]:
    """Returns two numbers of words that a tensor map may load besides the words of a token's heads.

    A tensor map loads whole vectors and begins at one. So up to three words before the heads' own words come along;
    none or two if the heads have an even number of words. The second choice has one vector more, which may spare bank
    conflicts.
    """
    before = {0: 0, 2: 2}.get(token_words % MAP_WORDS, MAP_WORDS - 1)
    least = -(-(token_words + before) // MAP_WORDS) * MAP_WORDS - token_words
    return least, least + MAP_WORDS


class MappedTile(RowTile):
    """Raw rows of some of a token's heads as a tensor map loads them, with their neighbours in the cache."""

    def copies(self) -> list[tuple[int, int]]:
        return [(1, padding) for padding in map_paddings(self.token_words)]


def copies_of(form: KvFormat) -> tuple[str, ...]:
    """Returns the copies that can load a tile of the format into shared memory."""
    return ROW_COPIES if form.has_header else BARE_COPIES


def kernel_format(name: str) -> str:
    """Returns the format whose kernel reads ``name``."""
    return format_of(name).kernel_name


def cannot_read(form: KvFormat, head_dim: int) -> str | None:
    """Returns why the kernels cannot read rows of the format, or None."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if form.decode is None:
        return f"{form.name} caches are not among those that decode attention reads"
    if form.in_blocks:
        known = [dim for dim in BLOCK_HEAD_DIMS if dim % form.block_tokens == 0]
        wanted = " or ".join(map(str, known))
        return None if head_dim in known else f"head_dim {head_dim} of {form.name} is not {wanted}"
    if form.has_header:
        width = head_dim // form.num_groups
        if width % GROUP_UNIT:
            return f"groups of {width} columns ({form.name} at head_dim {head_dim}) are no multiple of {GROUP_UNIT}"
        whole_runs = MMA_ROWS * run_codes(form.code_bits)
        if form.decode.codes is not None and width % whole_runs:
            return f"groups of {width} columns ({form.name} at head_dim {head_dim}) are no multiple of {whole_runs}"
    return None


@lru_cache(maxsize=4096)
def tiles_of(config: DecodeConfig) -> tuple[RowTile | SwizzledTile, RowTile | SwizzledTile]:
    """Returns the shared-memory images of K and of V of one tile, which agree about the order of tokens."""
    return plan_tiles(_tile(config, "k", config.k), _tile(config, "v", config.v))


def tokens_per_copy(config: DecodeConfig, tile: RowTile | SwizzledTile) -> int:
    """Returns the tokens that one bulk or tensor-map copy brings."""
    if isinstance(tile, RowTile) and not _is_mapped(config, tile):
        return min(tile.copy_tokens, config.page_tokens or tile.copy_tokens)
    return min(config.tile_tokens, config.page_tokens or MAX_BOX)


def _is_mapped(config: DecodeConfig, tile: RowTile) -> bool:
    """Returns whether a tensor map brings raw rows."""
    return config.copies[0 if tile.operand == "k" else 1] == "map"


def copies_per_tile(config: DecodeConfig) -> int:
    """Returns how many copies bring one tile of K and V; tensor maps of bare elements bring one head at a time."""
    heads = [1 if isinstance(tile, RowTile) else config.mainloop.num_heads for tile in tiles_of(config)]
    tokens = [tokens_per_copy(config, tile) for tile in tiles_of(config)]
    return sum(h * -(-config.tile_tokens // t) for h, t in zip(heads, tokens, strict=True))


def map_problem(form: KvFormat, head_dim: int, num_heads: int) -> str | None:
    """Returns why no tensor map loads the rows of ``num_heads`` heads of a token, or None. Callers check the tokens'
    strides."""
    words = num_heads * form.row_bytes(head_dim) // WORD_BYTES
    if words + max(map_paddings(words)) > MAX_BOX:
        return f"a map of {num_heads} heads' rows of {form.name}: more than {MAX_BOX} words"
    return None


def lane_tokens(config: DecodeConfig) -> int:
    """Returns the tokens of a tile that one lane copies in bulk; they lie in one page. The lane at its start copies a
    longer run."""
    runs = [tokens_per_copy(config, tile) for tile in tiles_of(config) if isinstance(tile, RowTile)]
    if not runs:
        return min(config.page_tokens or config.tile_tokens, config.tile_tokens)
    even = 1 << (-(-config.tile_tokens // WARP_THREADS) - 1).bit_length()
    return max(even, min(runs))


def most_filling_warps(config: DecodeConfig) -> int:
    """Returns the most producer warps that all have something to copy in every whole tile."""
    if "word" in config.copies:
        return config.tile_tokens
    tma_tiles = [
        config.tile_tokens // tokens_per_copy(config, tile)
        for tile in tiles_of(config)
        if isinstance(tile, SwizzledTile)
    ]
    return max(config.tile_tokens // lane_tokens(config), *tma_tiles, 1)


def _tile(config: DecodeConfig, operand: str, load: CacheLoad) -> RowTile | SwizzledTile:
    form, head_dim = load.form, load.head_dim
    if not form.has_header:
        return SwizzledTile(head_dim, form.code_bits // 8, config.mainloop.num_heads, config.tile_tokens)
    kind = MappedTile if load.copy == "map" else RowTile
    return kind(
        head_dim,
        form.code_bits,
        form.header_words(head_dim),
        config.mainloop.num_heads,
        config.tile_tokens,
        operand,
        config.runs.contiguous,
        1 if load.copy == "word" else MAP_WORDS,
    )
