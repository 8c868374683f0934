"""KV cache formats of decode attention. A format is one object: its bytes, its shared-memory tile, how it is copied.

Adding a format is adding an object here and its reader (:mod:`cute_kernels.attention.readers`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from layouts.kv.dense_tile import DenseTile
from layouts.kv.int4 import Int4Row
from layouts.kv.tile import Int4Tile

if TYPE_CHECKING:
    from cute_kernels.attention.config import DecodeConfig


class KvFormat(Protocol):
    """What the op, the configuration and the reference need to know of a cache format."""

    @property
    def name(self) -> str: ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache tensors."""
        ...

    @property
    def copies(self) -> tuple[str, ...]:
        """Ways of bringing a tile into shared memory."""
        ...

    def row_elements(self, head_dim: int) -> int:
        """Elements (of ``cache_dtype``) of one row of the cache: one token of one KV head."""
        ...

    def row_bytes(self, head_dim: int) -> int: ...

    def tile_bytes(self, config: "DecodeConfig") -> int:
        """Shared memory of one operand of one tile."""
        ...

    def dequantize(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Cache rows [..., row] to elements [..., head_dim]."""
        ...


@dataclass(frozen=True)
class DenseFormat:
    """bf16 or fp16 elements as they are."""

    name: str
    cache_dtype: torch.dtype
    copies: tuple[str, ...] = ("tma",)

    def row_elements(self, head_dim: int) -> int:
        return head_dim

    def row_bytes(self, head_dim: int) -> int:
        return 2 * head_dim

    def tile_bytes(self, config: "DecodeConfig") -> int:
        return self.tile(config).num_bytes

    def tile(self, config: "DecodeConfig") -> DenseTile:
        return DenseTile(config.head_dim, config.num_heads, config.tile_tokens)

    def dequantize(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return rows.to(dtype)


@dataclass(frozen=True)
class Int4Format:
    """INT4 rows with ``num_groups`` (fp16 scale, fp16 shift) pairs in front: :class:`layouts.kv.int4.Int4Row`."""

    num_groups: int
    cache_dtype: torch.dtype = torch.uint8
    copies: tuple[str, ...] = ("bulk", "word")

    @property
    def name(self) -> str:
        return f"int4_g{self.num_groups}"

    def row(self, head_dim: int) -> Int4Row:
        return Int4Row(head_dim, self.num_groups)

    def row_elements(self, head_dim: int) -> int:
        return self.row_bytes(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        return 4 * self.num_groups + head_dim // 2

    def tile(self, config: "DecodeConfig") -> Int4Tile:
        return Int4Tile(
            config.head_dim,
            self.num_groups,
            config.num_heads,
            config.tile_tokens,
            config.contiguous,
            copy_words=4 if config.copy == "bulk" else 1,
        )

    def tile_bytes(self, config: "DecodeConfig") -> int:
        # Every tile starts on 128 bytes, which bulk copies like.
        return -(-self.tile(config).num_words * 4 // 128) * 128

    def dequantize(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return self.row(head_dim).dequantize(rows, dtype)


FORMATS: dict[str, KvFormat] = {
    fmt.name: fmt
    for fmt in (
        DenseFormat("bf16", torch.bfloat16),
        DenseFormat("fp16", torch.float16),
        *(Int4Format(groups) for groups in (1, 2, 4, 8)),
    )
}


def format_of(name: str) -> KvFormat:
    """The format called ``name``; ValueError lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"kv_format: got {name!r}, want one of {', '.join(FORMATS)}") from None
