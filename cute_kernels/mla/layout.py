"""The layout of a token: which bytes of the token become which columns of a tile. No GPU types here.

The layout is derived from the format's description in :mod:`layouts.kv.mla`. A tile is made of slabs of 64 columns,
[tokens, 64] each: the latent columns' slabs, then the RoPE columns' slab. If keys have 512 columns, the RoPE slab is
part of the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cute_kernels.mla.formats import V_DIM, format_of
from layouts.kv.mla import MlaDense

SLAB_COLUMNS = 64
VALUE_SLABS = V_DIM // SLAB_COLUMNS
HALF_SLABS = VALUE_SLABS // 2  # of the value, that a warpgroup multiplies


@dataclass(frozen=True)
class TokenLayout:
    """The layout of a token in one format and one width.

    Attributes:
        dtype: dtype of queries, tiles and results, "bf16" or "fp16".
        num_slabs: number of slabs of a key.
        data_bytes: number of a token's contiguous bytes. In split pages the token's scales are not among them.
        code_slabs: how many of a key's slabs, from the first on, are stored as E4M3 codes; 0 for 16-bit tokens.
        rope_offset: the RoPE columns' first byte in an FP8 token.
        num_scales: number of scales of a token. Each belongs to the same number of code slabs.
        scale_bytes: number of bytes of all scales of a token, which are loaded at once.
        scales_offset: the scales' first byte in the token; None for split pages.
    """

    dtype: str
    num_slabs: int
    data_bytes: int
    code_slabs: int = 0
    rope_offset: int = 0
    num_scales: int = 0
    scale_bytes: int = 0
    scales_offset: int | None = None

    @property
    def slabs_per_scale(self) -> int:
        return self.code_slabs // self.num_scales

    @property
    def is_split(self) -> bool:
        """Whether a token's scales lie after the data of all tokens of its page."""
        return self.num_scales > 0 and self.scales_offset is None

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slabs of the two parts of a tile. Each part may be loaded and released separately. The first part is the
        left half of the value and the columns after the value. The second part is the right half of the value."""
        behind = range(VALUE_SLABS, self.num_slabs)
        return (*behind, *range(HALF_SLABS)), tuple(range(HALF_SLABS, VALUE_SLABS))

    @property
    def score_runs(self) -> tuple[tuple[int, int], ...]:
        """Runs (first slab, number of slabs) in the order of the scores' MMAs: the left half of the value, the columns
        after the value, the right half."""
        behind = ((VALUE_SLABS, self.num_slabs - VALUE_SLABS),) if self.num_slabs > VALUE_SLABS else ()
        return ((0, HALF_SLABS), *behind, (HALF_SLABS, HALF_SLABS))


@lru_cache(maxsize=64)
def layout_of(form: str, head_dim: int) -> TokenLayout:
    """Returns the token's layout in the format called ``form``; raises ValueError for an unknown name or width."""
    token = format_of(form).token(head_dim)
    if isinstance(token, MlaDense):
        return TokenLayout(token.dtype, head_dim // SLAB_COLUMNS, token.row_bytes)
    split = format_of(form).split_pages
    fields = {field.name: field for field in token.fields}
    scales = fields["scales"].offset
    return TokenLayout(
        dtype="bf16",
        num_slabs=head_dim // SLAB_COLUMNS,
        data_bytes=scales if split else token.row_bytes,
        code_slabs=token.latent_dim // SLAB_COLUMNS,
        rope_offset=fields["rope"].offset,
        num_scales=token.num_tiles,
        scale_bytes=token.row_bytes - scales if split else fields["scales"].num_bytes,
        scales_offset=None if split else scales,
    )
