"""Every compile-time choice of the extend attention kernel, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.attention.features import PLAIN, Features
from cute_kernels.attention.policies import PAGE_TOKENS, joined
from cute_kernels.attention.tiles import kernel_format
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.kv_formats import GROUP_UNIT, KvFormat, format_of

MMA_WARPGROUPS = 2  # consumers: 64 rows of queries each
WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64
TILE_ROWS = MMA_WARPGROUPS * WARPGROUP_ROWS  # packed queries of a work tile: positions x heads of a KV head's group
MMA_WARPS = MMA_WARPGROUPS * WARPGROUP_WARPS
MMA_THREADS = MMA_WARPS * WARP_THREADS
SLAB_COLUMNS = 64  # of an operand in the 128-byte swizzle
ELEMENT_BYTES = 2  # of operands, but for those of E4M3
ROW_BYTES = 128  # of an operand's row in the 128-byte swizzle
WORK_SLOTS = 2
# Words of a launch's workspace: the counter of work tiles is the first; where a cache is unpacked beside the products,
# see `extend.progress`, these and two for each block of a request's KV head.
COUNTER_WORDS, CHUNK_WORD, LEAVING_WORD, TILE_WORDS_AT = 4, 1, 2, 4
WORK_BYTES = 32  # of a slot: 8 words
TILE_SCALE_BYTES = 16  # of a tile: what `UnpackTarget` says of it, or a word of `powers.word_of` for each of its warps
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
OPERAND_COLUMNS = (64, 128, 256)  # that operands may have; zeros fill up what rows lack
TILE_TOKENS = {64: 128, 128: 128, 256: 64}  # by operands' columns: accumulators of scores and of values fit a thread
FP8_HEAD_DIM = 128  # of FP8 products: a row of K, and one of V's transposed tile, is a row of the swizzle
# Registers of a thread after setmaxnreg: producers, consumers. By what producers do, and how many warps they are.
REGISTERS = {("dense", 4): (40, 232), ("fp8", 4): (24, 240), ("bytes", 4): (88, 208), ("int4", 4): (104, 200)}
REGISTERS |= {("bytes", 8): (56, 200), ("int4", 8): (64, 192), ("unpacks", 4): (72, 216)}
SM_REGISTERS = 65536
KEY_ROWS_HEAD_DIM = 128  # where keys are rows of products and queries their columns: see `extend.key_rows`
SCALED_ROW_BYTES = (
    144  # of a row of bytes behind its scale, in shared memory there: what pieces of 16 bytes it may touch
)
HEADED_ROW_BYTES = 80  # of a row of nibbles of four groups, headers and codes
GROUP_TOKENS = 64  # of a tile, that one of two warpgroups takes there
KEY_ROWS_WORDS = ("Int8Words", "E4m3Words", "E5m2Words", "Int4Words")  # of `extend.decode`, that it knows
MOST_COLUMNS = 72  # whose scores and sums a thread has registers for
KEY_ROWS_FEATURES = ("causal", "window", "sinks", "paged", "head_major")  # of attention, that it serves
KEY_ROWS_GROUPS = (1, 2, 4)  # of columns with scales of their own, of nibbles


def has_token_scale(form: KvFormat) -> bool:
    """Whether every row has an fp32 scale, which is multiplied into its tile."""
    return form.extend is not None and form.extend.scales == "row"


def cannot_read(form: KvFormat) -> str | None:
    """Why the kernel cannot read rows of a format, or None."""
    if form.is_coded and form.extend is None:
        return f"extend attention does not read {form.name} caches"
    return None


def cannot_multiply_fp8(formats: tuple[KvFormat, KvFormat], head_dim: int) -> str | None:
    """Why there are no FP8 products over caches of K's and V's formats, or None."""
    for form in formats:
        if form.codes != "e4m3" or form.extend is None or form.extend.scales != "outside":
            return f"FP8 products want e4m3_tensor or e4m3_head caches, not {form.name}"
    if head_dim != FP8_HEAD_DIM:
        return f"FP8 products want head_dim {FP8_HEAD_DIM}, not {head_dim}"
    return None


def columns_of(head_dim: int) -> int:
    """Of the operands that hold rows of head_dim, one of `HEAD_DIMS`."""
    return min(columns for columns in OPERAND_COLUMNS if columns >= head_dim)


@dataclass(frozen=True)
class ProducerPipeline:
    """How tiles come and how consumers take turns.

    Attributes:
        tile_tokens: keys and values of a tile.
        num_stages: tiles of K, and of V, in shared memory.
        producer_warps: 4 or 8; those that decode are half K's, half V's.
        ping_pong: whether the consumers take turns issuing their products.
    """

    tile_tokens: int = 128
    num_stages: int = 2
    producer_warps: int = 4
    ping_pong: bool = True


@dataclass(frozen=True)
class CachedKeys:
    """K and V are rows of a cache: of pages in which ``page_tokens`` tokens certainly lie together, a power of two; or,
    with 0, one request's tokens after the other.

    mapped: for :mod:`.key_rows`, whether tensor maps bring rows with what is in front of them, as they lie; without,
    these come by pieces of 16 bytes, or of words. Rows of codes alone come by maps anyhow.
    """

    page_tokens: int = 0
    mapped: bool = False


@dataclass(frozen=True)
class RaggedKeys:
    """K and V are those of all requests one after the other, as the queries are; of 16 bits."""


@dataclass(frozen=True)
class Fp8Products:
    """How E4M3 operands are multiplied, see :mod:`.two_level`.

    behind: whether the values of a block are multiplied behind the next one's softmax, in accumulators beside its
    scores and the sums; else before its scores, whose registers they have.
    """

    behind: bool


@dataclass(frozen=True)
class UnpackedKeys:
    """K and V are what :mod:`.unpack` has made of a cache: rows of 16 bits, one request's after the other and head by
    head, with zeros behind a request's last token up to the end of its tile.

    fp8: if given, they stay codes of E4M3, V's tiles transposed, and products are of 8 bits.
    beside: if given, what idle producer warps make them of, beside the products; else a launch of its own does before.
    """

    fp8: Fp8Products | None = None
    beside: UnpackConfig | None = None


@dataclass(frozen=True)
class KeyRows:
    """Shared memory of a CTA that multiplies keys, as rows, with ``tile_rows`` queries; bytes.

    Attributes:
        tile_bytes: of K's codes and of V's. header_bytes: of what is in front of their rows, unless it lies with them.
    """

    tile_rows: int
    tile_bytes: tuple[int, int]
    header_bytes: tuple[int, int]

    @property
    def query_bytes(self) -> int:
        return self.tile_rows * KEY_ROWS_HEAD_DIM * ELEMENT_BYTES

    @property
    def probability_bytes(self) -> int:
        """Of one of the two places that a warpgroup has."""
        return self.tile_rows * GROUP_TOKENS * ELEMENT_BYTES

    @property
    def group_told_bytes(self) -> int:
        """What warps of a warpgroup tell each other: a number of each warp and one of all, for each query."""
        return 4 * self.tile_rows * (WARPGROUP_WARPS + 1)

    @property
    def told_bytes(self) -> int:
        return MMA_WARPGROUPS * self.group_told_bytes

    @property
    def fixed_bytes(self) -> int:
        """Beside tiles."""
        places = 2 * MMA_WARPGROUPS * self.probability_bytes
        return self.query_bytes + places + self.told_bytes + 4 * MMA_WARPS

    @property
    def stage_bytes(self) -> int:
        return sum(self.tile_bytes) + sum(self.header_bytes)


Keys: TypeAlias = CachedKeys | RaggedKeys | UnpackedKeys


@dataclass(frozen=True)
class ExtendConfig:
    """One compiled variant.

    A CTA has two consumer warpgroups, which multiply 64 rows of queries each, and producer warps that fill tiles of
    keys and values: one or two of them by tensor maps where keys come in 16 bits, all of them by decoding rows where
    they are codes.

    Attributes:
        k_format, v_format: names of the cache formats, see :mod:`cute_kernels.kv_formats`; both 16 bits, or both codes.
            Of unpacked keys: what they were.
        q_dtype: "bf16" or "fp16", of q and out; that of a 16-bit cache.
        head_dim: of q, K, V and out.
        pipeline: tiles, stages, warps.
        keys: where K and V lie.
        features: what of attention it computes beyond softmax(q K^T) V.
        merges: whether the result is merged with that of another launch over other keys.
        tree: whether a mask says which of a request's new tokens a query sees, instead of their order.
        tile_rows: packed queries of a work tile. Fewer than 128 are columns of products whose rows are keys, see
            :mod:`.key_rows`.
    """

    limits: ClassVar[Limits] = HOPPER
    k_format: str
    v_format: str
    q_dtype: str
    head_dim: int
    pipeline: ProducerPipeline = ProducerPipeline()
    keys: Keys = CachedKeys()
    features: Features = PLAIN
    merges: bool = False
    tree: bool = False
    tile_rows: int = TILE_ROWS

    @property
    def key_rows(self) -> KeyRows | None:
        """Of products whose rows are keys; None where they are queries."""
        if self.tile_rows == TILE_ROWS:
            return None
        rows, headers = zip(*map(self._key_rows_of, self.formats), strict=True)
        tokens = self.tile_tokens
        return KeyRows(self.tile_rows, (tokens * rows[0], tokens * rows[1]), (tokens * headers[0], tokens * headers[1]))

    def _key_rows_of(self, form: KvFormat) -> tuple[int, int]:
        """Bytes in shared memory of a row's codes, and of what lies in front of them if that lies elsewhere."""
        if form.code_bits == 8 and form.header_bytes:
            return SCALED_ROW_BYTES, 0
        codes = self.head_dim * form.code_bits // 8
        if codes + form.header_bytes == HEADED_ROW_BYTES:
            return HEADED_ROW_BYTES, 0
        return codes, form.header_bytes

    @property
    def tile_tokens(self) -> int:
        return self.pipeline.tile_tokens

    @property
    def num_stages(self) -> int:
        return self.pipeline.num_stages

    @property
    def producer_warps(self) -> int:
        return self.pipeline.producer_warps

    @property
    def ping_pong(self) -> bool:
        return self.pipeline.ping_pong

    @property
    def page_tokens(self) -> int:
        """Of :class:`CachedKeys`; 0 without pages."""
        return self.keys.page_tokens if isinstance(self.keys, CachedKeys) else 0

    @property
    def mapped(self) -> bool:
        """Of :class:`CachedKeys`."""
        return isinstance(self.keys, CachedKeys) and self.keys.mapped

    @property
    def takes_table(self) -> bool:
        """Whether a launch finds pages."""
        return self.page_tokens > 0 or (self.unpacks is not None and self.unpacks.page_tokens > 0)

    @property
    def ragged(self) -> bool:
        return isinstance(self.keys, RaggedKeys)

    @property
    def unpacked(self) -> bool:
        return isinstance(self.keys, UnpackedKeys)

    @property
    def fp8(self) -> Fp8Products | None:
        """How products of 8 bits are made; None for those of 16."""
        return self.keys.fp8 if isinstance(self.keys, UnpackedKeys) else None

    @property
    def unpacks(self) -> UnpackConfig | None:
        """What producer warps that fill no tiles make of a cache meanwhile; None where its rows are there before."""
        return self.keys.beside if isinstance(self.keys, UnpackedKeys) else None

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """Of K and of V."""
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def coded(self) -> bool:
        """Whether the cache holds codes."""
        return self.formats[0].is_coded

    @property
    def decodes(self) -> bool:
        """Whether producers decode rows; else K and V come in 16 bits."""
        return self.coded and not self.unpacked

    @property
    def tile_warps(self) -> int:
        """Producer warps that decode a tile of K, or of V."""
        return self.producer_warps // 2

    @property
    def warp_rows(self) -> int:
        """Rows of a tile that a producer warp decodes."""
        return self.tile_tokens // self.tile_warps

    @property
    def filling_warps(self) -> int:
        """Producer warps that do something."""
        if self.decodes:
            return self.producer_warps
        return 2 if self.page_tokens else 1  # one for K, one for V where a tile is many TMA tiles

    @property
    def unpacking_warps(self) -> int:
        """Producer warps that unpack a cache."""
        return 0 if self.unpacks is None else self.producer_warps - self.filling_warps

    @property
    def cache_type(self) -> str | None:
        """ "bf16", "fp16" or "e4m3", of K and V as the kernel is given them; None for rows with their codes."""
        return None if self.decodes else self.operand_type

    @property
    def operand_type(self) -> str:
        """ "bf16", "fp16" or "e4m3": of all operands. Codes, as the numbers that they stand for, are exact in fp16."""
        if self.fp8 is not None:
            return "e4m3"
        return "fp16" if self.coded else self.q_dtype

    @property
    def operand_bytes(self) -> int:
        """Of an operand's element."""
        return ELEMENT_BYTES if self.fp8 is None else 1

    @property
    def slab_columns(self) -> int:
        """Of a tile, that lie in rows of the swizzle."""
        return ROW_BYTES // self.operand_bytes

    @property
    def cache_bytes(self) -> int:
        """Of an element of K and V as the kernel is given them."""
        return 1 if self.decodes else self.operand_bytes

    @property
    def converts_queries(self) -> bool:
        """Whether queries are brought into fp16 or E4M3, each row with a power of 2 of its own."""
        return self.coded and (self.q_dtype == "bf16" or self.fp8 is not None)

    @property
    def tile_scales(self) -> tuple[bool, bool]:
        """Whether tiles of K and of V have scales: rows have theirs multiplied in, up to a power of 2 that some of the
        tile's have in common, see :attr:`scale_runs`."""
        return has_token_scale(self.formats[0]), has_token_scale(self.formats[1])

    @property
    def scale_runs(self) -> int:
        """Parts of a tile that have powers of 2 of their own: what a producer warp decodes, or all that is
        unpacked."""
        return self.tile_warps if self.decodes and any(self.tile_scales) else 1

    @property
    def units(self) -> tuple[float, float]:
        """What K's and V's tiles are to be multiplied with to be numbers."""
        k_unit, v_unit = (1.0 if form.extend is None else form.extend.unit for form in self.formats)
        return k_unit, v_unit

    @property
    def num_threads(self) -> int:
        return MMA_THREADS + self.producer_warps * WARP_THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread."""
        if self.fp8 is not None:
            return REGISTERS["fp8" if self.fp8.behind else "dense", self.producer_warps]
        if self.unpacks is not None:
            return REGISTERS["unpacks", self.producer_warps]
        if not self.decodes or self.key_rows is not None:
            return REGISTERS["dense", 4]
        kinds = {form.extend.registers for form in self.formats if form.extend is not None}
        return REGISTERS["int4" if "int4" in kinds else "bytes", self.producer_warps]

    @property
    def launch_registers(self) -> int:
        """Of every thread before they are shared out anew, which cannot make more of them: a warp would wait for ever
        for registers that its CTA does not have."""
        return SM_REGISTERS // self.num_threads // 8 * 8

    @property
    def columns(self) -> int:
        """Of operands in shared memory: head_dim and zeros."""
        return columns_of(self.head_dim)

    @property
    def tile_bytes(self) -> int:
        """Of K or V."""
        return self.tile_tokens * self.columns * self.operand_bytes

    @property
    def ones_rows(self) -> int:
        """Rows behind a tile of V's transpose, whose products are sums of probabilities."""
        return 0 if self.fp8 is None else 8

    @property
    def tile_room(self) -> int:
        """Bytes from a tile to the next one."""
        return self.tile_bytes + self.ones_rows * ROW_BYTES

    @property
    def slab_bytes(self) -> int:
        """Of a tile's columns that lie in rows of the swizzle."""
        return self.tile_tokens * ROW_BYTES

    @property
    def query_bytes(self) -> int:
        """Of a warpgroup, as they come."""
        return WARPGROUP_ROWS * self.columns * ELEMENT_BYTES

    @property
    def query_code_bytes(self) -> int:
        """Of a warpgroup's queries in E4M3, which lie beside those that come."""
        return 0 if self.fp8 is None else WARPGROUP_ROWS * self.columns

    @property
    def scale_bytes(self) -> int:
        """Of a tile's scales."""
        return TILE_SCALE_BYTES if any(self.tile_scales) else 0

    @property
    def smem_bytes(self) -> int:
        barriers = 8 * (4 * self.num_stages + 2 * WORK_SLOTS) + 1024
        if self.key_rows is not None:
            tiles = self.num_stages * self.key_rows.stage_bytes + self.key_rows.fixed_bytes
            return tiles + WORK_SLOTS * WORK_BYTES + barriers
        queries = MMA_WARPGROUPS * (self.query_bytes + self.query_code_bytes)
        tiles = queries + 2 * self.num_stages * (self.tile_room + self.scale_bytes)
        return tiles + 4 * TILE_ROWS + WORK_SLOTS * WORK_BYTES + barriers

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format}_{self.v_format}"
        shape = f"d{self.head_dim}_t{self.tile_tokens}r{self.num_stages}p{self.producer_warps}"
        layout = f"_p{self.page_tokens}" if self.page_tokens else ""
        layout += f"_{self.features.name}" if self.features.name else ""
        layout += "_ragged" if self.ragged else "_unpacked" if self.unpacked else ""
        if self.fp8 is not None:
            layout += "_fp8" + ("_behind" if self.fp8.behind else "")
        layout += "" if self.unpacks is None else f"_beside_{self.unpacks.what}"
        layout += "_merges" if self.merges else ""
        layout += ("_tree" if self.tree else "") + ("" if self.ping_pong else "_free")
        layout += "_mapped" if self.mapped else ""
        layout += f"_q{self.tile_rows}" if self.key_rows is not None else ""
        return f"extend_{formats}_{self.q_dtype}_{shape}{layout}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        for name, form in zip((self.k_format, self.v_format), self.formats, strict=True):
            if (reason := cannot_read(form)) is not None:
                return reason
            if kernel_format(name) != name:
                return f"{name} caches are read by the kernel for {kernel_format(name)}"
            if not form.is_coded and name != self.q_dtype:
                return f"q_dtype {self.q_dtype!r} is not that of a {name} cache"
            if form.has_header and self.head_dim // form.num_groups % GROUP_UNIT:
                return f"groups of {self.head_dim // form.num_groups} columns are no multiple of {GROUP_UNIT}"
        if self.formats[0].is_coded != self.formats[1].is_coded:
            return f"K in {self.k_format} and V in {self.v_format}: one of 16 bits, the other of codes"
        if self.producer_warps not in (4, 8):
            return f"producer_warps {self.producer_warps} is not 4 or 8"
        if self.producer_warps == 8 and self.columns > 128:
            return f"8 producer_warps leave too few registers for head_dim {self.head_dim}"
        if self.key_rows is not None:
            return self._problem_of_key_rows() or self.limits.refuses(self.num_threads, self.smem_bytes)
        if self.decodes and any(self.tile_scales) and self.warp_rows > WARP_THREADS:
            return (
                f"{self.producer_warps} producer_warps have {self.warp_rows} rows each, and a lane for the scale of one"
            )
        producing, consuming = self.registers
        shared_out = MMA_WARPS * consuming + self.producer_warps * producing
        if shared_out > (MMA_WARPS + self.producer_warps) * self.launch_registers:
            return f"{producing} and {consuming} registers are more than {self.num_threads} threads begin with"
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        if self.ragged and (self.coded or self.features.head_major):
            return "ragged keys lie in 16 bits, token by token"
        if self.unpacked and not self.features.head_major:
            return "unpacked keys lie head by head"
        if self.unpacks is not None and (reason := self._problem_of_unpacking(self.unpacks)) is not None:
            return reason
        if self.fp8 is not None and (reason := cannot_multiply_fp8(self.formats, self.head_dim)) is not None:
            return reason
        if self.tree and (self.features.causal or self.features.window or self.features.alibi):
            return "a tree's mask says what is seen: neither order nor positions do"
        if self.features.bias is not None:
            return "there is no additive bias"
        return self.limits.refuses(self.num_threads, self.smem_bytes)

    def _problem_of_unpacking(self, cache: UnpackConfig) -> str | None:
        """Why producer warps cannot unpack a cache beside the products, or None."""
        if not self.coded or self.fp8 is not None:
            return "only codes become 16 bits beside the products"
        if self.columns > 128:
            return f"sums of head_dim {self.head_dim} leave no registers to unpack beside the products"
        return cache.can_implement()

    def _problem_of_key_rows(self) -> str | None:
        """Why keys cannot be rows of products, or None."""
        if not (self.tile_rows % 8 == 0 and 8 <= self.tile_rows <= MOST_COLUMNS):
            return f"tile_rows {self.tile_rows} is not {TILE_ROWS} or a multiple of 8 up to {MOST_COLUMNS}"
        if not self.decodes or self.ragged or self.merges:
            return f"{self.tile_rows} tile_rows of anything but a cache of codes"
        if self.head_dim != KEY_ROWS_HEAD_DIM or self.tile_tokens != 2 * GROUP_TOKENS or self.producer_warps != 4:
            return f"{self.tile_rows} tile_rows of head_dim {self.head_dim}, not {KEY_ROWS_HEAD_DIM}"
        for form in self.formats:
            words = "" if form.extend is None else form.extend.words.rpartition(":")[2]
            groups = KEY_ROWS_GROUPS if words == "Int4Words" else (1,)
            if words not in KEY_ROWS_WORDS or form.num_groups not in groups:
                return f"{self.tile_rows} tile_rows of {form.name} caches"
        if replace(self.features, **dict.fromkeys(KEY_ROWS_FEATURES, False)) != PLAIN:
            return f"{self.tile_rows} tile_rows with {self.features.name}"
        return self._problem_of_maps() if self.mapped else None

    def _problem_of_maps(self) -> str | None:
        """Why tensor maps cannot bring rows with what is in front of them, or None."""
        for form, (room, apart) in zip(self.formats, map(self._key_rows_of, self.formats), strict=True):
            if apart:
                return f"mapped rows of {form.name}, whose headers lie apart"
            if self.features.head_major and form.row_bytes(self.head_dim) != room:
                return f"mapped rows of {form.name} that lie head by head: no multiples of 16 bytes"
        return None


MAX_SPLITS = 32  # a lane of the combining warp for each


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant of the kernel that puts splits together: dtype of the output ("bf16", "fp16"), head_dim."""

    q_dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"extend_combine_{self.q_dtype}_d{self.head_dim}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        return None if self.head_dim in HEAD_DIMS else f"head_dim {self.head_dim} is not one of {HEAD_DIMS}"


UNPACK_WARPS = 8  # of a CTA, which share a tile
UNPACK_CTAS_PER_SM = 4


@dataclass(frozen=True)
class UnpackConfig:
    """One compiled variant of the kernel that makes :class:`UnpackedKeys` of a cache.

    Attributes:
        k_format, v_format: of the cache. dtype: "bf16" or "fp16", of the rows that it makes; "e4m3" for codes as they
            are, V's tiles transposed, see :mod:`.fp8`.
        head_dim: of rows.
        page_tokens, head_major: as :class:`CachedKeys` and the features of attention have them.
    """

    k_format: str
    v_format: str
    dtype: str
    head_dim: int
    page_tokens: int = 0
    head_major: bool = False

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """Of K and of V."""
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def element_bytes(self) -> int:
        """Of the rows that it makes."""
        return 1 if self.dtype == "e4m3" else ELEMENT_BYTES

    @property
    def tile_tokens(self) -> int:
        return TILE_TOKENS[self.columns]

    @property
    def columns(self) -> int:
        """Of the operands that its rows become."""
        return columns_of(self.head_dim)

    @property
    def warp_rows(self) -> int:
        """Rows of a tile that a warp takes."""
        return self.tile_tokens // UNPACK_WARPS

    @property
    def tile_scales(self) -> tuple[bool, bool]:
        """As :class:`ExtendConfig` has them."""
        return has_token_scale(self.formats[0]), has_token_scale(self.formats[1])

    @property
    def layout(self) -> str:
        """Of the cache, in its kernels' names."""
        return (f"_p{self.page_tokens}" if self.page_tokens else "") + ("_head_major" if self.head_major else "")

    @property
    def what(self) -> str:
        """The cache, in the name of a kernel that unpacks it beside its products."""
        return joined(self.k_format, self.v_format) + self.layout

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        formats = joined(self.k_format, self.v_format)
        return f"extend_unpack_{formats}_{self.dtype}_d{self.head_dim}{self.layout}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        for name, form in zip((self.k_format, self.v_format), self.formats, strict=True):
            if (reason := cannot_read(form)) is not None:
                return reason
            if kernel_format(name) != name:
                return f"{name} caches are read by the kernel for {kernel_format(name)}"
            wanted = "fp16" if form.is_coded else name
            if self.dtype != wanted and self.dtype != "e4m3":
                return f"dtype {self.dtype!r} is not {wanted!r}, that of rows of a {name} cache"
            if form.has_header and self.head_dim // form.num_groups % GROUP_UNIT:
                return f"groups of {self.head_dim // form.num_groups} columns are no multiple of {GROUP_UNIT}"
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        return cannot_multiply_fp8(self.formats, self.head_dim) if self.dtype == "e4m3" else None
