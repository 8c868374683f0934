"""The compile-time choices of the kernel for few heads, and sizes derived from them. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.device.cuda import BARRIER_BYTES, WARP_THREADS
from cute_kernels.mla.config import BLOCK_TOKENS, HEAD_DIM, PARTIALS, TOKENS, V_HEAD_DIM
from cute_kernels.mla.layout import SLAB_COLUMNS, TokenLayout, layout_of

HEADS = (8, 16, 32)  # columns of a CTA's products
FORM = "mla_fp8"
LAYOUT = layout_of(FORM, HEAD_DIM)
PARTIAL_NAME = "fp32"  # a part of 16 heads has few values
PARTIAL = PARTIALS[PARTIAL_NAME]
NUM_TILES = LAYOUT.num_scales  # of 128 columns of a token, each with a scale
TILE_COLUMNS = LAYOUT.slabs_per_scale * SLAB_COLUMNS
ROW_BYTES = LAYOUT.data_bytes
SCALES_OFFSET = LAYOUT.scales_offset or 0  # in a row's bytes
ROPE_OFFSET = LAYOUT.rope_offset
STAGE_BYTES = BLOCK_TOKENS * ROW_BYTES

SCORE_WARPS, VALUE_WARPS, PRODUCER_WARPS = 4, 8, 4  # in this order
CONSUMER_WARPS = SCORE_WARPS + VALUE_WARPS
NUM_THREADS = (CONSUMER_WARPS + PRODUCER_WARPS) * WARP_THREADS
SCORE_THREADS = SCORE_WARPS * WARP_THREADS
CONSUMER_THREADS = CONSUMER_WARPS * WARP_THREADS
WARP_TOKENS = BLOCK_TOKENS // SCORE_WARPS  # of a block, that a score warp scores and a producer warp copies
WARP_COLUMNS = V_HEAD_DIM // VALUE_WARPS  # of the output, that an value warp has

LATENT_STEPS = V_HEAD_DIM // 16  # MMAs that contract the codes of a row
ROPE_STEPS = (HEAD_DIM - V_HEAD_DIM) // 16
NUM_STEPS = LATENT_STEPS + ROPE_STEPS
LAUNCH_REGISTERS = 128  # a thread
# What they have in the end: producer warps leave theirs to the others.
SCORE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS = 160, 136, 80
WEIGHT_BUFFERS = 2
MATRIX_BYTES = 16 * BLOCK_TOKENS  # weights of 8 heads for a tile: 16 bytes a token
FLAG_BYTES = 4 * PRODUCER_WARPS  # of a block: a word of 16 bits for every 16 tokens
MAX_STAGES = 5
CLUSTERS = (1, 2, 4, 8)
SERVED_STAGES = {8: 4, 16: 4, 32: 3}
SERVED_CLUSTER = (8, 8)  # heads, parts

assert NUM_TILES * TILE_COLUMNS == V_HEAD_DIM and LAYOUT.scale_bytes == 4 * NUM_TILES and not LAYOUT.is_split


@dataclass(frozen=True)
class FewHeadsConfig:
    """One variant of MLA decode for few heads.

    Attributes:
        tokens: as in `MlaConfig`.
        heads: number of heads of a CTA, the columns of its MMAs: 8, 16 or 32. Rows with more heads take more CTAs.
        stages: number of blocks of tokens that shared memory holds.
        cluster: number of parts of every row, which is also the number of CTAs of the cluster that adds them up. 1: no
            cluster.
        ahead: how many blocks ahead entries (indices or page numbers) are loaded: while the tokens of block i are
            copied, the entries of block i + ``ahead`` are loaded.
    """

    limits: ClassVar[Limits] = HOPPER
    form: ClassVar[str] = FORM
    head_dim: ClassVar[int] = HEAD_DIM
    layout: ClassVar[TokenLayout] = LAYOUT
    partials: ClassVar[str] = PARTIAL_NAME
    tma_tiles: ClassVar[bool] = False  # which bring tokens of 16 bits
    tokens: str = "sparse"
    heads: int = 16
    stages: int = 4
    ahead: int = 3
    cluster: int = 1

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        cluster = f"c{self.cluster}" if self.cluster > 1 else ""
        return f"{self.form}_{self.tokens}_h{self.heads}_s{self.stages}a{self.ahead}{cluster}"

    @property
    def head_blocks(self) -> int:
        """The number of blocks of 8 heads of a CTA; 8 is the N of an MMA."""
        return self.heads // 8

    @property
    def vector_words(self) -> int:
        """Number of words of the queries' operands that a lane loads at once."""
        return min(4, 2 * self.head_blocks)

    @property
    def step_vectors(self) -> int:
        """The number of loads of `vector_words` for a step of 16 columns."""
        return 2 * self.head_blocks // self.vector_words

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory for tokens."""
        return self.stages * STAGE_BYTES

    @property
    def statistic_bytes(self) -> int:
        """Bytes of shared memory for the statistics that a cluster's CTAs exchange: a maximum and a total for each
        head.
        """
        return 8 * self.heads if self.cluster > 1 else 0

    @property
    def query_bytes(self) -> int:
        """Bytes of shared memory for the queries, as operands."""
        return NUM_STEPS * WARP_THREADS * self.head_blocks * 8

    @property
    def weight_bytes(self) -> int:
        """Bytes of shared memory for a block's weights. Every tile of 128 columns has its own weights."""
        return NUM_TILES * self.head_blocks * MATRIX_BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes of an fp32 array with one element for each head."""
        return 4 * self.heads

    @property
    def factor_bytes(self) -> int:
        """Bytes of an fp32 array with one element for each tile and head."""
        return NUM_TILES * self.head_bytes

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory for the values that score warps exchange: an element for each head and one for each
        tile.
        """
        return SCORE_WARPS * (self.head_bytes + 4 * NUM_TILES)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        stages = self.ring_bytes + self.stages * (FLAG_BYTES + 2 * BARRIER_BYTES)
        # Buffers of weights have factors and a word that says whether these are to be used.
        buffers = WEIGHT_BUFFERS * (self.weight_bytes + self.factor_bytes + 16 + 2 * BARRIER_BYTES)
        once = self.query_bytes + self.head_bytes + self.exchange_bytes + self.factor_bytes + self.statistic_bytes
        return stages + buffers + once

    def can_implement(self) -> str | None:
        """Returns why the configuration cannot be compiled, or None."""
        if self.tokens not in TOKENS:
            return f"tokens is {self.tokens!r}; want one of {TOKENS}"
        if self.heads not in HEADS:
            return f"heads is {self.heads}; want one of {HEADS}"
        if not 2 <= self.stages <= MAX_STAGES:
            return f"stages is {self.stages}; want 2 to {MAX_STAGES}"
        if self.cluster not in CLUSTERS:
            return f"cluster is {self.cluster}; want one of {CLUSTERS}"
        if not 1 <= self.ahead <= 8:
            return f"ahead is {self.ahead}; want 1 to 8"
        return self.limits.refuses(NUM_THREADS, self.smem_bytes)


def served_few_heads(tokens: str, heads: int, cluster: int = 1) -> FewHeadsConfig:
    """Returns the variant that calls use."""
    return FewHeadsConfig(tokens, heads, SERVED_STAGES[heads], cluster=cluster)


def shipped_few_heads() -> list[FewHeadsConfig]:
    """Lists the configurations that bundles contain."""
    variants = (*((heads, 1) for heads in HEADS), SERVED_CLUSTER)
    return [served_few_heads(tokens, *variant) for tokens in TOKENS for variant in variants]
