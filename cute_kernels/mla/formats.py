"""The formats of MLA caches: the bytes of a token, and where they lie in a page. A format is one object.

:mod:`layouts.kv.mla` describes and packs the bytes of a token. This module reads tokens from cache tensors, and writes
tokens to them. A cache is [num_pages, page_size, row], pages may be padded, and a slot is page * page_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from layouts.kv.mla import MlaDense, MlaFp8, MlaModel1

V_DIM = 512
"""The number of columns of a value, in every format: the first columns of a token."""
FP8_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.int8)  # a cache of bytes may come as any of them


@dataclass(frozen=True)
class MlaFormat:
    """One cache format.

    Attributes:
        name: the name that callers pass as ``kv_format``.
        q_dtype: dtype of the queries and of dequantised tokens.
        cache_dtypes: dtypes that a cache tensor may have.
        tokens: for each head_dim, the object of :mod:`layouts.kv` that describes a token.
        split_pages: whether a page holds first the data of all its tokens, then their scales. If not, it holds whole
            tokens.
    """

    name: str
    q_dtype: torch.dtype
    cache_dtypes: tuple[torch.dtype, ...]
    tokens: tuple[MlaFp8 | MlaModel1 | MlaDense, ...]
    split_pages: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether tokens are plain numbers, without codes and scales."""
        return self.q_dtype in self.cache_dtypes

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The numbers of columns that a token may have."""
        return tuple(token.head_dim for token in self.tokens)

    def token(self, head_dim: int) -> MlaFp8 | MlaModel1 | MlaDense:
        """Returns the token of ``head_dim`` columns; raises a ValueError that lists the known widths."""
        for token in self.tokens:
            if token.head_dim == head_dim:
                return token
        wanted = " or ".join(map(str, self.head_dims))
        raise ValueError(f"head_dim: got {head_dim}, want {wanted} for {self.name}")

    def row_elements(self, head_dim: int) -> int:
        """Returns the size of a cache's last dimension, in elements."""
        return head_dim if self.is_dense else self.token(head_dim).row_bytes

    def row_bytes(self, head_dim: int) -> int:
        """Returns the bytes of a token, scales included."""
        return self.token(head_dim).row_bytes

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Converts floating [..., head_dim] to tokens [..., row] of the format's first dtype.

        For split pages, the result has each token's data, then its scales, as in a page of one token.
        """
        rows = self.token(x.shape[-1]).quantize(x)
        return rows.view(self.cache_dtypes[0])

    def fetch(self, cache: torch.Tensor, slots: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Fetches dequantised tokens [*slots.shape, head_dim] of a cache [num_pages, page_size, row].

        slots: int64, page * page_size + offset, inside the cache.
        """
        pages, offsets = slots // cache.shape[1], slots % cache.shape[1]
        if self.is_dense:
            return cache[pages, offsets].to(dtype)
        rows = torch.cat([part[pages, offsets] for part in self._parts(cache)], dim=-1)
        return self.token(head_dim).dequantize(rows, dtype)

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes tokens [n, row], as `quantize` returns them, to slots int64 [n], which must be inside the cache."""
        pages, offsets = slots // cache.shape[1], slots % cache.shape[1]
        if self.is_dense:
            cache[pages, offsets] = rows
            return
        rows, first = rows.view(torch.uint8), 0
        for part in self._parts(cache):
            part[pages, offsets] = rows[:, first : first + part.shape[2]]
            first += part.shape[2]

    def _parts(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Returns views uint8 [num_pages, page_size, bytes] of a cache. Without split pages there is one view, of whole
        tokens. With split pages there are two, of the tokens' data and of their scales."""
        cache = cache.view(torch.uint8)
        if not self.split_pages:
            return [cache]
        num_pages, page_size, row = cache.shape
        data = MlaModel1.DATA_BYTES
        pages = cache.as_strided((num_pages, page_size * row), (cache.stride(0), 1))
        scales = pages[:, page_size * data :].unflatten(1, (page_size, row - data))
        return [pages[:, : page_size * data].unflatten(1, (page_size, data)), scales]


def _dense(name: str, dtype: torch.dtype) -> MlaFormat:
    return MlaFormat(f"mla_{name}", dtype, (dtype,), (MlaDense(name, 576), MlaDense(name, 512)))


FORMATS: dict[str, MlaFormat] = {
    form.name: form
    for form in (
        _dense("bf16", torch.bfloat16),
        _dense("fp16", torch.float16),
        MlaFormat("mla_fp8", torch.bfloat16, FP8_DTYPES, (MlaFp8(),)),
        MlaFormat("mla_model1", torch.bfloat16, FP8_DTYPES, (MlaModel1(),), split_pages=True),
    )
}


@lru_cache(maxsize=64)
def format_of(name: str) -> MlaFormat:
    """Returns the format called ``name``; raises a ValueError that lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"kv_format: got {name!r}, want one of {', '.join(FORMATS)}") from None
