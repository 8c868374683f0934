"""KV cache formats: what a row of the cache holds, and which code reads and writes it. A format is one object.

A row is one token of one KV head: its bytes are described, packed and proved by :mod:`layouts.kv`. Scales lie in the
row, beside the cache (given to every call), or nowhere. Families ask a format what it can do and never which one it
is; `register` adds one from any file, as docs/add_kv_format.md shows.

Device code is named as "module:attribute" and imported when a kernel is compiled: who loads kernels from a cache never
imports the compiler.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from cute_kernels.names import KvFormatName
from layouts.kv.channel_blocks import BLOCK_TOKENS, ChannelBlocks
from layouts.kv.e5m2 import Fp8E5M2
from layouts.kv.format import KvRow
from layouts.kv.int4 import Int4Row
from layouts.kv.scaled import IN_ROW, Fp8E4M3, Int8

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Columns of the rows that the kernels are made for."""

GIVEN_SCALES = ("tensor", "head", "channel")
"""Granularities of scales that lie beside a cache."""

GROUP_UNIT = 8
"""Columns: the narrowest group with a scale of its own that attention reads, half of what an MMA contracts."""

_WRITERS, _READERS = "cute_kernels.kv_cache.rows", "cute_kernels.attention.readers"


@dataclass(frozen=True)
class DecodeReader:
    """How decode attention makes MMA operands of a format's rows.

    Args:
        keys, values: places of the key reader and the value reader, see :mod:`cute_kernels.attention.readers`; None for
            values of a format that is for keys alone.
        cost: whose measured times the schedule goes by: "dense" (16 bits), "int4" or "byte".
        warpgroups: whether :mod:`cute_kernels.attention.warpgroup` multiplies such rows.
        codes: place of the class that makes fp16 numbers of codes, for the readers of :mod:`.readers.decoded`.
    """

    keys: str
    values: str | None
    cost: str = "byte"
    warpgroups: bool = False
    codes: str | None = None

    @classmethod
    def of_codes(cls, codes: str) -> DecodeReader:
        """Of rows that begin with an fp32 scale for each group, by a class that makes fp16 numbers of a run's words."""
        module = f"{_READERS}.decoded"
        return cls(f"{module}:DecodedKeyReader", f"{module}:DecodedValueReader", codes=codes)


@dataclass(frozen=True)
class ExtendReader:
    """How extend attention's producer warps make fp16 tiles of a format's codes.

    Args:
        words: place of the class that makes numbers of a word of codes, see :mod:`cute_kernels.extend.decode`.
        scales: "outside" the row, as a "row" scale (one fp32 number in front of the codes, which meets scores and
            probabilities), or in "groups" (a word in front for each group, which goes into the numbers).
        registers: which of `cute_kernels.extend.config.REGISTERS` the producers need: "bytes" or "int4".
        unit: what the tile's numbers are to be multiplied with.
    """

    words: str
    scales: str
    registers: str = "bytes"
    unit: float = 1.0


@dataclass(frozen=True)
class KvFormat:
    """One format of cache rows, of any head_dim.

    Args:
        name: a C identifier, unique.
        codes: what stands for an element: "bf16", "fp16" (the element itself), "u4", "int8", "e4m3", "e5m2" ...
        code_bits: bits of it.
        cache_dtypes: dtypes that a cache tensor may have; new caches get the first.
        make_row: head_dim to the row's bytes as an object of :mod:`layouts.kv`: what quantises, dequantises and packs,
            proves its layout and bounds its error. None where rows are the elements themselves.
        num_groups: groups of columns that have scales of their own in the row.
        header_bytes: bytes of scales in front of a row's codes: 4 for each group, or none.
        given_scale: granularity of a scale that lies beside the cache ("tensor", "head" or "channel"), or None.
        code_max: the largest code, which a scale maps the largest magnitude to; None without scales of that kind.
        writer: place of the class that quantises rows in registers, see :mod:`cute_kernels.kv_cache.rows`.
        decode: of decode attention; None: it cannot read such caches.
        extend: of extend attention; None: it cannot read such caches, unless they are of 16 bits.
        read_as: the format whose kernels read such caches, default this one.
        block_tokens: tokens, from a multiple of theirs on, whose rows of a head share their scales, one for each
            column. Such rows are written when the last of them is there; until then they wait in 16 bits
            (`layouts.kv.channel_blocks`). A row has a header word for so many columns. For keys alone.
        by_token: whether `append_kv` writes a token's row where the token is in the call, not where its position is in
            the cache: keys on their way to their block.
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
        """The first of ``cache_dtypes``."""
        return self.cache_dtypes[0]

    @property
    def is_coded(self) -> bool:
        """Whether rows hold codes, not the elements themselves."""
        return self.make_row is not None

    @property
    def has_header(self) -> bool:
        """Whether rows carry their scales; attention copies them as raw bytes then, bare elements by tensor maps."""
        return self.header_bytes > 0

    @property
    def kernel_name(self) -> str:
        """The format whose kernel reads such caches."""
        return self.read_as or self.name

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a cache goes with q, k and v of ``dtype``: rows of plain elements have just theirs."""
        return self.is_coded or self.cache_dtype == dtype

    def row(self, head_dim: int) -> KvRow:
        """The row's bytes at a head_dim; ValueError where there is no such row, or none but the elements."""
        if self.make_row is None:
            raise ValueError(f"{self.name}: rows are the elements themselves")
        return self.make_row(head_dim)

    @property
    def in_blocks(self) -> bool:
        """Whether tokens share scales, so that rows are written by blocks."""
        return self.block_tokens > 1

    def header_words(self, head_dim: int) -> int:
        """Words in front of a row's codes."""
        return head_dim // self.block_tokens if self.in_blocks else self.header_bytes // 4

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row."""
        return 4 * self.header_words(head_dim) + head_dim * self.code_bits // 8

    def row_elements(self, head_dim: int) -> int:
        """Elements of one row of the cache: one token of one KV head."""
        return self.row_bytes(head_dim) if self.is_coded else head_dim

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [..., num_kv_heads, head_dim] to cache rows [..., num_kv_heads, row]; of formats in blocks
        [..., tokens, num_kv_heads, head_dim], whole blocks."""
        if self.by_token:
            return ChannelBlocks(x.shape[-1]).waiting(x)
        if self.in_blocks:
            return self.row(x.shape[-1]).quantize(x.transpose(-2, -3), scale).transpose(-2, -3).contiguous()
        return self.row(x.shape[-1]).quantize(x, scale) if self.is_coded else x.to(self.cache_dtype)

    def dequantize(
        self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Cache rows [..., num_kv_heads, row] to elements [..., num_kv_heads, head_dim]; of formats in blocks
        [..., tokens, num_kv_heads, row], whole blocks."""
        if not self.is_coded:
            return rows.to(dtype)
        if self.in_blocks:
            blocks = self.row(head_dim).dequantize(rows.transpose(-2, -3), dtype, scale)
            return blocks.transpose(-2, -3).contiguous()
        return self.row(head_dim).dequantize(rows.view(torch.uint8), dtype, scale)

    def places(self) -> tuple[str, ...]:
        """Where the format's device code lies, as "module:attribute"."""
        decode = () if self.decode is None else (self.decode.keys, self.decode.values, self.decode.codes)
        extend = () if self.extend is None else (self.extend.words,)
        return tuple(place for place in (self.writer, *decode, *extend) if place is not None)


# -- device code ------------------------------------------------------------------------------------------------------


def load_code(place: str) -> Any:
    """The class at "module:attribute"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def modules_of(*names: str) -> tuple[str, ...]:
    """The modules outside this package that the device code of some formats lies in: what a process must import to
    compile kernels for them."""
    return tuple(name for name in _code_modules(*names) if name.partition(".")[0] != __package__)


def _code_modules(*names: str) -> tuple[str, ...]:
    places = (place for name in names for place in format_of(name).places())
    return tuple(dict.fromkeys(place.partition(":")[0] for place in places))


@functools.lru_cache(maxsize=256)
def sources_of(room: str, *names: str) -> tuple[Path, ...]:
    """The files that decide what the kernels of a room ("attention") for some formats compile to: this one, and those
    of the formats' device code in that room or outside this package."""
    modules = (
        *modules_of(*names),
        *(name for name in _code_modules(*names) if name.startswith(f"{__package__}.{room}.")),
    )
    found = [importlib.util.find_spec(module) for module in modules]
    return (Path(__file__).resolve(), *(Path(str(spec.origin)).resolve() for spec in found if spec is not None))


# -- the formats ------------------------------------------------------------------------------------------------------

_BYTE_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EXTEND_WORDS = {"int8": "Int8Words", "e4m3": "E4m3Words", "e5m2": "E5m2Words"}
_EXTEND_SCALES = {None: "outside", "tensor": "outside", "head": "outside", "token_head": "row"}
INT4_UNIT = 2.0  # of extend's tiles, which hold half of the values: fp16 has room for all that quantising makes


def _dense(name: str, dtype: torch.dtype) -> KvFormat:
    reader = DecodeReader(f"{_READERS}.dense:DenseKeyReader", f"{_READERS}.dense:DenseValueReader", "dense")
    return KvFormat(name, name, 16, (dtype,), f"{_WRITERS}:DenseRow", decode=reader)


def _int4(num_groups: int) -> KvFormat:
    """INT4 rows with ``num_groups`` (fp16 scale, fp16 shift) pairs in front: :class:`layouts.kv.int4.Int4Row`."""
    keys, values = f"{_READERS}.int4:Int4KeyReader", f"{_READERS}.int4:Int4ValueReader"
    return KvFormat(
        f"int4_g{num_groups}",
        "u4",
        4,
        (torch.uint8,),
        f"{_WRITERS}:NibbleRow",
        make_row=lambda head_dim: Int4Row(head_dim, num_groups),
        num_groups=num_groups,
        header_bytes=4 * num_groups,
        decode=DecodeReader(keys, values, "int4", warpgroups=num_groups == 1),
        extend=ExtendReader("cute_kernels.extend.decode:Int4Words", "groups", "int4", INT4_UNIT),
    )


def _bytes(codes: str, granularity: str | None = None, num_groups: int = 1) -> KvFormat:
    """One byte per element: INT8 or E4M3 with a symmetric fp32 scale, or E5M2 without.

    granularity: of the scale, see :data:`layouts.kv.scaled.GRANULARITIES`; None for E5M2. num_groups: scales of a row
    with granularity "group". Rows that hold nothing but codes may also come in the codes' own dtype.
    """

    def row(head_dim: int) -> KvRow:
        if granularity is None:
            return Fp8E5M2(head_dim)
        return {"int8": Int8, "e4m3": Fp8E4M3}[codes](head_dim, granularity, num_groups)

    in_row = granularity in IN_ROW
    of_rows = f"{_READERS}.bytes:{'Row' if in_row else 'Swizzled'}"
    suffix = "" if granularity is None else f"_g{num_groups}" if granularity == "group" else f"_{granularity}"
    scales = _EXTEND_SCALES.get(granularity)
    return KvFormat(
        codes + suffix,
        codes,
        8,
        (torch.uint8,) if in_row else (torch.uint8, _BYTE_DTYPES[codes]),
        f"{_WRITERS}:ByteRow",
        make_row=row,
        num_groups=num_groups,
        header_bytes=4 * num_groups if in_row else 0,
        given_scale=None if in_row else granularity,
        code_max={"int8": Int8.code_max, "e4m3": Fp8E4M3.code_max}.get(codes),
        decode=DecodeReader(f"{of_rows}KeyByteReader", f"{of_rows}ValueByteReader"),
        extend=None if scales is None else ExtendReader(f"cute_kernels.extend.decode:{_EXTEND_WORDS[codes]}", scales),
        # A scale per tensor is one per head that all heads share.
        read_as=f"{codes}_tensor" if granularity == "head" else None,
    )


FORMATS: dict[str, KvFormat] = {
    form.name: form
    for form in (
        _dense("bf16", torch.bfloat16),
        _dense("fp16", torch.float16),
        *(_int4(groups) for groups in (1, 2, 4, 8)),
        *(_bytes("int8", granularity) for granularity in ("tensor", "head", "channel", "token_head")),
        *(_bytes("int8", "group", groups) for groups in (2, 4, 8)),
        *(_bytes("e4m3", granularity) for granularity in ("tensor", "head", "token_head")),
        _bytes("e5m2"),
    )
}
"""The formats that ship, by name."""


ALIASES = {"int4": "int4_g4", "int8": "int8_token_head", "fp8": "e4m3_token_head"}
"""What is recommended of a kind, by the kind's name."""

_registered: dict[str, KvFormat] = {}  # formats from elsewhere, and those in blocks


def register(form: KvFormat) -> KvFormat:
    """Makes a format known by its name to every function that takes ``kv_format``; returns it.

    Registering an equal one again changes nothing.

    Raises:
        ValueError: the name is another format's, or a row at some head_dim has not the bytes that the format says.
    """
    taken = FORMATS.get(form.name) or _registered.get(form.name)
    if form.name in ALIASES or (taken is not None and taken != form):
        raise ValueError(f"name: got {form.name!r}, which is the name of another format")
    for head_dim in HEAD_DIMS if form.make_row is not None else ():
        try:
            row = form.row(head_dim)
        except ValueError:
            continue  # no such rows
        if row.row_bytes != form.row_bytes(head_dim):
            raise ValueError(
                f"make_row: got {row.row_bytes} bytes at head_dim {head_dim}, want {form.row_bytes(head_dim)}: "
                f"{form.header_bytes} bytes in front of {head_dim} codes of {form.code_bits} bits"
            )
    return _registered.setdefault(form.name, form)


def names() -> tuple[str, ...]:
    """Of all formats, those that ship first."""
    return (*FORMATS, *(name for name, form in _registered.items() if not form.by_token))


def format_of(name: str) -> KvFormat:
    """The format called ``name``; ValueError lists the known names, TypeError says that it is no name."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        if name in _registered:
            return _registered[name]
        known = (*names(), *ALIASES)
        raise ValueError(f"kv_format: got {name!r}, want one of {', '.join(known)}") from None
    except TypeError:  # not hashable
        raise TypeError(f"kv_format: got {name!r}, want the name of a format") from None


def format_pair(kv_format: object) -> tuple[KvFormatName, KvFormatName]:
    """The names of K's and V's format; TypeError unless ``kv_format`` is a name or a pair of names."""
    if isinstance(kv_format, str):
        name = cast("KvFormatName", kv_format)  # `format_of` says whether there is such a one
        return name, name
    if isinstance(kv_format, Sequence) and len(kv_format) == 2 and all(isinstance(name, str) for name in kv_format):
        return cast("tuple[KvFormatName, KvFormatName]", tuple(kv_format))
    raise TypeError(f"kv_format: got {kv_format!r}, want the name of a format or a pair of names (K's, V's)")


# -- in blocks --------------------------------------------------------------------------------------------------------

CHANNEL_BLOCKS = register(
    KvFormat(
        "int4_channel32",
        "u4",
        4,
        (torch.uint8,),
        "cute_kernels.kv_cache.channel_blocks_kernel:ColumnPair",
        make_row=ChannelBlocks,
        header_bytes=4,
        decode=DecodeReader(f"{_READERS}.channel_blocks:ChannelBlockKeyReader", None, "int4"),
        block_tokens=BLOCK_TOKENS,
    )
)
"""KIVI's grid of keys. Beside `FORMATS`, of which more holds: a row is written with its token, and may be V's."""

WAITING = register(KvFormat("fp16_waiting", "fp16", 16, (torch.float16,), f"{_WRITERS}:WaitingRow", by_token=True))
"""Keys as `append_kv` leaves them to the kernel that fills blocks: [tokens, 1, num_kv_heads, head_dim]."""
