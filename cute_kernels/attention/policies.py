"""The policies that a decode attention kernel is composed of, as data. Each policy has fields, a part of a CTA and a
part of the kernel's name. A policy also says why a configuration cannot have it. There are no GPU types here.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.attention.tiles import cannot_read, copies_of, kernel_format
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.kv import KvFormat, format_of

BLOCK_QUERIES = 8  # columns of mma.m16n8: a block of query heads of one KV head
MAX_BLOCKS_PER_WARP = 4
QUERY_VECTOR_BYTES = 4 * MAX_BLOCKS_PER_WARP  # of a lane: one value of each of so many blocks
PAGE_TOKENS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class CacheLoad:
    """K or V: the format of its rows, and how tiles of rows reach shared memory.

    Attributes:
        format: name of the cache format, see :mod:`cute_kernels.formats.kv`.
        head_dim: number of elements of a row. q's rows have as many as K's, out's rows as many as V's.
        copy: "bulk" (cp.async.bulk of raw rows), "map" (a tensor map over words of raw rows, for CTAs that take some of
            a token's heads), "tma" (a tensor map with a swizzle, for rows without headers), or "word" (cp.async of 4
            bytes, for caches whose rows are not 16-byte aligned).
    """

    format: str
    head_dim: int
    copy: str = "bulk"

    @property
    def form(self) -> KvFormat:
        return format_of(self.format)

    def problem(self, q_dtype: str) -> str | None:
        """Returns why the cache cannot be loaded for queries of ``q_dtype``, or None."""
        reason = cannot_read(self.form, self.head_dim)
        if reason is not None:
            return reason
        if kernel_format(self.format) != self.format:
            return f"{self.format} caches are read by the kernel for {kernel_format(self.format)}"
        if not self.form.is_coded and self.format != q_dtype:
            return f"q_dtype {q_dtype!r} is not that of a {self.format} cache"
        if self.copy not in copies_of(self.form):
            return f"copy {self.copy!r} is not one of {copies_of(self.form)} that {self.format} has"
        return None


@dataclass(frozen=True)
class WarpMma:
    """The mainloop in which consumer warps multiply independently, with mma.sync.

    A CTA has ``num_heads * num_query_blocks * num_slices`` consumer warps. Each takes one KV head, ``blocks_per_warp``
    blocks of up to 8 query heads of this KV head, and a slice of every tile's tokens.

    Attributes:
        num_heads: number of KV heads of a CTA.
        num_query_blocks: number of warps among which the query heads of a KV head are divided, for each slice.
        blocks_per_warp: number of blocks of 8 query heads that a warp has: 1, 2 or 4. The blocks share the warp's
            decoded operands. With 4 blocks, and keys that are codes, queries lie in shared memory, since registers only
            have room for accumulators.
        num_slices: number of warps among which the tokens of a tile are divided.
        blocks_per_slice: number of blocks of 32 tokens in a slice of a tile.
    """

    num_heads: int = 1
    num_query_blocks: int = 1
    blocks_per_warp: int = 1
    num_slices: int = 4
    blocks_per_slice: int = 1

    @property
    def name(self) -> str:
        blocks = f"w{self.blocks_per_warp}" if self.blocks_per_warp > 1 else ""
        return f"h{self.num_heads}q{self.num_query_blocks}{blocks}s{self.num_slices}b{self.blocks_per_slice}"

    def shares_queries(self, k: CacheLoad) -> bool:
        """Returns whether the queries' B operands lie in shared memory, in one copy for all warps that have the same
        queries.
        """
        return self.blocks_per_warp == MAX_BLOCKS_PER_WARP and k.form.is_coded

    def role_query_bytes(self, k: CacheLoad) -> int:
        """Returns the bytes of shared memory for the queries of one role (the warps with the same queries); 0 if
        queries stay in registers.

        The queries of a lane are vectors of words, each with one word for each block of queries. There is one vector
        for each B register, that is for 8 columns of K, and two for the sums of each group of columns.
        """
        vectors = k.head_dim // 8 + 2 * k.form.num_groups
        return vectors * WARP_THREADS * QUERY_VECTOR_BYTES if self.shares_queries(k) else 0

    def query_bytes(self, k: CacheLoad) -> int:
        """Returns the bytes of shared memory of all queries."""
        return self.num_heads * self.num_query_blocks * self.role_query_bytes(k)

    def problem(self) -> str | None:
        """Returns why this mainloop cannot be compiled, or None."""
        if self.blocks_per_warp not in (1, 2, MAX_BLOCKS_PER_WARP):
            return f"blocks_per_warp {self.blocks_per_warp} is not 1, 2 or 4"
        return None


ONE_HEAD = WarpMma()


@dataclass(frozen=True)
class CopyPipeline:
    """The copies that an SM has in flight. An SM has several CTAs, each with a ring of tiles that producer warps keep
    full.

    Attributes:
        num_stages: number of tiles of the ring.
        producer_warps: number of warps that only load tiles; a warp with nothing to copy is idle. Four producer warps
            lend registers to eight consumer warps.
        ctas_per_sm: number of CTAs that are to be resident on one SM. It limits a thread's registers.
        early_tiles: number of tiles, 0 or 1, that are loaded before the request's length is known. A load beyond the
            length is wasted. 0 with ``after_append``.
    """

    num_stages: int = 3
    producer_warps: int = 1
    ctas_per_sm: int = 4
    early_tiles: int = 1

    @property
    def name(self) -> str:
        producers = f"p{self.producer_warps}" if self.producer_warps > 1 else ""
        return f"r{self.num_stages}{producers}c{self.ctas_per_sm}e{self.early_tiles}"

    def problem(self, after_append: bool) -> str | None:
        """Returns why a kernel cannot have this pipeline, or None. after_append: whether the kernel directly follows an
        append."""
        if self.num_stages < 2:
            return "num_stages must be at least 2"
        if self.early_tiles not in (0, 1):
            return f"early_tiles {self.early_tiles} is not 0 or 1"
        if self.early_tiles and after_append:
            return f"early_tiles {self.early_tiles} of a cache that is still being written is not 0"
        return "producer_warps must be at least 1" if self.producer_warps < 1 else None


THREE_STAGES = CopyPipeline()


@dataclass(frozen=True)
class TokenRuns:
    """The parts of a cache that are always contiguous in memory.

    Attributes:
        contiguous: whether a CTA has all heads of the cache, so that a tile is one run of bytes.
        page_tokens: number of contiguous tokens in a paged cache, a power of two; 0 for contiguous caches.
    """

    contiguous: bool = True
    page_tokens: int = 0

    @property
    def name(self) -> str:
        return ("" if self.contiguous else "_strided") + (f"_p{self.page_tokens}" if self.page_tokens else "")

    def problem(self) -> str | None:
        """Returns why no kernel can have these runs, or None."""
        if self.page_tokens and self.page_tokens not in PAGE_TOKENS:
            return f"page_tokens {self.page_tokens} is not 0 or one of {', '.join(map(str, PAGE_TOKENS))}"
        return None


WHOLE_CACHE = TokenRuns()


def joined(of_k: str, of_v: str) -> str:
    """Joins a part of K's name and a part of V's name. If both parts are equal, returns one of them."""
    return of_k if of_k == of_v else f"{of_k}_{of_v}"
