"""Every compile-time choice of the extend attention kernel, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.attention.extend_policies import (
    ELEMENT_BYTES,
    EXTEND_HEAD_DIMS,
    GROUP_TOKENS,
    HEADED_ROW_BYTES,
    KEY_ROWS_FEATURES,
    KEY_ROWS_GROUPS,
    KEY_ROWS_HEAD_DIM,
    KEY_ROWS_WORDS,
    MMA_THREADS,
    MMA_WARPGROUPS,
    MMA_WARPS,
    MOST_COLUMNS,
    PAIRED_NIBBLE_ROW_BYTES,
    PAIRED_ROW_BYTES,
    REGISTERS,
    ROW_BYTES,
    SCALED_ROW_BYTES,
    SM_REGISTERS,
    SUM_COLUMNS,
    TILE_ROWS,
    TILE_SCALE_BYTES,
    TOKEN_BY_TOKEN,
    TWO_STAGES,
    WARPGROUP_ROWS,
    WORK_BYTES,
    WORK_SLOTS,
    CachedKeys,
    KeyRows,
    Keys,
    ProducerPipeline,
    RaggedKeys,
    ReadsCache,
    UnpackedKeys,
    cannot_multiply_fp8,
    cannot_unpack,
    has_channel_scales,
    has_token_scale,
)
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features


@dataclass(frozen=True)
class ExtendConfig(ReadsCache):
    """One compiled variant of extend attention.

    A CTA has two consumer warpgroups, which multiply 64 rows of queries each, and producer warps that fill tiles of
    keys and values. One or two warps load 16-bit tiles by tensor maps. All producer warps decode tiles of codes, row by
    row. If only one of K and V has codes, half of the warps decode this operand, and the other half load the 16-bit
    operand. With head_dim 512 a work tile computes whole scores, but the output of only one half of V's columns.

    Attributes:
        k_format, v_format: names of the cache formats, see :mod:`cute_kernels.formats.kv`. For unpacked keys: the
            formats of the cache, or other formats whose unpacked rows are read in the same way.
        q_dtype: dtype of q and out, "bf16" or "fp16". A 16-bit cache has to have q's dtype.
        head_dim: number of columns of a head of q, K, V and out.
        pipeline: the numbers of tokens of a tile, stages and producer warps.
        keys: where K and V lie.
        features: what the kernel computes beyond softmax(q K^T) V.
        merges: whether the result is merged with another launch's result over other keys.
        tree: whether a tree mask, instead of the causal order, says which of a request's new tokens a query sees.
        tile_rows: packed queries of a work tile. With fewer than 128, queries are columns of MMAs whose rows are keys,
            see :mod:`.mainloops.key_rows`.
    """

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_extend"
    use: ClassVar[Use] = "extend"
    limits: ClassVar[Limits] = HOPPER
    k_format: str
    v_format: str
    q_dtype: str
    head_dim: int
    pipeline: ProducerPipeline = TWO_STAGES
    keys: Keys = TOKEN_BY_TOKEN
    features: Features = PLAIN
    merges: bool = False
    tree: bool = False
    tile_rows: int = TILE_ROWS

    @property
    def key_rows(self) -> KeyRows | None:
        """The sizes of shared memory of a CTA whose MMAs have keys as rows; None if queries are the rows."""
        if self.tile_rows == TILE_ROWS:
            return None
        rows, headers = zip(*map(self._key_rows_of, self.formats), strict=True)
        tokens = self.tile_tokens * (1 if self.paired else self.tile_heads)
        tiles, apart = (tokens * rows[0], tokens * rows[1]), (tokens * headers[0], tokens * headers[1])
        return KeyRows(self.tile_rows, tiles, apart, self.tile_heads)

    @property
    def tile_heads(self) -> int:
        """Number of KV heads of a work tile. With key rows and tiles of 64 tokens there are two, one for each
        warpgroup. Otherwise there is one.
        """
        return 1 if self.tile_rows == TILE_ROWS else MMA_WARPGROUPS * GROUP_TOKENS // self.tile_tokens

    @property
    def paired(self) -> bool:
        """Whether one copy loads a token's rows of both KV heads of a work tile, which are then contiguous in shared
        memory.

        Tensor maps load rows in pairs if headers have 4 bytes. With 8-bit codes, a single row touches two lines of the
        L2 cache, and a pair only three. With INT4 of one group, single rows are not aligned to 8 bytes.
        """
        return self.tile_heads == 2 and self.mapped and all(form.header_bytes == 4 for form in self.formats)

    def _key_rows_of(self, form: KvFormat) -> tuple[int, int]:
        """Returns (bytes of a row's codes, bytes of a row's header) in shared memory. The header's number is 0 if the
        row is stored with its header, whose bytes the first number then contains.
        """
        if form.code_bits == 8 and form.header_bytes:
            return (PAIRED_ROW_BYTES if self.paired else SCALED_ROW_BYTES), 0
        if form.header_bytes == 4 and self.paired:
            return PAIRED_NIBBLE_ROW_BYTES, 0
        codes = self.head_dim * form.code_bits // 8
        if codes + form.header_bytes == HEADED_ROW_BYTES:
            return HEADED_ROW_BYTES, 0
        return codes, form.header_bytes

    @property
    def tile_tokens(self) -> int:
        return self.pipeline.tile_tokens

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of :class:`CachedKeys`; 0 without pages."""
        return self.keys.page_tokens if isinstance(self.keys, CachedKeys) else 0

    @property
    def mapped(self) -> bool:
        """Whether tensor maps load rows of :class:`CachedKeys` with their headers, for key rows."""
        return isinstance(self.keys, CachedKeys) and self.keys.mapped

    @property
    def ragged(self) -> bool:
        """Whether K and V are :class:`RaggedKeys` instead of a cache: all requests' tokens one after the other."""
        return isinstance(self.keys, RaggedKeys)

    @property
    def unpacked(self) -> bool:
        return isinstance(self.keys, UnpackedKeys)

    @property
    def fp8(self) -> bool:
        """Whether MMAs multiply FP8 numbers; otherwise they multiply 16-bit numbers."""
        return isinstance(self.keys, UnpackedKeys) and self.keys.fp8

    @property
    def coded(self) -> bool:
        """Whether the cache holds codes of K, of V, or of both."""
        return any(form.is_coded for form in self.formats)

    @property
    def mixed(self) -> bool:
        """Whether one of K and V has 16-bit rows and the other has codes."""
        return self.coded and not all(form.is_coded for form in self.formats)

    @property
    def parts(self) -> tuple[str, str, str]:
        """The import paths "module:name" of the code of the shared memory, the producer and the consumer. The code is
        imported only to compile a kernel.
        """
        loads, mainloops = "cute_kernels.attention.loads", "cute_kernels.attention.mainloops"
        if self.key_rows is not None:
            rows = f"{mainloops}.key_rows"
            return f"{rows}.memory:KeyRowsMemory", f"{rows}.copies:RawRowProducer", f"{rows}.multiply:KeyRowsConsumer"
        producer = f"{loads}.rows:RowProducer" if self.decodes else f"{loads}.tma:TmaTileProducer"
        return f"{loads}.memory:ExtendMemory", producer, f"{mainloops}.tiles:Consumer"

    @property
    def decodes(self) -> bool:
        """Whether producers decode rows of K or of V. If not, K and V are both loaded as operands."""
        return self.coded and not self.unpacked

    @property
    def decoded(self) -> tuple[bool, bool]:
        """Whether producers decode K's rows, and whether they decode V's."""
        k, v = (form.is_coded and not self.unpacked for form in self.formats)
        return k, v

    @property
    def tile_warps(self) -> int:
        """Number of producer warps that decode a tile of K, or of V."""
        return self.pipeline.producer_warps // 2

    @property
    def warp_rows(self) -> int:
        """Number of rows of a tile that a producer warp decodes."""
        return self.tile_tokens // self.tile_warps

    @property
    def filling_warps(self) -> int:
        """Number of producer warps that fill tiles. The other producer warps only give up their registers."""
        if self.decodes:
            return self.pipeline.producer_warps
        return 2 if self.page_tokens else 1  # one for K, one for V where a tile is many TMA tiles

    @property
    def cache_types(self) -> tuple[str | None, str | None]:
        """The types of the tensors K and V that the kernel takes: "bf16", "fp16" or "e4m3"; None for a tensor of coded
        rows."""
        k, v = (None if own else kind for own, kind in zip(self.decoded, self.operand_types, strict=True))
        return k, v

    @property
    def operand_types(self) -> tuple[str, str]:
        """The types of K's and V's operands: "bf16", "fp16" or "e4m3". Queries have K's type, probabilities V's. Codes
        become fp16 exactly."""
        if self.fp8:
            return "e4m3", "e4m3"
        k, v = ("fp16" if form.is_coded else self.q_dtype for form in self.formats)
        return k, v

    @property
    def operand_bytes(self) -> int:
        """Bytes of an operand's element."""
        return 1 if self.fp8 else ELEMENT_BYTES

    @property
    def slab_columns(self) -> int:
        """Columns of a tile that lie in one row of the swizzle."""
        return ROW_BYTES // self.operand_bytes

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of an element of the tensors K and V that the kernel takes."""
        k, v = (1 if own else self.operand_bytes for own in self.decoded)
        return k, v

    @property
    def why_as_it_lies(self) -> str | None:
        """Why the cache cannot be unpacked, or None if it can."""
        if self.mixed:
            return f"K in {self.k_format} and V in {self.v_format}, one of 16 bits and the other of codes"
        return cannot_unpack(self.formats[0]) or cannot_unpack(self.formats[1])

    @property
    def scale_words(self) -> tuple[int, int]:
        """Numbers of registers in which a lane holds the scales of its producer warp's rows: of K, and of V. 0 if rows
        have no scale.
        """
        k, v = (
            max(form.num_groups * self.warp_rows // WARP_THREADS, 1) if has_token_scale(form) else 0
            for form in self.formats
        )
        return k, v

    @property
    def tile_fillers(self) -> tuple[int, int]:
        """Numbers of warps that arrive on the full barrier of a tile of K, and of a tile of V. If K has 16 bits and V's
        rows have scales, all warps of K arrive, though only one loads the tile: each publishes powers of 2 for V's
        tile.
        """
        k, v = (self.tile_warps if own else 1 for own in self.decoded)
        return (self.tile_warps if self.mixed and self.tile_scales[1] else k), v

    @property
    def converts_queries(self) -> bool:
        """Whether queries are converted to fp16 or E4M3, each row with a power of 2 of its own."""
        return self.formats[0].is_coded and (self.q_dtype == "bf16" or self.fp8 or self.channel_scales[0])

    @property
    def channel_scales(self) -> tuple[bool, bool]:
        """Whether K's columns have scales, and whether V's columns have scales. Queries are multiplied by K's scales,
        the output by V's.
        """
        return has_channel_scales(self.formats[0]), has_channel_scales(self.formats[1])

    @property
    def scale_runs(self) -> int:
        """Number of parts of a tile that each have their own power of 2. A part is the rows that one producer warp
        decodes, or the whole tile.
        """
        return self.tile_warps if self.decodes and any(self.tile_scales) else 1

    @property
    def units(self) -> tuple[float, float]:
        """The factors that turn the numbers in K's and V's tiles into true values."""
        k_unit, v_unit = (1.0 if form.extend is None else form.extend.unit for form in self.formats)
        return k_unit, v_unit

    @property
    def num_threads(self) -> int:
        return MMA_THREADS + self.pipeline.producer_warps * WARP_THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """(registers of a producer thread, registers of a consumer thread)."""
        if not self.decodes or self.key_rows is not None:
            return REGISTERS["dense", 4]
        kinds = {form.extend.registers for form in self.formats if form.extend is not None}
        return REGISTERS["int4" if "int4" in kinds else "bytes", self.pipeline.producer_warps]

    @property
    def launch_registers(self) -> int:
        """Number of registers of every thread at launch. Later, warps only exchange registers: a warp that requests
        more registers than its CTA has would wait for ever.
        """
        return SM_REGISTERS // self.num_threads // 8 * 8

    @property
    def value_parts(self) -> int:
        """Number of parts into which V's columns are cut, so that accumulators fit in a thread's registers. Each work
        tile computes one part.
        """
        return max(self.columns // SUM_COLUMNS, 1)

    @property
    def value_dim(self) -> int:
        """Number of columns of V, and of the output, in a work tile."""
        return self.head_dim // self.value_parts

    @property
    def tile_bytes(self) -> tuple[int, int]:
        """Bytes of a tile of K, and of a tile of V."""
        k, v = (self.tile_tokens * columns * self.operand_bytes for columns in self.operand_columns)
        return k, v

    @property
    def ones_rows(self) -> int:
        """Number of rows of ones that follow a tile of V's transpose in shared memory. The MMAs of these rows with the
        probabilities compute the probabilities' sums.
        """
        return 8 if self.fp8 else 0

    @property
    def tile_rooms(self) -> tuple[int, int]:
        """Bytes of shared memory of a tile of K, and of a tile of V, each with the rows of ones after it."""
        k, v = (size + self.ones_rows * ROW_BYTES for size in self.tile_bytes)
        return k, v

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab: a tile's tokens, each with the columns of one row of the swizzle."""
        return self.tile_tokens * ROW_BYTES

    @property
    def query_bytes(self) -> int:
        """Bytes of a warpgroup's queries as they are loaded."""
        return WARPGROUP_ROWS * self.columns * ELEMENT_BYTES

    @property
    def query_code_bytes(self) -> int:
        """Bytes of a warpgroup's queries in E4M3, which have a buffer of their own; 0 without FP8 products."""
        return WARPGROUP_ROWS * self.columns if self.fp8 else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a tile's scales."""
        return TILE_SCALE_BYTES if any(self.tile_scales) else 0

    @property
    def smem_bytes(self) -> int:
        barriers = 8 * (4 * self.pipeline.num_stages + 2 * WORK_SLOTS) + 1024
        if self.key_rows is not None:
            tiles = self.pipeline.num_stages * self.key_rows.stage_bytes + self.key_rows.fixed_bytes
            return tiles + WORK_SLOTS * WORK_BYTES + barriers
        queries = MMA_WARPGROUPS * (self.query_bytes + self.query_code_bytes)
        tiles = queries + self.pipeline.num_stages * (sum(self.tile_rooms) + 2 * self.scale_bytes)
        return tiles + 4 * TILE_ROWS + WORK_SLOTS * WORK_BYTES + barriers

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format}_{self.v_format}"
        shape = f"d{self.head_dim}_t{self.tile_tokens}r{self.pipeline.num_stages}p{self.pipeline.producer_warps}"
        layout = f"_p{self.page_tokens}" if self.page_tokens else ""
        layout += f"_{self.features.name}" if self.features.name else ""
        layout += "_ragged" if self.ragged else "_unpacked" if self.unpacked else ""
        layout += "_fp8" if self.fp8 else ""
        layout += "_merges" if self.merges else ""
        layout += "_tree" if self.tree else ""
        layout += "_mapped" if self.mapped else ""
        layout += f"_q{self.tile_rows}" if self.key_rows is not None else ""
        return f"extend_{formats}_{self.q_dtype}_{shape}{layout}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        if self.head_dim not in EXTEND_HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, EXTEND_HEAD_DIMS))}"
        if (reason := self.problem_of_rows()) is not None:
            return reason
        for form in self.formats:
            if not form.is_coded and form.name != self.q_dtype:
                return f"q_dtype {self.q_dtype!r} is not that of a {form.name} cache"
        if self.unpacked and (reason := self.why_as_it_lies) is not None:
            return f"unpacked keys: {reason}"
        if self.pipeline.producer_warps not in (4, 8):
            return f"producer_warps {self.pipeline.producer_warps} is not 4 or 8"
        if self.pipeline.producer_warps == 8 and self.columns > 128:
            return f"8 producer_warps leave too few registers for head_dim {self.head_dim}"
        if self.key_rows is not None:
            return self._problem_of_key_rows() or self.limits.refuses(self.num_threads, self.smem_bytes)
        if self.decodes and any(self.tile_scales) and self.warp_rows > WARP_THREADS:
            producers = f"{self.pipeline.producer_warps} producer_warps"
            return f"{producers} have {self.warp_rows} rows each, and a lane for the scale of one"
        producing, consuming = self.registers
        shared_out = MMA_WARPS * consuming + self.pipeline.producer_warps * producing
        if shared_out > (MMA_WARPS + self.pipeline.producer_warps) * self.launch_registers:
            return f"{producing} and {consuming} registers are more than {self.num_threads} threads begin with"
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        if self.ragged and (self.coded or self.features.head_major):
            return "ragged keys lie in 16 bits, token by token"
        if self.unpacked and not self.features.head_major:
            return "unpacked keys lie head by head"
        if self.fp8 and (reason := cannot_multiply_fp8(self.formats, self.head_dim)) is not None:
            return reason
        if self.tree and (self.features.causal or self.features.window or self.features.alibi):
            return "a tree's mask says what is seen: neither order nor positions do"
        if self.features.bias is not None:
            return "there is no additive bias"
        if self.features.by_head and not self.page_tokens:
            return "pages of each KV head without pages"
        return self.limits.refuses(self.num_threads, self.smem_bytes)

    def _problem_of_key_rows(self) -> str | None:
        """Returns why keys cannot be rows of products, or None."""
        if not (self.tile_rows % 8 == 0 and 8 <= self.tile_rows <= MOST_COLUMNS):
            return f"tile_rows {self.tile_rows} is not {TILE_ROWS} or a multiple of 8 up to {MOST_COLUMNS}"
        if not self.decodes or self.ragged or self.merges:
            return f"{self.tile_rows} tile_rows of anything but a cache of codes"
        if self.head_dim != KEY_ROWS_HEAD_DIM or self.pipeline.producer_warps != 4:
            return f"{self.tile_rows} tile_rows of head_dim {self.head_dim}, not {KEY_ROWS_HEAD_DIM}"
        if self.tile_tokens not in (GROUP_TOKENS, MMA_WARPGROUPS * GROUP_TOKENS):
            return f"{self.tile_rows} tile_rows and {self.tile_tokens} tile_tokens"
        if any(self.channel_scales):
            return f"{self.tile_rows} tile_rows of caches with scales of channels"
        for form in self.formats:
            words = "" if form.extend is None else form.extend.words.rpartition(":")[2]
            groups = KEY_ROWS_GROUPS if words == "Int4Words" else (1,)
            if words not in KEY_ROWS_WORDS or form.num_groups not in groups:
                return f"{self.tile_rows} tile_rows of {form.name} caches"
        if replace(self.features, **dict.fromkeys(KEY_ROWS_FEATURES, False)) != PLAIN:
            return f"{self.tile_rows} tile_rows with {self.features.name}"
        return self._problem_of_maps() if self.mapped else None

    def _problem_of_maps(self) -> str | None:
        """Returns why tensor maps cannot load rows with their headers, or None."""
        for form, (room, apart) in zip(self.formats, map(self._key_rows_of, self.formats), strict=True):
            if apart:
                return f"mapped rows of {form.name}, whose headers lie apart"
            if self.features.head_major and form.row_bytes(self.head_dim) != room:
                return f"mapped rows of {form.name} that lie head by head: no multiples of 16 bytes"
        return None


MAX_EXTEND_SPLITS = 32  # a lane of the combining warp for each
