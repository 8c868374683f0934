"""Chooses the kernel of a call, and the number of parts into which a row's tokens are cut. Plain Python, no GPU types.

The model counts waves of CTAs, one CTA to an SM. A CTA's time is a constant plus a time for each block of tokens. Cut
rows also cost a second launch that reads the parts, unless the CTAs of one launch add them up. The constants are fitted
to times on an H200, see docs/design/mla_few_heads.md and docs/design/mla.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.mla.config import (
    BLOCK_HEADS,
    BLOCK_TOKENS,
    COMBINE_SLOTS,
    COOPERATIVE_PARTS,
    HEAD_DIM,
    MAX_PARTS,
    PARTIALS,
    SCALED_PARTIALS,
    SCALES,
    V_HEAD_DIM,
    MlaConfig,
    fits_crossover,
    is_mma_bound,
    served_config,
)
from cute_kernels.mla.few_heads.config import FORM as FEW_HEADS_FORM
from cute_kernels.mla.few_heads.config import SERVED_CLUSTER, FewHeadsConfig, served_few_heads

COMBINE_US = 6.8  # what a second launch costs besides reading
PARTIAL_BYTES_PER_US = 4.4e6  # written, then read
HEAD_WRITTEN_US, HEAD_ADDED_US = 0.0004, 0.025  # of a part: one of all, one of a CTA's, where CTAs add up together
STREAM_K = 0  # in place of a number of parts: every team of CTAs has an equal work range over all rows
MAX_STREAM_K_REQUESTS = 4096  # every warp adds up their lengths
ROW_US = 2.0  # of a team, from one row of stream-K to the next
CUT_US = 8.0  # of a team: to put a row down and to take one up
MULTICAST_BLOCKS = 16  # of a work tile, from which on TMA multicast to a pair of CTAs is worth it
EAGER_BLOCKS = 16  # of a CTA, for which crossover with the right half a block later is worth its longer program
CLUSTER_SMS = 0.5  # of all: a cluster waits for SMs of one GPC, which others may have


@dataclass(frozen=True)
class Rate:
    """The work and the time of one CTA of a kernel.

    Attributes:
        heads: number of heads of a CTA.
        block_us: microseconds for a block of 64 tokens.
        cta_us: additional microseconds of a CTA: for queries, the first tile and the output.
        cluster: number of CTAs of a cluster that compute the parts of a row and add them up; 1 if a second launch adds
            them up.
        value_bytes: number of bytes of a value in a partial result.
        cooperative: whether the CTAs of a launch add up the parts, see `.combine.cooperative`.
    """

    heads: int
    block_us: float
    cta_us: float
    cluster: int = 1
    value_bytes: int = PARTIALS[SCALED_PARTIALS].value_bytes
    cooperative: bool = False


WIDE = Rate(BLOCK_HEADS, 2.8, 7.3)
CROSSOVER = Rate(BLOCK_HEADS, 2.2, 6.8)
COOPERATIVE = Rate(BLOCK_HEADS, 2.2, 9.2, cooperative=True)
COPIES = Rate(BLOCK_HEADS, 1.55, 6.8)  # tokens of 16-bit numbers
FEW_HEADS_BYTES = PARTIALS[FewHeadsConfig.partials].value_bytes
FEW_HEADS = (
    Rate(8, 1.7, 3.3, value_bytes=FEW_HEADS_BYTES),
    Rate(16, 1.72, 3.7, value_bytes=FEW_HEADS_BYTES),
    Rate(32, 2.88, 4.1, value_bytes=FEW_HEADS_BYTES),
    Rate(SERVED_CLUSTER[0], 1.65, 6.9, SERVED_CLUSTER[1], FEW_HEADS_BYTES),
)


@dataclass(frozen=True)
class Workload:
    """The sizes that decide how rows are cut.

    Attributes:
        num_rows: number of rows; a row has all heads that share its tokens.
        num_heads: number of heads of a row.
        num_tokens: the largest number of tokens that a row may have, tokens of an extra cache included.
        tma_tiles: whether TMA loads the tokens, see `.config.fits_tma_tiles`.
    """

    num_rows: int
    num_heads: int
    num_tokens: int
    num_sms: int = MlaConfig.limits.num_sms
    tma_tiles: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of blocks of tokens of a row."""
        return max(1, -(-self.num_tokens // BLOCK_TOKENS))

    def num_ctas(self, heads: int) -> int:
        """Returns how many CTAs a launch has if no row is cut. heads: number of heads of a CTA."""
        return self.num_rows * self.head_blocks(heads)

    def head_blocks(self, heads: int) -> int:
        """Returns how many CTAs a row needs. heads: number of heads of a CTA."""
        return -(-self.num_heads // heads)

    def cta_blocks(self, num_parts: int) -> int:
        """Returns how many blocks a CTA has. num_parts: the number of parts of a row, or STREAM_K."""
        if num_parts == STREAM_K:
            return self.num_rows * self.num_blocks // self.teams
        return -(-self.num_blocks // num_parts)

    @property
    def teams(self) -> int:
        """The number of teams that run at once. A team is the CTAs for all heads of a row."""
        return self.num_sms // self.head_blocks(BLOCK_HEADS)

    @property
    def has_stream_k(self) -> bool:
        """Whether stream-K supports these rows. There must be at least as many rows as teams; otherwise a team would
        wait for the team before it. There must be few requests, since every warp adds up their lengths.
        """
        return 0 < self.teams <= self.num_rows <= MAX_STREAM_K_REQUESTS


def cost_us(shape: Workload, num_parts: int, rate: Rate = WIDE) -> float:
    """Returns the modelled time of a launch in microseconds. num_parts: number of parts of a row, or STREAM_K."""
    if num_parts == STREAM_K:
        # The kernel keeps rows whole if they turn out to have equal lengths and that is the faster way.
        row_us = ROW_US + shape.num_blocks * rate.block_us
        cut_us = CUT_US + shape.num_rows / shape.teams * row_us
        return rate.cta_us + min(cut_us, -(-shape.num_rows // shape.teams) * row_us)
    blocks = -(-shape.num_blocks // num_parts)
    if rate.cooperative:
        written, heads = shape.num_ctas(rate.heads) * num_parts * BLOCK_HEADS, cooperative_heads(num_parts)
        return rate.cta_us + blocks * rate.block_us + written * HEAD_WRITTEN_US + heads * num_parts * HEAD_ADDED_US
    waves = -(-shape.num_ctas(rate.heads) * num_parts // shape.num_sms)
    time = waves * (rate.cta_us + blocks * rate.block_us)
    if num_parts > rate.cluster:
        partial_bytes = 2 * shape.num_rows * shape.num_heads * num_parts * V_HEAD_DIM * rate.value_bytes
        time += COMBINE_US + partial_bytes / PARTIAL_BYTES_PER_US
    return time


def possible_parts(shape: Workload, rate: Rate) -> list[int]:
    """Returns the possible numbers of parts of a row, STREAM_K included. Every part of the longest row has at least one
    block.
    """
    if rate.cluster > 1:
        return [rate.cluster]
    most = min(MAX_PARTS, shape.num_blocks)
    found = [n for n in range(1, most + 1) if -(-shape.num_blocks // -(-shape.num_blocks // n)) == n]
    if rate.cooperative:
        return [n for n in found if fits_cooperative(shape, n)]
    if rate.heads == BLOCK_HEADS and shape.has_stream_k:
        found.append(STREAM_K)
    return found


def choose_parts(shape: Workload, rate: Rate = WIDE) -> int:
    """Returns the cheapest number of parts, or STREAM_K. If several cost the same, returns the smallest. For clusters,
    the result is the cluster's size.
    """
    return min(possible_parts(shape, rate), key=lambda n: (cost_us(shape, n, rate), n))


def cooperative_heads(num_parts: int) -> int:
    """Returns how many heads a CTA adds up in a cooperative combine: see `.combine.cooperative.PartPlaces`."""
    return 4 if num_parts >= 16 else 8 if num_parts >= 8 else 16


def fits_cooperative(shape: Workload, num_parts: int) -> bool:
    """Returns whether the CTAs of a launch can add up ``num_parts`` parts of each row: each CTA needs its own SM."""
    return num_parts in COOPERATIVE_PARTS and shape.num_ctas(BLOCK_HEADS) * num_parts <= shape.num_sms


def count_ctas(shape: Workload, num_parts: int) -> int:
    """Returns the number of CTAs of the kernel for 64 heads. It is one for every work tile or, under stream-K, the CTAs
    of all teams.

    Raises ValueError if stream-K does not fit.
    """
    if num_parts == STREAM_K:
        if not shape.has_stream_k:
            raise ValueError(
                f"num_parts: got {STREAM_K}, {shape.num_rows} rows under stream-K; want at least {shape.teams}"
            )
        return shape.teams * shape.head_blocks(BLOCK_HEADS)
    return shape.num_ctas(BLOCK_HEADS) * num_parts


def choose_combine(shape: Workload) -> tuple[int, int]:
    """Returns (`CombineConfig.slots`, row_bits) of the combining kernel. The fewer rows there are, the more threads
    work on a row."""
    rows, slots = shape.num_rows * shape.num_heads, COMBINE_SLOTS[1]
    for row_bits in range(slots.bit_length()):
        if -(-rows >> row_bits) <= shape.num_sms:
            return slots, row_bits
    return COMBINE_SLOTS[0], 0


def choose(tokens: str, form: str, head_dim: int, shape: Workload) -> tuple[MlaConfig | FewHeadsConfig, int]:
    """Returns (the variant for a call, the number of parts of a row)."""
    own = WIDE if form in SCALES else COPIES
    crossover = fits_crossover(tokens, form, shape.num_heads, shape.tma_tiles)
    wide = CROSSOVER if crossover and tokens == "sparse" else own
    rates = [wide]
    if (form, head_dim) == (FEW_HEADS_FORM, HEAD_DIM):
        rates += [rate for rate in FEW_HEADS if rate.cluster == 1 or _has_room(shape, rate)]
    if wide is CROSSOVER and form == FEW_HEADS_FORM and possible_parts(shape, COOPERATIVE):
        rates.append(COOPERATIVE)
    parts = {rate: choose_parts(shape, rate) for rate in rates}
    rate = min(rates, key=lambda rate: cost_us(shape, parts[rate], rate))
    if rate.cooperative:
        return served_config(tokens, form, head_dim, crossover, cooperative=True), parts[rate]
    if rate is wide:
        return _wide_config(tokens, form, head_dim, shape, parts[rate]), parts[rate]
    return served_few_heads(tokens, rate.heads, rate.cluster), parts[rate]


def _wide_config(tokens: str, form: str, head_dim: int, shape: Workload, num_parts: int) -> MlaConfig:
    """Returns the variant of the kernel for 64 heads a CTA."""
    crossover = fits_crossover(tokens, form, shape.num_heads, shape.tma_tiles)
    blocks = shape.cta_blocks(num_parts)
    if shape.tma_tiles:
        # One block of heads of uncut rows waits for memory; several for the tensor cores.
        crossover = crossover and -(-shape.num_blocks // max(num_parts, 1)) >= MULTICAST_BLOCKS
        eager = shape.num_heads <= BLOCK_HEADS and num_parts <= 1
    else:
        eager = crossover and blocks >= EAGER_BLOCKS
        crossover = crossover and (eager or tokens == "sparse")
    mma_bound = is_mma_bound(form, shape.num_heads)
    return served_config(tokens, form, head_dim, crossover, mma_bound, shape.tma_tiles, eager)


def _has_room(shape: Workload, rate: Rate) -> bool:
    """Returns whether all clusters of a launch can run at the same time, and the longest row has a block for each
    CTA."""
    wanted = shape.num_ctas(rate.heads) * rate.cluster
    return wanted <= CLUSTER_SMS * shape.num_sms and shape.num_blocks >= rate.cluster
