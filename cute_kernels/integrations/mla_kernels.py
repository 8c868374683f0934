"""The kernels that the latent attention (MLA) of a served model needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cute_kernels.mla.compile import MlaSpec, combine_specs
from cute_kernels.mla.config import fits_tma_tiles
from cute_kernels.mla.formats import V_DIM as V_DIM
from cute_kernels.mla.schedule import Workload, choose
from cute_kernels.names import MlaFormatName
from cute_kernels.runtime.spec import KernelSpec

HEAD_DIM = 576  # latent and RoPE columns, which engines' FlashMLA backends take
MAX_HEADS = 128
PAGE_SIZE = 64  # of FlashMLA's backends; vLLM's FLASH_ATTN_MLA would have 16
FORMATS: dict[torch.dtype, MlaFormatName] = {torch.bfloat16: "mla_bf16", torch.float16: "mla_fp16"}
"""Formats of caches in 16 bits, by dtype."""


@dataclass(frozen=True)
class Decodes:
    """The decode steps of one kind of cache.

    Attributes:
        form: the cache's format.
        chosen: whether an indexer chooses the tokens that a query sees. If not, a query sees all tokens.
        num_heads: number of query heads of a token in a launch.
        rows: the numbers of requests that a step may have, or of new tokens if ``chosen``.
        q_lens: the numbers of new tokens that a request may have.
        tokens: the largest number of tokens that a request sees.
        page_size: number of tokens of a page.
    """

    form: str
    chosen: bool
    num_heads: int
    rows: tuple[int, ...]
    q_lens: tuple[int, ...]
    tokens: int
    page_size: int


def specs(decodes: Decodes, num_sms: int) -> list[KernelSpec]:
    """Returns the kernels of decode steps on a GPU with ``num_sms`` SMs."""
    tokens = "sparse" if decodes.chosen else "paged"
    tma_tiles = fits_tma_tiles(tokens, decodes.form, decodes.page_size)
    found: dict[KernelSpec, None] = {}
    for rows, heads in _row_shapes(decodes):
        shape = Workload(rows, heads, decodes.tokens, num_sms, tma_tiles)
        found[MlaSpec(choose(tokens, decodes.form, HEAD_DIM, shape)[0])] = None
    dtype = "fp16" if decodes.form == "mla_fp16" else "bf16"
    return [*found, *combine_specs(dtype)]


def _row_shapes(decodes: Decodes) -> Iterable[tuple[int, int]]:
    """Returns (number of rows, heads of a row) of each launch.

    If tokens are chosen, each query is a row, since its tokens differ. Otherwise all queries of a request share a row.
    """
    if decodes.chosen:
        return [(rows, decodes.num_heads) for rows in decodes.rows]
    return [(rows, q_len * decodes.num_heads) for rows in decodes.rows for q_len in decodes.q_lens]
