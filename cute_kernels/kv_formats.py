"""KV cache formats: what a row of the cache holds. A format is one object; rooms that read or write caches import it.

A row is one token of one KV head: its bytes are described, packed and proved by :mod:`layouts.kv`. Scales lie in the
row, beside the cache (given to every call), or nowhere. How attention's kernels read a format is said by
:mod:`cute_kernels.attention.tiles` and the readers; how rows are written by :mod:`cute_kernels.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cute_kernels.names import KvFormatName
from layouts.kv.e5m2 import Fp8E5M2
from layouts.kv.int4 import Int4Row
from layouts.kv.scaled import IN_ROW, Fp8E4M3, Int8, ScaledRow

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Columns of the rows that the kernels are made for."""


class KvFormat(Protocol):
    """What everybody needs to know of a cache format."""

    @property
    def name(self) -> str: ...

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        """dtypes that a cache tensor may have; new caches get the first."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """The first of ``cache_dtypes``."""
        ...

    @property
    def given_scale(self) -> str | None:
        """Granularity of a scale that lies beside the cache ("tensor", "head" or "channel"), None without one."""
        ...

    def row_elements(self, head_dim: int) -> int:
        """Elements of one row of the cache: one token of one KV head."""
        ...

    def row_bytes(self, head_dim: int) -> int: ...

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [..., num_kv_heads, head_dim] to cache rows [..., num_kv_heads, row]."""
        ...

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Cache rows [..., num_kv_heads, row] to elements [..., num_kv_heads, head_dim]."""
        ...


class _Format:
    """What all formats share."""

    cache_dtypes: tuple[torch.dtype, ...]

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.cache_dtypes[0]


@dataclass(frozen=True)
class DenseFormat(_Format):
    """bf16 or fp16 elements as they are."""

    name: str
    dtype: torch.dtype
    given_scale: None = None

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    def row_elements(self, head_dim: int) -> int:
        return head_dim

    def row_bytes(self, head_dim: int) -> int:
        return 2 * head_dim

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return x.to(self.dtype)

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return rows.to(dtype)


@dataclass(frozen=True)
class Int4Format(_Format):
    """INT4 rows with ``num_groups`` (fp16 scale, fp16 shift) pairs in front: :class:`layouts.kv.int4.Int4Row`."""

    num_groups: int
    cache_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    given_scale: None = None

    @property
    def name(self) -> str:
        return f"int4_g{self.num_groups}"

    def row(self, head_dim: int) -> Int4Row:
        return Int4Row(head_dim, self.num_groups)

    def row_elements(self, head_dim: int) -> int:
        return self.row_bytes(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        return 4 * self.num_groups + head_dim // 2

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.row(x.shape[-1]).quantize(x)

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.row(head_dim).dequantize(rows, dtype)


_CODE_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class ByteFormat(_Format):
    """One byte per element: INT8 or E4M3 with a symmetric fp32 scale, or E5M2 without.

    Args:
        codes: "int8", "e4m3" or "e5m2".
        granularity: of the scale, see :data:`layouts.kv.scaled.GRANULARITIES`; None for E5M2.
        num_groups: scales of a row with granularity "group".

    Rows that hold nothing but codes may also come in the codes' own dtype.
    """

    codes: str
    granularity: str | None = None
    num_groups: int = 1

    @property
    def name(self) -> str:
        if self.granularity is None:
            return self.codes
        return f"{self.codes}_{f'g{self.num_groups}' if self.granularity == 'group' else self.granularity}"

    @property
    def header_bytes(self) -> int:
        """Bytes of scales in front of the codes of a row."""
        return 4 * self.num_groups if self.granularity in IN_ROW else 0

    @property
    def given_scale(self) -> str | None:
        return None if self.granularity is None or self.granularity in IN_ROW else self.granularity

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,) if self.header_bytes else (torch.uint8, _CODE_DTYPES[self.codes])

    def row(self, head_dim: int) -> ScaledRow | Fp8E5M2:
        """The row's bytes as an object of :mod:`layouts.kv`."""
        if self.granularity is None:
            return Fp8E5M2(head_dim)
        return {"int8": Int8, "e4m3": Fp8E4M3}[self.codes](head_dim, self.granularity, self.num_groups)

    def row_elements(self, head_dim: int) -> int:
        return self.row_bytes(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        return self.header_bytes + head_dim

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        row = self.row(x.shape[-1])
        return row.quantize(x, scale) if isinstance(row, ScaledRow) else row.quantize(x)

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        row, rows = self.row(head_dim), rows.view(torch.uint8)
        return row.dequantize(rows, dtype, scale) if isinstance(row, ScaledRow) else row.dequantize(rows, dtype)


FORMATS: dict[str, KvFormat] = {
    fmt.name: fmt
    for fmt in (
        DenseFormat("bf16", torch.bfloat16),
        DenseFormat("fp16", torch.float16),
        *(Int4Format(groups) for groups in (1, 2, 4, 8)),
        *(ByteFormat("int8", granularity) for granularity in ("tensor", "head", "channel", "token_head")),
        *(ByteFormat("int8", "group", groups) for groups in (2, 4, 8)),
        *(ByteFormat("e4m3", granularity) for granularity in ("tensor", "head", "token_head")),
        ByteFormat("e5m2"),
    )
}


ALIASES = {"int4": "int4_g4", "int8": "int8_token_head", "fp8": "e4m3_token_head"}
"""What is recommended of a kind, by the kind's name."""


def format_of(name: str) -> KvFormat:
    """The format called ``name``; ValueError lists the known names, TypeError says that it is no name."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        raise ValueError(f"kv_format: got {name!r}, want one of {', '.join((*FORMATS, *ALIASES))}") from None
    except TypeError:  # not hashable
        raise TypeError(f"kv_format: got {name!r}, want the name of a format") from None


def format_pair(kv_format: Any) -> tuple[KvFormatName, KvFormatName]:
    """The names of K's and V's format; TypeError unless ``kv_format`` is a name or a pair of names."""
    if isinstance(kv_format, str):
        return kv_format, kv_format  # pyright: ignore[reportReturnType]  # `format_of` says whether there is such a one
    if isinstance(kv_format, Sequence) and len(kv_format) == 2 and all(isinstance(name, str) for name in kv_format):
        return kv_format[0], kv_format[1]  # pyright: ignore[reportReturnType]
    raise TypeError(f"kv_format: got {kv_format!r}, want the name of a format or a pair of names (K's, V's)")
