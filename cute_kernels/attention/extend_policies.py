"""The policies that an extend attention kernel is composed of, as data. They say how tiles are loaded, where keys and
values lie, and what unpacks them. Constants that several policies use are here, too. There are no GPU types here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from cute_kernels.attention.policies import PAGE_TOKENS, joined
from cute_kernels.attention.tiles import kernel_format
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.kv import GROUP_UNIT, HEAD_DIMS, KvFormat, format_of
from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features

MMA_WARPGROUPS = 2  # consumers: 64 rows of queries each
WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64
TILE_ROWS = MMA_WARPGROUPS * WARPGROUP_ROWS  # packed queries of a work tile: positions x heads of a KV head's group
MMA_WARPS = MMA_WARPGROUPS * WARPGROUP_WARPS
MMA_THREADS = MMA_WARPS * WARP_THREADS
SLAB_COLUMNS = 64  # 16-bit columns of an operand that one 128-byte swizzle row holds
ELEMENT_BYTES = 2  # bytes of an operand's element; one in E4M3
ROW_BYTES = 128  # bytes of an operand's row in the 128-byte swizzle
WORK_SLOTS = 2
COUNTER_WORDS = 4  # words of a launch's workspace; the first one counts work tiles
WORK_BYTES = 32  # bytes of a slot: the 8 words of a `Work`
TILE_SCALE_BYTES = 16  # bytes for a tile: what `UnpackTarget` says, or a word of `powers.word_of` for each of its warps
OPERAND_COLUMNS = (64, 128, 256, 512)  # columns that an operand may have; zeros fill up what rows lack
EXTEND_HEAD_DIMS = HEAD_DIMS
# By operands' columns: accumulators of scores and of values fit a thread, two stages fit shared memory.
TILE_TOKENS = {64: 128, 128: 128, 256: 64, 512: 32}
SUM_COLUMNS = 256  # the most columns of V that a work tile adds up: 128 accumulators of a thread
FP8_HEAD_DIM = 128  # FP8 products want it: a row of K, and one of V's transposed tile, is a row of the swizzle
# Registers of a thread after setmaxnreg: producers, consumers. By what producers do, and how many warps they are.
REGISTERS = {("dense", 4): (40, 232), ("bytes", 4): (88, 208), ("int4", 4): (104, 200)}
REGISTERS |= {("bytes", 8): (56, 200), ("int4", 8): (64, 192)}
SM_REGISTERS = 65536
UNPACK_WARPS = 8  # warps of a CTA; they share a tile
UNPACK_CTAS_PER_SM = 4
KEY_ROWS_HEAD_DIM = 128  # key rows have keys as rows of MMAs and queries as columns: `.mainloops.key_rows`
SCALED_ROW_BYTES = 144  # key rows: all 16-byte pieces that a row of a scale and 128 codes of a byte may touch
PAIRED_ROW_BYTES = 272  # the same for the rows of two neighbouring heads of a token
PAIRED_NIBBLE_ROW_BYTES = 144  # the same for two rows of nibbles, each after a header of 4 bytes
HEADED_ROW_BYTES = 80  # bytes of a row of nibbles in four groups, headers and codes
FLAG_BYTES = 16  # bytes of key rows' flags: a word for each warpgroup, in a vector of 16
GROUP_TOKENS = 64  # tokens of a tile of key rows that one of two warpgroups takes
KEY_ROWS_WORDS = ("Int8Words", "E4m3Words", "E5m2Words", "Int4Words")  # classes of `.mainloops.key_rows.codes`
MOST_COLUMNS = 72  # columns (queries) whose scores and sums a thread has registers for
KEY_ROWS_FEATURES = ("causal", "window", "sinks", "paged", "head_major")  # features of attention that key rows have
KEY_ROWS_GROUPS = (1, 2, 4)  # groups of columns with scales of their own, for nibbles


def cannot_unpack(form: KvFormat) -> str | None:
    """Returns why a cache in ``form`` cannot be unpacked to 16-bit rows, or None. Extend attention has to read
    ``form``."""
    if not form.is_coded:
        return f"{form.name} rows are of 16 bits"
    if has_token_scale(form) and form.num_groups > 1:
        return f"{form.name} has {form.num_groups} scales a row"
    return None


def has_channel_scales(form: KvFormat) -> bool:
    """Returns whether a format has an fp32 scale beside the cache for every column of a KV head."""
    return form.given_scale == "channel"


def has_head_scale(form: KvFormat) -> bool:
    """Returns whether all rows of a KV head share one fp32 scale, which is stored beside the cache."""
    return form.given_scale in ("tensor", "head")


def has_token_scale(form: KvFormat) -> bool:
    """Returns whether extend attention multiplies rows by scales while it fills a tile. There is one scale for each row
    or group.
    """
    return form.extend is not None and form.extend.scales == "row"


def cannot_read(form: KvFormat) -> str | None:
    """Returns why extend attention cannot read rows of a format, or None."""
    if form.is_coded and form.extend is None:
        return f"extend attention does not read {form.name} caches"
    return None


def cannot_multiply_fp8(formats: tuple[KvFormat, KvFormat], head_dim: int) -> str | None:
    """Returns why FP8 products cannot be computed over caches of these formats, K's and V's; None if they can."""
    for form in formats:
        if form.codes != "e4m3" or form.extend is None or form.extend.scales != "outside":
            return f"FP8 products want e4m3_tensor or e4m3_head caches, not {form.name}"
    if head_dim != FP8_HEAD_DIM:
        return f"FP8 products want head_dim {FP8_HEAD_DIM}, not {head_dim}"
    return None


class ReadsCache:
    """The base of configurations that read rows of two cache formats, with the properties that follow from the formats.

    Attributes:
        k_format, v_format: names of the formats. head_dim: elements of a row of K or V.
    """

    k_format: str
    v_format: str
    head_dim: int

    @property
    def format_names(self) -> tuple[str, str]:
        """The names of K's and V's formats."""
        return self.k_format, self.v_format

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """K's and V's formats."""
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def columns(self) -> int:
        """Columns of operands in shared memory: head_dim, filled up with zeros."""
        return columns_of(self.head_dim)

    @property
    def value_parts(self) -> int:
        """Number of parts into which V's columns are cut. A work tile computes one part."""
        return 1

    @property
    def operand_columns(self) -> tuple[int, int]:
        """Columns of a tile of K, and of a tile of V."""
        return self.columns, self.columns // self.value_parts

    @property
    def tile_scales(self) -> tuple[bool, bool]:
        """Whether tiles of K have scales, and whether tiles of V have scales. A tile's scales are powers of 2, each for
        some of the tile's rows. A row is multiplied by its own scale divided by the power of 2.
        """
        return has_token_scale(self.formats[0]), has_token_scale(self.formats[1])

    def problem_of_rows(self) -> str | None:
        """Returns why rows cannot be read, or None."""
        for name, form in zip(self.format_names, self.formats, strict=True):
            if (reason := cannot_read(form)) is not None:
                return reason
            if kernel_format(name) != name:
                return f"{name} caches are read by the kernel for {kernel_format(name)}"
            if form.has_header and self.head_dim // form.num_groups % GROUP_UNIT:
                return f"groups of {self.head_dim // form.num_groups} columns are no multiple of {GROUP_UNIT}"
        return None


def columns_of(head_dim: int) -> int:
    """Returns the number of columns of operands for rows of ``head_dim``, one of `EXTEND_HEAD_DIMS`."""
    return min(columns for columns in OPERAND_COLUMNS if columns >= head_dim)


@dataclass(frozen=True)
class ProducerPipeline:
    """The pipeline in which tiles are loaded.

    Attributes:
        tile_tokens: number of tokens of a tile of K or V.
        num_stages: number of tiles of K, and of tiles of V, in shared memory.
        producer_warps: number of producer warps, 4 or 8. If producers decode, half of the warps decode K and half
            decode V.
    """

    tile_tokens: int = 128
    num_stages: int = 2
    producer_warps: int = 4


TWO_STAGES = ProducerPipeline()


@dataclass(frozen=True)
class CachedKeys:
    """The policy for K and V that are rows of a cache.

    Attributes:
        page_tokens: number of tokens of a page, which are contiguous; a power of two. 0 if all tokens of a request are
            contiguous.
        mapped: for :mod:`.mainloops.key_rows`, whether tensor maps load rows that have headers. If not, such rows are
            copied in pieces of 16 bytes, or word by word. Rows without headers are always loaded by maps.
    """

    page_tokens: int = 0
    mapped: bool = False


TOKEN_BY_TOKEN = CachedKeys()


@dataclass(frozen=True)
class RaggedKeys:
    """The policy for 16-bit K and V that are not in a cache. The tokens of all requests form one sequence, request by
    request, as queries do.
    """


@dataclass(frozen=True)
class UnpackConfig(ReadsCache):
    """One compiled variant of the kernel that makes :class:`UnpackedKeys` of a cache.

    Attributes:
        k_format, v_format: names of the cache's formats.
        dtype: the dtype of the unpacked rows, "fp16" or "e4m3". E4M3 codes are copied unchanged, with V's tiles
            transposed, see :mod:`.mainloops.fp8`.
        head_dim: elements of a row.
        page_tokens, head_major: as in :class:`CachedKeys` and in attention's features.
    """

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_unpack"
    use: ClassVar[Use] = "extend"
    features: ClassVar[Features] = PLAIN
    k_format: str
    v_format: str
    dtype: str
    head_dim: int
    page_tokens: int = 0
    head_major: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the unpacked rows."""
        return 1 if self.dtype == "e4m3" else ELEMENT_BYTES

    @property
    def tile_tokens(self) -> int:
        return TILE_TOKENS[self.columns]

    @property
    def warp_rows(self) -> int:
        """Number of rows of a tile that a warp unpacks."""
        return self.tile_tokens // UNPACK_WARPS

    @property
    def layout(self) -> str:
        """The part of kernels' names that says the cache's layout."""
        return (f"_p{self.page_tokens}" if self.page_tokens else "") + ("_head_major" if self.head_major else "")

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        formats = joined(self.k_format, self.v_format)
        return f"extend_unpack_{formats}_{self.dtype}_d{self.head_dim}{self.layout}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if (reason := self.problem_of_rows()) is not None:
            return reason
        if (reason := cannot_unpack(self.formats[0]) or cannot_unpack(self.formats[1])) is not None:
            return reason
        if self.dtype not in ("fp16", "e4m3"):
            return f"dtype {self.dtype!r} is not 'fp16' or 'e4m3'"
        if self.head_dim not in EXTEND_HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, EXTEND_HEAD_DIMS))}"
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        return cannot_multiply_fp8(self.formats, self.head_dim) if self.dtype == "e4m3" else None


@dataclass(frozen=True)
class UnpackedKeys:
    """The policy for K and V that :mod:`.loads.unpack` has converted from a cache to rows of 16 bits. Rows are ordered
    by request, head and token. Zeros fill a request's last tile.

    fp8: whether rows stay E4M3 codes, with V's tiles transposed, for FP8 MMAs.
    """

    fp8: bool = False


Keys: TypeAlias = CachedKeys | RaggedKeys | UnpackedKeys


@dataclass(frozen=True)
class KeyRows:
    """The sizes of the shared memory, in bytes, of a CTA whose MMAs have keys as rows and ``tile_rows`` queries as
    columns.

    Attributes:
        tile_bytes: bytes of the codes of a tile of K, and of a tile of V.
        header_bytes: bytes of the headers of a tile of K, and of a tile of V; 0 if headers lie beside the codes.
        heads: number of KV heads of a work tile.
    """

    tile_rows: int
    tile_bytes: tuple[int, int]
    header_bytes: tuple[int, int]
    heads: int = 1

    @property
    def query_bytes(self) -> int:
        """Bytes of a head's queries."""
        return self.tile_rows * KEY_ROWS_HEAD_DIM * ELEMENT_BYTES

    @property
    def probability_bytes(self) -> int:
        """Bytes of one of a warpgroup's two buffers of probabilities."""
        return self.tile_rows * GROUP_TOKENS * ELEMENT_BYTES

    @property
    def group_told_bytes(self) -> int:
        """Bytes of the values that the warps of a warpgroup exchange. Each query has one value from each warp, and one
        value for all warps together.
        """
        return 4 * self.tile_rows * (WARPGROUP_WARPS + 1)

    @property
    def told_bytes(self) -> int:
        return MMA_WARPGROUPS * self.group_told_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory besides the tiles."""
        places = 2 * MMA_WARPGROUPS * self.probability_bytes
        return self.heads * self.query_bytes + places + self.told_bytes + 4 * MMA_WARPS + FLAG_BYTES

    @property
    def stage_bytes(self) -> int:
        return sum(self.tile_bytes) + sum(self.header_bytes)
