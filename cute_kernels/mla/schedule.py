"""Which kernel serves a call, and how many parts a row's tokens are cut into: plain Python, no GPU types.

The model counts waves of CTAs, one to an SM: every CTA costs its beginning and end and so many blocks of tokens;
cutting costs a second launch that reads what the parts wrote. The constants are microseconds of one CTA on an H200,
estimated from the cycle budgets of docs/design/mla.md and mla_few_heads.md and not measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, V_HEAD_DIM, MlaConfig, served_config
from cute_kernels.mla.few_heads.config import FewHeadsConfig, served_few_heads
from cute_kernels.sm90 import NUM_SMS

COMBINE_US = 3.0
PARTIAL_BYTES_PER_US = 4.0e6  # written, then read
MAX_PARTS = 64


@dataclass(frozen=True)
class Rate:
    """What a CTA of a kernel does and costs.

    Attributes:
        heads: of a CTA.
        block_us: of 64 tokens.
        cta_us: queries, the first tile, the output.
    """

    heads: int
    block_us: float
    cta_us: float


WIDE = Rate(BLOCK_HEADS, 2.0, 5.0)
FEW_HEADS = (Rate(8, 1.4, 4.0), Rate(16, 1.4, 4.0), Rate(32, 1.6, 4.5))
FEW_HEADS_FORMS = ("mla_fp8",)


@dataclass(frozen=True)
class WorkShape:
    """What decides the cut: rows that share their tokens, heads of a row, tokens with those of an extra cache."""

    num_rows: int
    num_heads: int
    num_tokens: int
    num_sms: int = NUM_SMS

    @property
    def num_blocks(self) -> int:
        """Blocks of tokens of a row."""
        return max(1, -(-self.num_tokens // BLOCK_TOKENS))

    def num_ctas(self, heads: int) -> int:
        """CTAs of so many heads without a cut."""
        return self.num_rows * -(-self.num_heads // heads)


def cost_us(shape: WorkShape, num_parts: int, rate: Rate = WIDE) -> float:
    """Modelled time of a launch with so many parts."""
    blocks = -(-shape.num_blocks // num_parts)
    waves = -(-shape.num_ctas(rate.heads) * num_parts // shape.num_sms)
    time = waves * (rate.cta_us + blocks * rate.block_us)
    if num_parts > 1:
        partial_bytes = 2 * shape.num_rows * shape.num_heads * num_parts * V_HEAD_DIM * 4
        time += COMBINE_US + partial_bytes / PARTIAL_BYTES_PER_US
    return time


def choose_parts(shape: WorkShape, rate: Rate = WIDE) -> int:
    """The cheapest number of parts, the smallest of equals; none of them without blocks where all tokens count."""
    most = min(MAX_PARTS, shape.num_blocks)
    candidates = [n for n in range(1, most + 1) if -(-shape.num_blocks // -(-shape.num_blocks // n)) == n]
    return min(candidates, key=lambda n: (cost_us(shape, n, rate), n))


def choose(tokens: str, form: str, shape: WorkShape) -> tuple[MlaConfig | FewHeadsConfig, int]:
    """The variant that serves a call (its `can_implement` says where there is none) and the number of parts."""
    rates = (*FEW_HEADS, WIDE) if form in FEW_HEADS_FORMS else (WIDE,)
    parts = {rate: choose_parts(shape, rate) for rate in rates}
    rate = min(rates, key=lambda rate: cost_us(shape, parts[rate], rate))
    config = served_config(tokens, form) if rate is WIDE else served_few_heads(tokens, rate.heads)
    return config, parts[rate]
