"""Which configuration serves a call. Plain Python, no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.attention.features import PLAIN, Features
from cute_kernels.attention.tiles import kernel_format
from cute_kernels.extend.config import MAX_SPLITS, TILE_ROWS, ExtendConfig, columns_of
from cute_kernels.kv_formats import format_of

TILE_TOKENS = {64: 128, 128: 128, 256: 64}  # by operands' columns: accumulators of scores and of values fit a thread
DECODE_WARPS = {64: 8, 128: 8, 256: 4}  # with 8 a thread begins with 128 registers: too few for 128 sums
BLOCK_TOKENS = 128
# Of a CTA, in blocks of keys that it could have multiplied meanwhile: to begin and to end a work tile; to write its
# partial result and to have it read again; to wait for the kernel that puts splits together.
TILE_COST, PARTIAL_COST, COMBINE_COST = 1.5, 4.0, 3.0


@dataclass(frozen=True)
class ExtendProblem:
    """Everything about a call that its configuration depends on.

    Attributes:
        head_dim, k_format, v_format, q_dtype: of the tensors.
        page_tokens: tokens that certainly lie together in a paged cache, 0 for contiguous ones.
        features: what the call asks for beyond softmax(q K^T) V.
        tree: whether a mask says which new tokens a query sees.
    """

    head_dim: int
    k_format: str
    v_format: str
    q_dtype: str
    page_tokens: int = 0
    features: Features = PLAIN
    tree: bool = False


def choose(problem: ExtendProblem) -> ExtendConfig:
    """The configuration that serves a problem."""
    return ExtendConfig(
        k_format=kernel_format(problem.k_format),
        v_format=kernel_format(problem.v_format),
        q_dtype=problem.q_dtype,
        head_dim=problem.head_dim,
        tile_tokens=TILE_TOKENS[columns_of(problem.head_dim)],
        producer_warps=DECODE_WARPS[columns_of(problem.head_dim)] if format_of(problem.k_format).is_coded else 4,
        page_tokens=problem.page_tokens,
        features=problem.features,
        tree=problem.tree,
    )


def choose_newer(config: ExtendConfig) -> ExtendConfig:
    """What serves the queries' own tokens in 16 bits, and merges with what ``config`` makes of those in the cache."""
    return ExtendConfig(
        k_format=config.q_dtype,
        v_format=config.q_dtype,
        q_dtype=config.q_dtype,
        head_dim=config.head_dim,
        tile_tokens=TILE_TOKENS[config.columns],
        features=replace(config.features, paged=False, head_major=False),
        ragged=True,
        merges=True,
        tree=config.tree,
    )


def count_tiles(total_q: int, batch: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Numbers of work tiles that a launch has, some of them of none: a request has at most one of these a KV head."""
    return (total_q * (num_q_heads // num_kv_heads) // TILE_ROWS + batch) * num_kv_heads


def choose_splits(total_q: int, batch: int, num_q_heads: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """How many parts each work tile's keys are cut into: as many as give the busiest CTA least.

    How long requests are is known on the device alone: queries count as if requests had equally many of them, and keys
    as if all were max_seq_len long.
    """
    if not (total_q and batch):
        return 1
    rows = -(-total_q // batch) * (num_q_heads // num_kv_heads)
    tiles = min(batch, total_q) * -(-rows // TILE_ROWS) * num_kv_heads
    blocks = -(-max_seq_len // BLOCK_TOKENS)

    def time(splits: int) -> float:
        """Of the busiest CTA, in blocks of keys."""
        extra = PARTIAL_COST if splits > 1 else 0.0
        rounds = -(-tiles * splits // num_sms)
        return rounds * (blocks / splits + TILE_COST + extra) + (COMBINE_COST if splits > 1 else 0.0)

    return min(range(1, min(MAX_SPLITS, max(blocks, 1)) + 1), key=time)
