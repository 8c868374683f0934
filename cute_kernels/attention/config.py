"""Every compile-time choice of the decode attention kernel, as data. No GPU types here."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.attention.features import PLAIN, WIDEST_RESTORED, Features
from cute_kernels.attention.tiles import (
    cannot_read,
    copies_of,
    kernel_format,
    most_copy_warps,
    tiles_of,
)
from cute_kernels.device.cuda import BARRIER_BYTES, WARP_THREADS
from cute_kernels.kv_formats import KvFormat, format_of
from layouts.kv.tile import BLOCK_TOKENS

WRITE_LSE, KEEP_PARTIALS = 1, 2  # bits of a launch's mode
PLACES_SHIFT = 8  # of its bits that say how many CTAs the GPU holds at a time: the logarithm to base 2
BLOCK_QUERIES = 8  # columns of mma.m16n8: a block of query heads of one KV head
MERGE_PAD = 4  # words between the query heads of the merge buffer
MAX_BLOCKS_PER_WARP = 4
QUERY_VECTOR_BYTES = 4 * MAX_BLOCKS_PER_WARP  # of a lane: one value of each of so many blocks
WARPGROUP_WARPS = 4
WGMMA_ROW_BYTES = 128  # 64 elements of a row of a wgmma operand with 128-byte swizzling
WGMMA_QUERIES = BLOCK_QUERIES * MAX_BLOCKS_PER_WARP  # columns of the products of a warpgroup
EXCHANGE_BYTES = WARPGROUP_WARPS * WGMMA_QUERIES * 8  # of a warpgroup: two numbers of each warp and query
PAGE_TOKENS = (16, 32, 64, 128, 256)
COPYING_REGISTERS, ATTENDING_REGISTERS = 40, 232  # of 12 warps, where the former lend to the latter
PAIR_BYTES = 8  # a softmax maximum and sum
RAW_TILE_ALIGNMENT = 128  # bytes, which bulk copies like
SWIZZLE_ALIGNMENT = 1024  # of tiles whose swizzle is a function of the address


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled variant.

    A CTA holds ``num_heads * num_query_blocks * num_slices`` attending warps and ``copy_warps`` copying ones. The
    copying warps keep a ring of ``num_stages`` tiles of K and V full, which all attending warps read; each of these
    takes one KV head of the tile, ``blocks_per_warp`` blocks of up to 8 of its query heads, and a slice of its tokens.

    Attributes:
        k_format, v_format: names of the cache formats, see :mod:`cute_kernels.kv_formats`.
        q_dtype: "bf16" or "fp16", of q and out; that of a 16-bit cache.
        head_dim: of q and K.
        v_head_dim: of V and out.
        num_heads: KV heads of a CTA.
        num_query_blocks: per KV head, warps that take different query heads.
        blocks_per_warp: blocks of 8 query heads that a warp carries; they share what it decodes. 1, 2 or 4: with 4 the
            queries of keys that are codes lie in shared memory, since registers have room for accumulators alone.
        warpgroups: whether the warps of four neighbouring slices multiply together, by wgmma: see
            :mod:`cute_kernels.attention.warpgroup`. For four blocks of queries, and INT4 with one group of 128 columns.
        num_slices: warps that share the tokens of a tile.
        blocks_per_slice: blocks of 32 tokens that a warp takes from one tile.
        num_stages: tiles of the ring.
        copy_warps: warps that do nothing but ask for tiles, as far as there is a part of a tile for each; four of them
            lend registers to eight attending ones.
        early_tiles: tiles asked for before the request's length is known, 0 or 1; what lies past the length is read for
            nothing. 0 with ``after_append``.
        ctas_per_sm: CTAs meant to be resident on one SM; bounds the registers.
        contiguous: whether a CTA's heads are all the heads of the cache, so that a tile is one run of bytes.
        k_copy, v_copy: "bulk" (cp.async.bulk of raw rows), "tma" (tensor map with swizzle), or "word" (cp.async of 4
            bytes, for caches whose rows are not 16-byte aligned).
        page_tokens: tokens that certainly lie together in a paged cache, a power of two; 0 for contiguous caches.
        units: whether rows are cut by their lengths where those differ (see
            :mod:`cute_kernels.attention.assignment`); if not, every row is cut as the grid is.
        features: what of attention it computes beyond softmax(q K^T) V.
        after_append: launched as a programmatic dependent of the kernel that appends each request's last q_len tokens
            and rotates q: runs while that one does, and waits for it before it reads any of these.
    """

    limits: ClassVar[Limits] = HOPPER
    k_format: str
    v_format: str
    q_dtype: str
    head_dim: int
    v_head_dim: int
    num_heads: int = 1
    num_query_blocks: int = 1
    blocks_per_warp: int = 1
    warpgroups: bool = False
    num_slices: int = 4
    blocks_per_slice: int = 1
    num_stages: int = 3
    copy_warps: int = 1
    ctas_per_sm: int = 4
    early_tiles: int = 1
    contiguous: bool = True
    k_copy: str = "bulk"
    v_copy: str = "bulk"
    page_tokens: int = 0
    units: bool = False
    features: Features = PLAIN
    after_append: bool = False

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """Of K and of V."""
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def has_features(self) -> bool:
        """Whether a launch takes the arguments of features."""
        return self.features != PLAIN or self.page_tokens > 0

    @property
    def copies(self) -> tuple[str, str]:
        return self.k_copy, self.v_copy

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.v_head_dim

    @property
    def num_warps(self) -> int:
        """Attending warps; the copying ones come after them."""
        return self.num_heads * self.num_query_blocks * self.num_slices

    @property
    def num_threads(self) -> int:
        """Of the attending warps."""
        return self.num_warps * WARP_THREADS

    @property
    def cta_threads(self) -> int:
        return (self.num_warps + self.copy_warps) * WARP_THREADS

    @property
    def copiers(self) -> int:
        """Copying warps that copy.

        Each has a part of every whole tile: one without would not be waited for, fall behind by a round of the ring,
        and take one phase of a barrier for another.
        """
        return min(self.copy_warps, most_copy_warps(self))

    @property
    def lends_registers(self) -> bool:
        """Whether the copying warps, a warpgroup of their own, leave registers to both attending warpgroups.

        Not those that copy words: their loops need more than they would keep.
        """
        return (self.num_warps, self.copy_warps, self.ctas_per_sm) == (8, 4, 1) and "word" not in self.copies

    @property
    def num_roles(self) -> int:
        """Warps that differ in the query heads they carry."""
        return self.num_heads * self.num_query_blocks

    @property
    def shares_queries(self) -> bool:
        """Whether the B operands of the queries lie in shared memory, once for the warps that carry the same ones."""
        four_blocks = self.blocks_per_warp == MAX_BLOCKS_PER_WARP
        return four_blocks and not self.warpgroups and self.formats[0].is_coded

    @property
    def role_query_bytes(self) -> int:
        """Shared memory of one role's queries, as vectors of all blocks: B registers, which hold 8 columns of a block,
        and for every group of columns the sums of two query heads."""
        vectors = self.head_dim // 8 + 2 * self.formats[0].num_groups
        return vectors * WARP_THREADS * QUERY_VECTOR_BYTES if self.shares_queries else 0

    @property
    def query_bytes(self) -> int:
        """Shared memory beside the ring: queries, and what the warps of a warpgroup exchange."""
        if not self.warpgroups:
            return self.num_roles * self.role_query_bytes
        return self.centre_offset + self.num_slices * WGMMA_QUERIES * 4

    @property
    def probability_offset(self) -> int:
        """From the queries of warpgroups, B [32, head_dim], to their probabilities: two of B [32, 128] each."""
        return WGMMA_QUERIES * 2 * self.head_dim

    @property
    def probability_bytes(self) -> int:
        """Of one B operand of a warpgroup's probabilities."""
        return WGMMA_QUERIES * 2 * WARPGROUP_WARPS * BLOCK_TOKENS

    @property
    def exchange_offset(self) -> int:
        """From the queries of warpgroups to what their warps tell each other."""
        return self.probability_offset + 2 * self.num_merged * self.probability_bytes

    @property
    def sum_offset(self) -> int:
        """From the queries of warpgroups to the sum of each of them, fp32."""
        return self.exchange_offset + self.num_merged * EXCHANGE_BYTES

    @property
    def centre_offset(self) -> int:
        """From the queries of warpgroups to what recentring took off each warp's columns, fp32 by query."""
        return self.sum_offset + WGMMA_QUERIES * 4

    @property
    def num_merged(self) -> int:
        """Sums of all of a row's outputs that a CTA merges at the end: of each slice, or of each warpgroup."""
        return self.num_slices // WARPGROUP_WARPS if self.warpgroups else self.num_slices

    @property
    def columns(self) -> int:
        """Query heads of a lane: columns of the accumulators, two per block."""
        return 2 * self.blocks_per_warp

    @property
    def warp_queries(self) -> int:
        """Query heads that a warp has room for."""
        return self.blocks_per_warp * BLOCK_QUERIES

    @property
    def head_queries(self) -> int:
        """Query heads per KV head that a CTA has room for."""
        return self.num_query_blocks * self.warp_queries

    @property
    def num_rows(self) -> int:
        """Query heads that a CTA has room for."""
        return self.num_heads * self.head_queries

    @property
    def slice_tokens(self) -> int:
        return self.blocks_per_slice * BLOCK_TOKENS

    @property
    def tile_tokens(self) -> int:
        return self.num_slices * self.slice_tokens

    @property
    def token_bits(self) -> tuple[int, ...]:
        """Which token of a block stands in which MMA row, see :mod:`layouts.kv.tile`."""
        return tiles_of(self)[0].token_bits

    @property
    def tile_bytes(self) -> tuple[int, int]:
        """Shared memory of K and of V of one tile."""
        k_tile, v_tile = tiles_of(self)
        return _round_up(k_tile.num_bytes, RAW_TILE_ALIGNMENT), _round_up(v_tile.num_bytes, RAW_TILE_ALIGNMENT)

    @property
    def ring_offsets(self) -> tuple[int, int]:
        """Where the ring's tiles of K and those of V begin."""
        alignment = RAW_TILE_ALIGNMENT if self.formats[1].has_header else SWIZZLE_ALIGNMENT
        return 0, _round_up(self.num_stages * self.tile_bytes[0], alignment)

    @property
    def ring_bytes(self) -> int:
        return self.ring_offsets[1] + self.num_stages * self.tile_bytes[1]

    @property
    def merge_bytes(self) -> int:
        """Shared memory of the merge of the warps' results, which takes the ring's place at the end."""
        outputs = self.num_merged * self.num_rows * (self.v_head_dim + MERGE_PAD) * 4
        return outputs + self.num_merged * self.num_rows * PAIR_BYTES

    @property
    def partial_words(self) -> int:
        """Workspace of a query head and split, in words: each vector of 4 columns with its maximum and sum."""
        return self.v_head_dim + self.v_head_dim // 2

    @property
    def pool_bytes(self) -> int:
        """Shared memory of the ring, and then of the merge: so much that no more than ``ctas_per_sm`` CTAs fit an SM.

        With more of them the SMs would have unequal shares.
        """
        too_little = self.limits.sm_shared_bytes // (self.ctas_per_sm + 1) - self.limits.reserved_shared_bytes
        return max(self.ring_bytes, self.merge_bytes, _round_up(too_little + 1, RAW_TILE_ALIGNMENT))

    @property
    def smem_bytes(self) -> int:
        return self.pool_bytes + self.query_bytes + 2 * self.num_stages * BARRIER_BYTES

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart; what is alike for K and V is said once."""
        formats = _joined(self.k_format, self.v_format)
        dims = f"d{self.head_dim}" + (f"v{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        blocks = f"w{self.blocks_per_warp}" if self.blocks_per_warp > 1 else ""
        blocks += "g" if self.warpgroups else ""
        shape = f"h{self.num_heads}q{self.num_query_blocks}{blocks}s{self.num_slices}b{self.blocks_per_slice}"
        copiers = f"p{self.copy_warps}" if self.copy_warps > 1 else ""
        ring = f"r{self.num_stages}{copiers}c{self.ctas_per_sm}e{self.early_tiles}"
        layout = ("" if self.contiguous else "_strided") + (f"_p{self.page_tokens}" if self.page_tokens else "")
        layout += "_units" if self.units else ""
        layout += f"_{self.features.name}" if self.features.name else ""
        layout += "_after_append" if self.after_append else ""
        return f"decode_{formats}_{self.q_dtype}_{dims}_{shape}_{ring}_{_joined(self.k_copy, self.v_copy)}{layout}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        return self._cannot_read() or self._cannot_run()

    def _cannot_read(self) -> str | None:
        """Why the caches cannot be read."""
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        names = (self.k_format, self.v_format)
        for name, form, head_dim, copy in zip(names, self.formats, self.head_dims, self.copies, strict=True):
            reason = cannot_read(form, head_dim)
            if reason is not None:
                return reason
            if kernel_format(name) != name:
                return f"{name} caches are read by the kernel for {kernel_format(name)}"
            if not form.is_coded and name != self.q_dtype:
                return f"q_dtype {self.q_dtype!r} is not that of a {name} cache"
            if copy not in copies_of(form):
                return f"copy {copy!r} is not one of {copies_of(form)} that {name} has"
        return None

    def _cannot_run(self) -> str | None:
        """Why the CTA's shape does not fit an SM."""
        if self.blocks_per_warp not in (1, 2, MAX_BLOCKS_PER_WARP):
            return f"blocks_per_warp {self.blocks_per_warp} is not 1, 2 or 4"
        if self.warpgroups and (reason := self._cannot_group()) is not None:
            return reason
        features = self.features
        if not 1 <= features.v_rotation <= WIDEST_RESTORED or features.v_rotation & (features.v_rotation - 1):
            return f"v_rotation {features.v_rotation} is not a power of two up to {WIDEST_RESTORED}"
        if features.v_rotation > 1 and self.v_head_dim & (self.v_head_dim - 1):
            return f"v_rotation {features.v_rotation} of a v_head_dim of {self.v_head_dim}"
        if self.num_stages < 2:
            return "num_stages must be at least 2"
        if self.early_tiles not in (0, 1):
            return f"early_tiles {self.early_tiles} is not 0 or 1"
        if self.early_tiles and self.after_append:
            return f"early_tiles {self.early_tiles} of a cache that is still being written is not 0"
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        if self.copy_warps < 1:
            return "copy_warps must be at least 1"
        limits = self.limits
        if self.cta_threads > limits.threads:
            most = limits.threads // WARP_THREADS
            return f"{self.num_warps} + {self.copy_warps} warps are more than the {most} of a CTA"
        if (self.smem_bytes + limits.reserved_shared_bytes) * self.ctas_per_sm > limits.sm_shared_bytes:
            return f"{self.ctas_per_sm} CTAs of {self.smem_bytes} bytes exceed the {limits.shared_bytes} bytes of an SM"
        return None

    def _cannot_group(self) -> str | None:
        """Why the warps of four slices cannot multiply together."""
        if not all(form.decode and form.decode.warpgroups for form in self.formats):
            return f"warpgroups of {_joined(self.k_format, self.v_format)} caches, not of 'int4_g1'"
        if self.head_dims != (128, 128):
            return f"warpgroups of head_dim {self.head_dim}, v_head_dim {self.v_head_dim}, not of 128"
        if self.blocks_per_warp != MAX_BLOCKS_PER_WARP or self.blocks_per_slice != 1 or self.num_roles != 1:
            return "warpgroups want 4 blocks of queries, one of tokens, and one role"
        if self.num_slices != 2 * WARPGROUP_WARPS:
            return f"warpgroups of {self.num_slices} slices, not of the {2 * WARPGROUP_WARPS} of two that take turns"
        return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _joined(of_k: str, of_v: str) -> str:
    return of_k if of_k == of_v else f"{of_k}_{of_v}"
