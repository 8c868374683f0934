"""Every compile-time choice of the decode attention kernel, as data, and its tiles of K and V. No GPU types here."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.attention.policies import (
    BLOCK_QUERIES,
    ONE_HEAD,
    QUERY_VECTOR_BYTES,
    THREE_STAGES,
    WHOLE_CACHE,
    CacheLoad,
    CopyPipeline,
    TokenRuns,
    WarpMma,
    joined,
)
from cute_kernels.attention.tiles import MAP_WORDS, MAX_BOX, MappedTile, map_problem
from cute_kernels.device.cuda import BARRIER_BYTES, WARP_THREADS
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features
from layouts.kv.swizzled_tile import SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS, RowTile, plan_tiles

WRITE_LSE, KEEP_PARTIALS = 1, 2  # bits of a launch's mode
CTAS_SHIFT = 8  # from this bit on a launch's mode has log2 of the most CTAs that may combine a row
# x // n is x * ceil(2**20 / n) >> 20 for x * n < 2**20 and x / n < 2**11; `checks.check_heads` refuses other heads.
RECIPROCAL_BITS = 20
MERGE_PAD = 4  # words between the query heads of the merge buffer
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # 4 producer warps lend registers to 8 consumer warps
PAIR_BYTES = 8  # a softmax maximum and sum
RAW_TILE_ALIGNMENT = 128  # bytes, which suit bulk copies
SWIZZLE_ALIGNMENT = 1024  # of tiles whose swizzle is a function of the address


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled variant: a composition of policies, see :mod:`cute_kernels.attention.policies`.

    Producer warps keep the pipeline's ring of tiles of K and V full; all consumer warps read it.

    Attributes:
        k, v: the `CacheLoad` of K's tiles and of V's tiles, with the formats of the caches.
        q_dtype: dtype of q and out, "bf16" or "fp16". A 16-bit cache has to have q's dtype.
        mainloop: which parts of a tile and of the queries each consumer warp multiplies.
        pipeline: the CTAs and tiles that an SM has in flight.
        runs: which bytes of the caches are contiguous.
        features: what the kernel computes beyond softmax(q K^T) V.
        units: whether rows of different lengths are cut into parts by length (see
            :mod:`cute_kernels.attention.assignment`). If not, every row is cut into one part for each of its CTAs.
        after_append: whether the kernel is a programmatic dependent of the append kernel, which writes each request's
            last q_len tokens and rotates q. If so, it starts while the append runs, and waits for the append's end
            before it reads the new tokens or q.
    """

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_decode"
    use: ClassVar[Use] = "decode"
    limits: ClassVar[Limits] = HOPPER
    k: CacheLoad
    v: CacheLoad
    q_dtype: str
    mainloop: WarpMma = ONE_HEAD
    pipeline: CopyPipeline = THREE_STAGES
    runs: TokenRuns = WHOLE_CACHE
    features: Features = PLAIN
    units: bool = False
    after_append: bool = False

    @property
    def format_names(self) -> tuple[str, str]:
        """The names of K's and V's formats."""
        return self.k.format, self.v.format

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """K's and V's formats."""
        return self.k.form, self.v.form

    @property
    def copies(self) -> tuple[str, str]:
        """How K's rows, and how V's rows, are copied: `CacheLoad.copy`."""
        return self.k.copy, self.v.copy

    @property
    def head_dim(self) -> int:
        """The head_dim of q and K."""
        return self.k.head_dim

    @property
    def v_head_dim(self) -> int:
        """The head_dim of V and out."""
        return self.v.head_dim

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.k.head_dim, self.v.head_dim

    @property
    def page_tokens(self) -> int:
        return self.runs.page_tokens

    @property
    def has_features(self) -> bool:
        """Whether a launch takes arguments for features. Pages count as a feature here."""
        return self.features != PLAIN or self.page_tokens > 0

    @property
    def num_warps(self) -> int:
        """Number of consumer warps. The producer warps have the indices after them."""
        return self.mainloop.num_heads * self.mainloop.num_query_blocks * self.mainloop.num_slices

    @property
    def num_threads(self) -> int:
        """Threads of the consumer warps."""
        return self.num_warps * WARP_THREADS

    @property
    def cta_threads(self) -> int:
        return (self.num_warps + self.pipeline.producer_warps) * WARP_THREADS

    @property
    def filling_warps(self) -> int:
        """Number of producer warps that copy.

        Each of them copies a part of every whole tile. No barrier would wait for a warp with nothing to copy. Such a
        warp could fall behind by a round of the ring, and mistake one barrier phase for another.
        """
        return min(self.pipeline.producer_warps, most_filling_warps(self))

    @property
    def lends_registers(self) -> bool:
        """Whether the producer warps, which form a warpgroup, lend registers to both consumer warpgroups.

        Producers that copy by words lend none, since their loops need the registers.
        """
        alone = (self.pipeline.producer_warps, self.pipeline.ctas_per_sm) == (4, 1)
        return alone and self.num_warps == 8 and "word" not in self.copies

    @property
    def num_roles(self) -> int:
        """Number of roles. Warps of different roles have different query heads. Each slice of a tile's tokens has one
        warp for each role.
        """
        return self.mainloop.num_heads * self.mainloop.num_query_blocks

    @property
    def shares_queries(self) -> bool:
        """Whether the queries' B operands lie in shared memory, in one copy for all warps that have the same
        queries.
        """
        return self.mainloop.shares_queries(self.k)

    @property
    def role_query_bytes(self) -> int:
        """Bytes of shared memory for one role's queries; 0 if queries stay in registers."""
        return self.mainloop.role_query_bytes(self.k)

    @property
    def query_bytes(self) -> int:
        """Bytes of shared memory for all queries; 0 if queries stay in registers."""
        return self.mainloop.query_bytes(self.k)

    @property
    def rotated_pitch(self) -> int:
        """Bytes of shared memory from one rotated query to the next, in kernels that append and attend in one launch.
        The pitch puts the beginnings of eight queries into different banks.
        """
        return 2 * self.head_dim + QUERY_VECTOR_BYTES

    @property
    def rotated_bytes(self) -> int:
        """Bytes of shared memory for rotated queries, in kernels that append and attend in one launch."""
        return self.num_rows * self.rotated_pitch

    @property
    def columns(self) -> int:
        """Number of columns of a lane's accumulators, two per block of queries. Each column belongs to one query
        head."""
        return 2 * self.mainloop.blocks_per_warp

    @property
    def warp_queries(self) -> int:
        """The largest number of query heads that a warp can have."""
        return self.mainloop.blocks_per_warp * BLOCK_QUERIES

    @property
    def head_queries(self) -> int:
        """The largest number of query heads per KV head that a CTA can have."""
        return self.mainloop.num_query_blocks * self.warp_queries

    @property
    def num_rows(self) -> int:
        """The largest number of query heads that a CTA can have."""
        return self.mainloop.num_heads * self.head_queries

    @property
    def slice_tokens(self) -> int:
        return self.mainloop.blocks_per_slice * BLOCK_TOKENS

    @property
    def tile_tokens(self) -> int:
        return self.mainloop.num_slices * self.slice_tokens

    @property
    def token_bits(self) -> tuple[int, ...]:
        """The order of a block's tokens in the rows of an MMA, see :mod:`layouts.kv.tile`."""
        return tiles_of(self)[0].token_bits

    @property
    def tile_bytes(self) -> tuple[int, int]:
        """Bytes of shared memory of a tile of K, and of a tile of V."""
        k_tile, v_tile = tiles_of(self)
        return _round_up(k_tile.num_bytes, RAW_TILE_ALIGNMENT), _round_up(v_tile.num_bytes, RAW_TILE_ALIGNMENT)

    @property
    def ring_offsets(self) -> tuple[int, int]:
        """Byte offsets in the ring of the first tile of K, and of the first tile of V."""
        alignment = RAW_TILE_ALIGNMENT if self.formats[1].has_header else SWIZZLE_ALIGNMENT
        return 0, _round_up(self.pipeline.num_stages * self.tile_bytes[0], alignment)

    @property
    def ring_bytes(self) -> int:
        return self.ring_offsets[1] + self.pipeline.num_stages * self.tile_bytes[1]

    @property
    def merge_offset(self) -> int:
        """Byte offset in the pool of the buffer in which the warps' results are merged.

        If there is room, the buffer lies after the ring, so that tiles of a CTA's next unit can arrive during the
        merge. Otherwise the offset is 0, and the buffer overlaps the ring.
        """
        room = self.limits.sm_shared_bytes // self.pipeline.ctas_per_sm - self.limits.reserved_shared_bytes
        room -= self._other_bytes + (self.rotated_bytes if self.after_append else 0)
        fits = self.ring_bytes + self.merge_bytes <= room
        return self.ring_bytes if self.units and fits else 0

    @property
    def merge_bytes(self) -> int:
        """Bytes of the buffer in which the warps' results are merged."""
        outputs = self.mainloop.num_slices * self.num_rows * (self.v_head_dim + MERGE_PAD) * 4
        return outputs + self.mainloop.num_slices * self.num_rows * PAIR_BYTES

    @property
    def partial_words(self) -> int:
        """Number of words of workspace that one split's partial result of one query head takes. Every 4 columns of V
        take 6 words: 4 unnormalised outputs, and a copy of the split's softmax maximum and sum.
        """
        return self.v_head_dim + self.v_head_dim // 2

    @property
    def pool_bytes(self) -> int:
        """Bytes of shared memory for the ring and the merge buffer. The number is raised until at most ``ctas_per_sm``
        CTAs fit on an SM.

        If an SM held more CTAs, SMs would have unequal shares of the work.
        """
        too_little = self.limits.sm_shared_bytes // (self.pipeline.ctas_per_sm + 1) - self.limits.reserved_shared_bytes
        merged = self.merge_offset + self.merge_bytes
        return max(self.ring_bytes, merged, _round_up(too_little + 1, RAW_TILE_ALIGNMENT))

    @property
    def smem_bytes(self) -> int:
        return self.pool_bytes + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        """Bytes of shared memory of queries and barriers."""
        return self.query_bytes + 2 * self.pipeline.num_stages * BARRIER_BYTES

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart. If K and V have the same format or copy, the name has it
        once."""
        formats, copies = joined(self.k.format, self.v.format), joined(*self.copies)
        dims = f"d{self.head_dim}" + (f"v{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        work = f"{self.mainloop.name}_{self.pipeline.name}"
        layout = self.runs.name + ("_units" if self.units else "")
        layout += f"_{self.features.name}" if self.features.name else ""
        layout += "_after_append" if self.after_append else ""
        return f"decode_{formats}_{self.q_dtype}_{dims}_{work}_{copies}{layout}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        return (
            self.k.problem(self.q_dtype)
            or self.v.problem(self.q_dtype)
            or self.mainloop.problem()
            or self.features.problem(self.v_head_dim)
            or self._problem_of_maps()
            or self._problem_of_blocks()
            or self._problem_of_heads()
            or self.pipeline.problem(self.after_append)
            or self.runs.problem()
            or self._problem_of_sizes()
        )

    def _problem_of_blocks(self) -> str | None:
        """Returns why this configuration cannot read caches in blocks of tokens, or None."""
        k, v = self.formats
        if v.in_blocks:
            return f"{v.name} caches are of keys alone"
        if k.in_blocks != self.features.tail:
            return f"{k.name} keys {'without' if k.in_blocks else 'with'} a tail"
        if not k.in_blocks:
            return None
        if self.page_tokens % k.block_tokens:
            return f"page_tokens {self.page_tokens} do not hold whole blocks of {k.block_tokens} tokens"
        return "keys in blocks after an append in the same call" if self.after_append else None

    def _problem_of_heads(self) -> str | None:
        """Returns why this configuration cannot read caches in which each KV head has its own pages, or None."""
        if self.features.by_head and (self.mainloop.num_heads > 1 or self.units or not self.page_tokens):
            return "pages of each KV head for a CTA of several, or cut by lengths, or without pages"
        return None

    def _problem_of_maps(self) -> str | None:
        """Returns why tensor maps cannot load raw rows, or None."""
        for load in (self.k, self.v):
            if load.copy != "map":
                continue
            if self.runs.contiguous or self.features.head_major:
                return "a map of rows that lie one behind the other"
            problem = map_problem(load.form, load.head_dim, self.mainloop.num_heads)
            if problem:
                return problem
        return None

    def _problem_of_sizes(self) -> str | None:
        """Returns why a CTA does not fit an SM, or None."""
        limits = self.limits
        if self.cta_threads > limits.threads:
            most = limits.threads // WARP_THREADS
            return f"{self.num_warps} + {self.pipeline.producer_warps} warps are more than the {most} of a CTA"
        ctas = self.pipeline.ctas_per_sm
        if (self.smem_bytes + limits.reserved_shared_bytes) * ctas > limits.sm_shared_bytes:
            return f"{ctas} CTAs of {self.smem_bytes} bytes exceed the {limits.shared_bytes} bytes of an SM"
        return None


@lru_cache(maxsize=4096)
def tiles_of(config: DecodeConfig) -> tuple[RowTile | SwizzledTile, RowTile | SwizzledTile]:
    """Returns the shared-memory layouts of a tile of K and of a tile of V. Both have the same order of tokens."""
    return plan_tiles(_tile(config, "k", config.k), _tile(config, "v", config.v))


def tokens_per_copy(config: DecodeConfig, tile: RowTile | SwizzledTile) -> int:
    """Returns how many tokens one bulk copy, or one load by a tensor map, takes."""
    if isinstance(tile, RowTile) and not _is_mapped(config, tile):
        return min(tile.copy_tokens, config.page_tokens or tile.copy_tokens)
    return min(config.tile_tokens, config.page_tokens or MAX_BOX)


def _is_mapped(config: DecodeConfig, tile: RowTile) -> bool:
    """Returns whether a tensor map loads the raw rows of ``tile``."""
    return config.copies[0 if tile.operand == "k" else 1] == "map"


def copies_per_tile(config: DecodeConfig) -> int:
    """Returns how many copies load one tile of K and V. A tensor map of rows without headers loads the tokens of one
    head at a time.
    """
    heads = [1 if isinstance(tile, RowTile) else config.mainloop.num_heads for tile in tiles_of(config)]
    tokens = [tokens_per_copy(config, tile) for tile in tiles_of(config)]
    return sum(h * -(-config.tile_tokens // t) for h, t in zip(heads, tokens, strict=True))


def lane_tokens(config: DecodeConfig) -> int:
    """Returns how many consecutive tokens of a tile, all in one page, are a lane's share. A lane issues the bulk copies
    that begin in its share. A copy may reach into the shares of the next lanes, which then issue no copy.
    """
    runs = [tokens_per_copy(config, tile) for tile in tiles_of(config) if isinstance(tile, RowTile)]
    if not runs:
        return min(config.page_tokens or config.tile_tokens, config.tile_tokens)
    even = 1 << (-(-config.tile_tokens // WARP_THREADS) - 1).bit_length()
    return max(even, min(runs))


def most_filling_warps(config: DecodeConfig) -> int:
    """Returns the largest number of producer warps for which each warp has something to copy in every whole tile."""
    if "word" in config.copies:
        return config.tile_tokens
    tma_tiles = [
        config.tile_tokens // tokens_per_copy(config, tile)
        for tile in tiles_of(config)
        if isinstance(tile, SwizzledTile)
    ]
    return max(config.tile_tokens // lane_tokens(config), *tma_tiles, 1)


def _tile(config: DecodeConfig, operand: str, load: CacheLoad) -> RowTile | SwizzledTile:
    form, head_dim = load.form, load.head_dim
    if not form.has_header:
        return SwizzledTile(head_dim, form.code_bits // 8, config.mainloop.num_heads, config.tile_tokens)
    kind = MappedTile if load.copy == "map" else RowTile
    return kind(
        head_dim,
        form.code_bits,
        form.header_words(head_dim),
        config.mainloop.num_heads,
        config.tile_tokens,
        operand,
        config.runs.contiguous,
        1 if load.copy == "word" else MAP_WORDS,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
