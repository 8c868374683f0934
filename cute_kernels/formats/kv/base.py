"""`KvFormat`, the object that describes a KV cache format and what it supports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from layouts.kv.channel_blocks import ChannelBlocks
from layouts.kv.format import KvRow

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
"""The numbers of columns of cache rows that decode attention and appends support."""

GIVEN_SCALES = ("tensor", "head", "channel")
"""The granularities of scales that lie beside a cache."""

GROUP_UNIT = 8
"""Columns of the narrowest group with its own scale that attention reads: half the K of an MMA."""

WRITERS, READERS = "cute_kernels.kv_cache.rows", "cute_kernels.attention.readers"
"""Modules of device code that formats name."""


Use = Literal["write", "decode", "extend"]
"""The uses of a format's rows, each with its own device code."""


@dataclass(frozen=True)
class DecodeReader:
    """The device code by which decode attention turns a format's rows into MMA operands.

    Args:
        keys, values: import paths of the readers of keys and of values, see :mod:`cute_kernels.attention.readers`.
            ``values`` is None for a format of keys alone.
        cost: the kind of format whose measured times the schedule uses: "dense" (16 bits), "int4" or "byte".
        codes: import path of the class that converts codes to fp16, for the readers of :mod:`.readers.decoded`.
    """

    keys: str
    values: str | None
    cost: str = "byte"
    codes: str | None = None

    @classmethod
    def of_codes(cls, codes: str) -> DecodeReader:
        """Makes the reader of rows that begin with an fp32 scale for each group. ``codes``: import path of the class
        that converts words of codes to fp16."""
        module = f"{READERS}.decoded"
        return cls(f"{module}:DecodedKeyReader", f"{module}:DecodedValueReader", codes=codes)


@dataclass(frozen=True)
class ExtendReader:
    """The device code by which extend attention's producer warps turn a format's codes into fp16 tiles.

    Args:
        words: import path of the class that converts a word of codes, see `cute_kernels.attention.loads.rows`.
        scales: where scales are stored, and what they multiply. "outside": they are not in the cache; scales of
            channels multiply queries and the output. "row": fp32 numbers in front of a row's codes. A row's single
            scale multiplies scores and probabilities; scales of groups multiply the decoded numbers. "groups": a word
            in front of a row's codes for each group, applied to the decoded numbers.
        registers: which of `cute_kernels.attention.extend_config.REGISTERS` the producers need: "bytes" or "int4".
        unit: the value that a 1 in the fp16 tile stands for.
    """

    words: str
    scales: str
    registers: str = "bytes"
    unit: float = 1.0


@dataclass(frozen=True)
class KvFormat:
    """One format of cache rows, for any head_dim.

    Args:
        name: a C identifier, unique.
        codes: the stored type of an element: "bf16" or "fp16" for the element itself, or a type of codes such as "u4",
            "int8", "e4m3", "e5m2".
        code_bits: bits of a stored element.
        cache_dtypes: dtypes that a cache tensor may have; new caches get the first.
        make_row: a function of head_dim that returns the row as an object of :mod:`layouts.kv`, which quantises,
            dequantises, packs, proves its layout and bounds its error. None if rows are the elements themselves.
        num_groups: number of groups of columns in a row. Each group has its own scales in the row.
        header_bytes: bytes of scales in front of a row's codes: 4 for each group, or 0.
        given_scale: granularity of a scale that is an argument of each call ("tensor", "head" or "channel"), or None.
        code_max: the largest code, to which scales map the largest magnitude. None for formats without such scales.
        writer: import path of the class that quantises rows in registers, see :mod:`cute_kernels.kv_cache.rows`.
        decode: the reader of decode attention; None if decode attention cannot read such caches.
        extend: the reader of extend attention. None for 16-bit elements, which need no reader, and for formats that
            extend attention cannot read.
        read_as: the format whose kernels read such caches; default: this format.
        block_tokens: number of neighbouring tokens of a head in a block. They share scales, one for each column. Blocks
            begin at multiples of this number. A block's rows are written when its last token arrives; until then its
            tokens wait in 16 bits (`layouts.kv.channel_blocks`). A row has a header word for every ``block_tokens``
            columns. For keys alone.
        by_token: whether rows are stored in the order of a call's tokens, not by position. `append_kv` uses such a
            format to pass keys to the kernel that fills blocks.
    """

    name: str
    codes: str
    code_bits: int
    cache_dtypes: tuple[torch.dtype, ...]
    writer: str
    make_row: Callable[[int], KvRow] | None = field(default=None, compare=False, repr=False)
    num_groups: int = 1
    header_bytes: int = 0
    given_scale: str | None = None
    code_max: float | None = None
    decode: DecodeReader | None = None
    extend: ExtendReader | None = None
    read_as: str | None = None
    block_tokens: int = 1
    by_token: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name):
            raise ValueError(f"name: got {self.name!r}, want a C identifier")
        if self.header_bytes not in (0, 4 * self.num_groups):
            raise ValueError(f"header_bytes: got {self.header_bytes}, want 0 or 4 for each of {self.num_groups} groups")
        if self.given_scale not in (None, *GIVEN_SCALES) or (self.given_scale and self.header_bytes):
            raise ValueError(
                f"given_scale: got {self.given_scale!r} with {self.header_bytes} header_bytes, want None or, "
                f"without any, one of {GIVEN_SCALES}"
            )
        if (self.make_row is None) != (self.codes in ("bf16", "fp16")):
            raise ValueError(
                f"make_row: want what makes rows of {self.codes} codes, and none for rows of plain elements"
            )

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of new caches: the first of ``cache_dtypes``."""
        return self.cache_dtypes[0]

    @property
    def is_coded(self) -> bool:
        """Whether rows hold codes, not the elements themselves."""
        return self.make_row is not None

    @property
    def has_header(self) -> bool:
        """Whether rows hold their scales. Attention copies such rows as raw bytes. It copies rows without scales by
        tensor maps."""
        return self.header_bytes > 0

    @property
    def kernel_name(self) -> str:
        """The name of the format whose kernels read such caches."""
        return self.read_as or self.name

    def fits(self, dtype: torch.dtype) -> bool:
        """Returns whether a cache of the format can be used with q, k and v of ``dtype``. A cache of plain elements
        must have the same dtype."""
        return self.is_coded or self.cache_dtype == dtype

    def row(self, head_dim: int) -> KvRow:
        """Returns the row object at a head_dim. Raises ValueError if the format has no such row, or if rows are plain
        elements."""
        if self.make_row is None:
            raise ValueError(f"kv_format: got {self.name!r}, whose rows are plain elements, want a format of codes")
        return self.make_row(head_dim)

    @property
    def in_blocks(self) -> bool:
        """Whether tokens share scales. Their rows are then written a block at a time."""
        return self.block_tokens > 1

    def header_words(self, head_dim: int) -> int:
        """Returns the number of header words in front of a row's codes."""
        return head_dim // self.block_tokens if self.in_blocks else self.header_bytes // 4

    def row_bytes(self, head_dim: int) -> int:
        """Returns the bytes of a row."""
        return 4 * self.header_words(head_dim) + head_dim * self.code_bits // 8

    def row_elements(self, head_dim: int) -> int:
        """Returns the number of elements of one row of the cache: one token of one KV head."""
        return self.row_bytes(head_dim) if self.is_coded else head_dim

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts elements [..., num_kv_heads, head_dim] to cache rows [..., num_kv_heads, row]. For formats in blocks
        x is [..., tokens, num_kv_heads, head_dim], with whole blocks of tokens."""
        if self.by_token:
            return ChannelBlocks(x.shape[-1]).waiting(x)
        if self.in_blocks:
            return self.row(x.shape[-1]).quantize(x.transpose(-2, -3), scale).transpose(-2, -3).contiguous()
        return self.row(x.shape[-1]).quantize(x, scale) if self.is_coded else x.to(self.cache_dtype)

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts cache rows [..., num_kv_heads, row] to elements [..., num_kv_heads, head_dim]. For formats in blocks
        rows are [..., tokens, num_kv_heads, row], with whole blocks of tokens."""
        if not self.is_coded:
            return rows.to(dtype)
        if self.in_blocks:
            blocks = self.row(head_dim).dequantize(rows.transpose(-2, -3), dtype, scale)
            return blocks.transpose(-2, -3).contiguous()
        return self.row(head_dim).dequantize(rows.view(torch.uint8), dtype, scale)

    def places(self, *uses: Use) -> tuple[str, ...]:
        """Returns the import paths ("module:attribute") of the format's device code for some uses ("write", "decode",
        "extend"). Without arguments it returns those for all uses."""
        decode = () if self.decode is None else (self.decode.keys, self.decode.values, self.decode.codes)
        extend = () if self.extend is None else (self.extend.words,)
        by_use: dict[Use, tuple[str | None, ...]] = {"write": (self.writer,), "decode": decode, "extend": extend}
        return tuple(place for use in uses or by_use for place in by_use[use] if place is not None)
