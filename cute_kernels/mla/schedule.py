"""How many parts a row's tokens are cut into: plain Python, no GPU types.

The model counts waves of CTAs, one to an SM: every CTA costs its beginning and end and so many blocks of tokens;
cutting costs a second launch that reads what the parts wrote. The constants are microseconds of one CTA on an H200,
estimated from the cycle budget of docs/design/mla.md and not measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, V_HEAD_DIM
from cute_kernels.sm90 import NUM_SMS

BLOCK_US = 2.0  # of 64 tokens
CTA_US = 5.0  # queries, the first tile, the output
COMBINE_US = 3.0
PARTIAL_BYTES_PER_US = 4.0e6  # written, then read
MAX_PARTS = 64


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

    @property
    def num_ctas(self) -> int:
        """CTAs without a cut."""
        return self.num_rows * -(-self.num_heads // BLOCK_HEADS)


def cost_us(shape: WorkShape, num_parts: int) -> float:
    """Modelled time of a launch with so many parts."""
    blocks = -(-shape.num_blocks // num_parts)
    waves = -(-shape.num_ctas * num_parts // shape.num_sms)
    time = waves * (CTA_US + blocks * BLOCK_US)
    if num_parts > 1:
        partial_bytes = 2 * shape.num_rows * shape.num_heads * num_parts * V_HEAD_DIM * 4
        time += COMBINE_US + partial_bytes / PARTIAL_BYTES_PER_US
    return time


def choose_parts(shape: WorkShape) -> int:
    """The cheapest number of parts, the smallest of equals; none of them without blocks where all tokens count."""
    most = min(MAX_PARTS, shape.num_blocks)
    candidates = [n for n in range(1, most + 1) if -(-shape.num_blocks // -(-shape.num_blocks // n)) == n]
    return min(candidates, key=lambda n: (cost_us(shape, n), n))
