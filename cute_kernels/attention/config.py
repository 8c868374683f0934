"""Every compile-time choice of the decode attention kernel, as data. No GPU types here."""

from dataclasses import asdict, dataclass

from cute_kernels.attention.tiles import copies_of, tile_of
from cute_kernels.kv_formats import KvFormat, format_of
from layouts.kv.tile import BLOCK_TOKENS

WARP_THREADS = 32
WRITE_LSE, KEEP_PARTIALS = 1, 2  # bits of a launch's mode
HEADS_PER_WARP = 8  # columns of mma.m16n8: query heads of one KV head that a warp carries
MAX_SHARED_BYTES = 227 * 1024  # what one CTA may use on sm_90
RESERVED_SHARED_BYTES = 1024  # taken by the system for every resident CTA
BARRIER_BYTES = 8
MERGE_PAD = 4  # words between the query heads of the merge buffer
EMPTY_WORD = 0xFFFFFFFF  # of the workspace where nothing is; a NaN that no arithmetic yields
PAIR_BYTES = 8  # a softmax maximum and sum


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled variant.

    A CTA holds ``num_heads * num_query_blocks * num_slices`` warps. All of them read the same ring of ``num_stages``
    tiles of K and V; a warp takes one KV head of the tile, one block of up to 8 of its query heads, and one slice of
    its tokens.

    Attributes:
        kv_format: name of the cache format, see :mod:`cute_kernels.kv_formats`.
        q_dtype: "bf16" or "fp16", of q and out.
        head_dim: 64, 128 or 256.
        num_heads: KV heads of a CTA.
        num_query_blocks: blocks of 8 query heads per KV head in a CTA.
        num_slices: warps that share the tokens of a tile.
        blocks_per_slice: blocks of 32 tokens that a warp takes from one tile.
        num_stages: tiles of the ring; all but one are in flight.
        early_tiles: tiles asked for before the request's length is known (0 to num_stages - 1); what lies past the
            length is read for nothing.
        ctas_per_sm: CTAs meant to be resident on one SM; bounds the registers.
        contiguous: whether a CTA's heads are all the heads of the cache, so that a tile is one run of bytes.
        copy: "bulk" (cp.async.bulk of raw rows), "tma" (tensor map with swizzle), or "word" (cp.async of 4 bytes, for
            caches whose rows are not 16-byte aligned).
    """

    kv_format: str
    q_dtype: str
    head_dim: int
    num_heads: int = 1
    num_query_blocks: int = 1
    num_slices: int = 4
    blocks_per_slice: int = 1
    num_stages: int = 3
    ctas_per_sm: int = 4
    early_tiles: int = 1
    contiguous: bool = True
    copy: str = "bulk"

    @property
    def format(self) -> KvFormat:
        return format_of(self.kv_format)

    @property
    def num_warps(self) -> int:
        return self.num_heads * self.num_query_blocks * self.num_slices

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_THREADS

    @property
    def num_roles(self) -> int:
        """Warps that differ in the query heads they carry."""
        return self.num_heads * self.num_query_blocks

    @property
    def slice_tokens(self) -> int:
        return self.blocks_per_slice * BLOCK_TOKENS

    @property
    def tile_tokens(self) -> int:
        return self.num_slices * self.slice_tokens

    @property
    def tile_bytes(self) -> int:
        """Shared memory of one operand (K or V) of one tile."""
        # Every tile starts on 128 bytes, which bulk copies like.
        return -(-tile_of(self).num_bytes // 128) * 128

    @property
    def ring_bytes(self) -> int:
        return 2 * self.num_stages * self.tile_bytes

    @property
    def merge_bytes(self) -> int:
        """Shared memory of the merge of the warps' results, which takes the ring's place at the end."""
        rows = self.num_roles * HEADS_PER_WARP
        outputs = self.num_slices * rows * (self.head_dim + MERGE_PAD) * 4
        return outputs + self.num_slices * rows * PAIR_BYTES

    @property
    def partial_words(self) -> int:
        """Workspace of a query head and split, in words: each vector of 4 columns with its maximum and sum."""
        return self.head_dim + self.head_dim // 2

    @property
    def smem_bytes(self) -> int:
        return max(self.ring_bytes, self.merge_bytes) + (2 * self.num_stages + 1) * BARRIER_BYTES

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        shape = f"h{self.num_heads}q{self.num_query_blocks}s{self.num_slices}b{self.blocks_per_slice}"
        ring = f"r{self.num_stages}c{self.ctas_per_sm}e{self.early_tiles}"
        layout = "" if self.contiguous else "_strided"
        return f"decode_{self.kv_format}_{self.q_dtype}_d{self.head_dim}_{shape}_{ring}_{self.copy}{layout}"

    def to_dict(self) -> dict[str, str | int | bool]:
        return asdict(self)

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.head_dim not in (64, 128, 256):
            return f"head_dim {self.head_dim} is not 64, 128 or 256"
        if self.q_dtype not in ("bf16", "fp16"):
            return f"q_dtype {self.q_dtype!r} is not 'bf16' or 'fp16'"
        if self.num_stages < 2:
            return "num_stages must be at least 2"
        if not 0 <= self.early_tiles < self.num_stages:
            return f"early_tiles {self.early_tiles} is not from 0 to num_stages - 1 = {self.num_stages - 1}"
        if self.num_threads > 1024:
            return f"{self.num_warps} warps are more than the 32 of a CTA"
        if self.copy not in copies_of(self.format):
            return f"copy {self.copy!r} is not one of {copies_of(self.format)} that {self.kv_format} has"
        if (self.smem_bytes + RESERVED_SHARED_BYTES) * self.ctas_per_sm > MAX_SHARED_BYTES + RESERVED_SHARED_BYTES:
            return f"{self.ctas_per_sm} CTAs of {self.smem_bytes} bytes exceed the {MAX_SHARED_BYTES} bytes of an SM"
        return None
