"""Says which rows of caches decode attention's kernels can read, and which copies can load them into shared memory."""

from __future__ import annotations

from cute_kernels.formats.kv import GROUP_UNIT, HEAD_DIMS, KvFormat, format_of
from layouts.kv.tile import MMA_ROWS, WORD_BYTES, RowTile, run_codes

ROW_COPIES = ("bulk", "map", "word")
BARE_COPIES = ("tma",)
MAX_BOX = 256  # tokens, and words of a token, of one tensor-map copy
MAP_UNIT = 16  # bytes that what a tensor map brings of a token is a multiple of, and begins at a multiple of
MAP_WORDS = MAP_UNIT // WORD_BYTES
BLOCK_HEAD_DIMS = (64, 128)  # of formats in blocks: the lanes of a warp take whole header words, at most four each


def map_paddings(token_words: int) -> tuple[int, ...]:
    """Returns two choices of padding: the number of words that a tensor map loads for a token in addition to the
    ``token_words`` words of the CTA's heads.

    A tensor map loads whole vectors of four words, so it may also load words before the heads' words: none if
    token_words is a multiple of 4, up to two if it is another even number, else up to three. The first choice is the
    least padding. The second has one vector more, which may avoid bank conflicts.
    """
    before = {0: 0, 2: 2}.get(token_words % MAP_WORDS, MAP_WORDS - 1)
    least = -(-(token_words + before) // MAP_WORDS) * MAP_WORDS - token_words
    return least, least + MAP_WORDS


class MappedTile(RowTile):
    """Raw rows of some of a token's heads, and neighbouring words of the cache, as a tensor map loads them."""

    def copies(self) -> list[tuple[int, int]]:
        return [(1, padding) for padding in map_paddings(self.token_words)]


def copies_of(form: KvFormat) -> tuple[str, ...]:
    """Returns the names of the copies that can load a tile of the format into shared memory, as in `CacheLoad.copy`."""
    return ROW_COPIES if form.has_header else BARE_COPIES


def kernel_format(name: str) -> str:
    """Returns the name of the format whose kernels read caches of the format ``name``."""
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


def map_problem(form: KvFormat, head_dim: int, num_heads: int) -> str | None:
    """Returns why a tensor map cannot load a token's rows of ``num_heads`` heads, or None. Callers check the tokens'
    strides."""
    words = num_heads * form.row_bytes(head_dim) // WORD_BYTES
    if words + max(map_paddings(words)) > MAX_BOX:
        return f"a map of {num_heads} heads' rows of {form.name}: more than {MAX_BOX} words"
    return None
