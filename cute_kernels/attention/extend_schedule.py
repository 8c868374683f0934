"""Chooses the configuration of an extend call. Plain Python, no GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from cute_kernels.attention import extend_policies as policies
from cute_kernels.attention.extend_config import MAX_EXTEND_SPLITS, ExtendConfig
from cute_kernels.attention.extend_policies import MOST_COLUMNS, TILE_ROWS, TILE_TOKENS, UnpackConfig
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import kernel_format
from cute_kernels.formats.kv import FORMATS, KvFormat, format_of

DECODE_WARPS = {64: 8, 128: 8, 256: 4, 512: 4}  # with 8 a thread begins with 128 registers: too few for 128 sums
BLOCK_TOKENS = 128
FP8_STAGES = 4  # twice as many as in 16 bits, since a tile has half the bytes
# Costs in blocks of keys that a CTA could have multiplied meanwhile: to begin and end a work tile; to write a partial
# result and have it read again; to wait for the kernel that combines splits.
TILE_COST, PARTIAL_COST, COMBINE_COST = 1.5, 4.0, 3.0
# The share of the rate over unpacked keys that kernels reach which decode the cache themselves, by the kind of scales
# (`ExtendReader`), at 128 to 256 queries, head_dim 128: H200, docs/design/history/extend_attention.md.
READING_RATES = {"row": 0.74, "outside": 0.77, "groups": 0.73}
PRODUCTS_PER_US = 690e6  # FLOP over unpacked keys
UNPACKED_BYTES_PER_US = 3.0e6  # bytes read and written
# Decoding concurrently with a prefill: its memory rate, the SMs that reach it, the factor by which the two slow each
# other, and what two streams that wait for each other cost.
STREAMED_BYTES_PER_US = 4.4e6
STREAMING_SMS, SMS_STEP = 40, 4
SIDE_BY_SIDE_COST, STREAMS_US = 1.12, 10.0
KEY_ROWS = (40, MOST_COLUMNS)  # columns of tiles of key rows: for 10 and 18 queries of 4 heads
KEY_ROWS_TILES = 4  # work tiles an SM that they are fast with, as a fraction: splits cost as much as they gain
DECODE_ROWS = 32  # rows of queries up to which decode attention's own kernel is as fast
KEY_ROWS_WARPS, MOST_STAGES, BARRIERS_BYTES = 4, 6, 32  # key rows' producer warps; stages; bytes of a stage's barriers
MAX_UNPACKED_BYTES = 2**29  # the most memory that a call takes for unpacked rows by its own choice


def choose(problem: AttentionProblem) -> ExtendConfig:
    """Returns the configuration that reads the cache directly, without unpacking."""
    formats = problem.k_format, problem.v_format
    return ExtendConfig(
        k_format=kernel_format(problem.k_format),
        v_format=kernel_format(problem.v_format),
        q_dtype=problem.q_dtype,
        head_dim=problem.head_dim,
        pipeline=_pipeline(problem.head_dim, any(format_of(name).is_coded for name in formats)),
        keys=policies.CachedKeys(problem.page_tokens),
        features=problem.features,
        tree=problem.tree,
    )


def choose_newer(config: ExtendConfig) -> ExtendConfig:
    """Returns the configuration of a second launch, over the 16-bit K and V of the queries' own tokens. The second
    launch merges its result with the result of ``config``, which is over the cache.
    """
    return ExtendConfig(
        k_format=config.q_dtype,
        v_format=config.q_dtype,
        q_dtype=config.q_dtype,
        head_dim=config.head_dim,
        pipeline=_pipeline(config.head_dim, decodes=False),
        keys=policies.RaggedKeys(),
        features=replace(config.features, paged=False, head_major=False),
        merges=True,
        tree=config.tree,
    )


def heads_of_tile(num_kv_heads: int) -> int:
    """Returns the number of KV heads of a work tile of key rows: two if ``num_kv_heads`` is even, else one."""
    return 2 - num_kv_heads % 2


def key_rows_of(
    config: ExtendConfig, tile_rows: int = MOST_COLUMNS, mapped: bool = False, tile_heads: int = 1
) -> ExtendConfig | None:
    """Returns the variant of ``config`` with keys as rows of MMAs and ``tile_rows`` queries as columns; None if it
    cannot be compiled. mapped: whether tensor maps can load rows with their headers. tile_heads: the result of
    `heads_of_tile`, or 1."""
    tokens = TILE_TOKENS[policies.KEY_ROWS_HEAD_DIM] // tile_heads
    least = policies.ProducerPipeline(tokens, num_stages=2, producer_warps=KEY_ROWS_WARPS)
    wide = replace(config, tile_rows=tile_rows, pipeline=least)
    if mapped and any(form.header_bytes for form in wide.formats):
        by_maps = replace(wide, keys=policies.CachedKeys(wide.page_tokens, mapped=True))
        wide = by_maps if by_maps.can_implement() is None else wide
    if wide.can_implement() is not None:
        return None
    assert wide.key_rows is not None
    free = wide.limits.shared_bytes - wide.smem_bytes
    stages = min(MOST_STAGES, 2 + free // (wide.key_rows.stage_bytes + BARRIERS_BYTES))
    return replace(wide, pipeline=replace(wide.pipeline, num_stages=stages))


def choose_key_rows(config: ExtendConfig, mapped: bool = False, tile_heads: int = 1) -> list[ExtendConfig]:
    """Returns the variants of ``config`` with key rows (keys as rows of MMAs, queries as columns). They are for
    launches with few queries a request; the variant for the fewest queries comes first. mapped, tile_heads: as for
    :func:`key_rows_of`.
    """
    configs = [key_rows_of(config, rows, mapped, tile_heads) for rows in KEY_ROWS]
    return [few for few in configs if few is not None]


def serves_key_rows(
    config: ExtendConfig, total_q: int, batch: int, num_q_heads: int, num_kv_heads: int, num_sms: int
) -> bool:
    """Returns whether a launch is faster with ``config``, which has key rows, than with tiles of 128 rows of queries.
    It is faster if a request's queries fit in one work tile of a KV head, and there are enough work tiles. The estimate
    assumes equally many queries in all requests.
    """
    rows = -(-total_q // batch) * (num_q_heads // num_kv_heads)
    return rows <= config.tile_rows and KEY_ROWS_TILES * batch * num_kv_heads >= num_sms


def decodes_with_key_rows(
    configs: list[ExtendConfig], batch: int, q_len: int, num_q_heads: int, num_kv_heads: int, num_sms: int
) -> ExtendConfig | None:
    """Returns the first of ``configs``, all with key rows, that is faster than decode attention's own kernel; None if
    none is.

    Decode attention's kernel decodes a row once for every 32 queries at most. Calls over INT4 always use that kernel,
    as it does not round keys.
    """
    if q_len * (num_q_heads // num_kv_heads) <= DECODE_ROWS:
        return None
    exact = [config for config in configs if all(_is_exact(form) for form in config.formats)]
    shape = (batch * q_len, batch, num_q_heads, num_kv_heads, num_sms)
    return next((config for config in exact if serves_key_rows(config, *shape)), None)


def _is_exact(form: KvFormat) -> bool:
    """Returns whether a kernel with key rows multiplies a format's codes as they are, without rounding. It then applies
    scales to scores and probabilities, not to the codes.
    """
    if form.extend is None or form.num_groups > 1 or policies.has_channel_scales(form):
        return False
    return form.extend.scales in ("outside", "row")


def _pipeline(head_dim: int, decodes: bool) -> policies.ProducerPipeline:
    columns = policies.columns_of(head_dim)
    return policies.ProducerPipeline(TILE_TOKENS[columns], producer_warps=DECODE_WARPS[columns] if decodes else 4)


def choose_unpacked(config: ExtendConfig) -> tuple[UnpackConfig, ExtendConfig]:
    """Returns the configurations of two launches that can replace a single launch of ``config``. The first unpacks the
    cache to 16-bit rows, the second attends to these rows."""
    unpack = UnpackConfig(
        k_format=config.k_format,
        v_format=config.v_format,
        dtype="fp16",
        head_dim=config.head_dim,
        page_tokens=config.page_tokens,
        head_major=config.features.head_major,
    )
    attention = replace(
        config,
        k_format=_unpacked_as(config.formats[0]),
        v_format=_unpacked_as(config.formats[1]),
        pipeline=_pipeline(config.head_dim, decodes=False),
        keys=policies.UnpackedKeys(),
        features=replace(config.features, paged=False, head_major=True),
    )
    return unpack, attention


def choose_fp8(config: ExtendConfig) -> tuple[UnpackConfig, ExtendConfig]:
    """Returns the configurations of two launches that can replace a single launch of ``config``. The first unpacks the
    cache to E4M3 codes, the second multiplies in FP8."""
    unpack, attention = choose_unpacked(config)
    return replace(unpack, dtype="e4m3"), replace(
        attention,
        k_format=config.k_format,
        v_format=config.v_format,
        pipeline=replace(attention.pipeline, num_stages=FP8_STAGES),
        keys=policies.UnpackedKeys(fp8=True),
    )


def _unpacked_as(form: KvFormat) -> str:
    """Returns the name of the first format that attention reads in the same way as ``form``, once rows of both are
    unpacked."""

    def meaning(other: KvFormat) -> tuple[object, ...] | None:
        reader = other.extend
        return (
            None
            if reader is None
            else (reader.scales, reader.unit, policies.has_head_scale(other), policies.has_channel_scales(other))
        )

    return next((name for name, other in FORMATS.items() if meaning(other) == meaning(form)), form.name)


def queries_to_unpack_for(config: ExtendConfig, batch: int, group: int, window: int | None) -> int | None:
    """Returns the smallest number of queries for which unpacking makes a launch of ``batch`` requests faster; None if
    no number does.

    group: number of query heads of a KV head. window: number of keys that a query sees. Unpacking a token costs the
    time to move the bytes of its rows. Each query that sees the token then saves decoding time.
    """
    if config.why_as_it_lies is not None:
        return None
    rates = [READING_RATES[reader.scales] for form in config.formats if (reader := form.extend) is not None]
    saved = 4 * config.head_dim * group / PRODUCTS_PER_US * (1 / min(rates) - 1)
    moved = sum(form.row_bytes(config.head_dim) + policies.ELEMENT_BYTES * config.head_dim for form in config.formats)
    queries = math.ceil(moved / UNPACKED_BYTES_PER_US / saved)
    return None if window is not None and window < queries else queries * batch


def decode_sms(decode_bytes: float, prefill_flops: float, num_sms: int) -> int | None:
    """Returns the number of SMs for decode attention while a prefill runs on the remaining SMs; None if both are faster
    one after the other. decode_bytes: bytes of the cache that decoding reads.

    Running both at the same time is worthwhile only with 16-bit caches: decoding then reaches the memory's full rate
    with a few SMs, and the prefill gains from every other SM. With caches of codes, decoding itself needs all SMs to
    keep up with memory.
    """
    decode_us, prefill_us = decode_bytes / STREAMED_BYTES_PER_US, prefill_flops / PRODUCTS_PER_US

    def time(sms: int) -> float:
        """Returns the microseconds of both calls together, if decoding takes ``sms`` SMs."""
        own = decode_us * max(1.0, STREAMING_SMS / sms)
        return STREAMS_US + SIDE_BY_SIDE_COST * max(own, prefill_us * num_sms / (num_sms - sms))

    best = min(range(SMS_STEP, num_sms // 2 + 1, SMS_STEP), key=time, default=0)
    return best if best and time(best) < decode_us + prefill_us else None


def room_of(max_seq_len: int, head_dim: int) -> int:
    """Returns the number of tokens of unpacked keys that a request has room for: max_seq_len, rounded up to whole
    tiles.
    """
    tokens = TILE_TOKENS[policies.columns_of(head_dim)]
    return -(-max_seq_len // tokens) * tokens


def count_tiles(
    total_q: int, batch: int, num_q_heads: int, num_kv_heads: int, tile_rows: int = TILE_ROWS, tile_heads: int = 1
) -> int:
    """Returns an upper bound of a launch's number of work tiles. Some tiles are empty: at most one of each request for
    each KV head, or for each ``tile_heads`` KV heads.
    """
    return (total_q * (num_q_heads // num_kv_heads) // tile_rows + batch) * (num_kv_heads // tile_heads)


@lru_cache(maxsize=1024)
def choose_splits(
    total_q: int,
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_sms: int,
    tile_rows: int = TILE_ROWS,
    tile_heads: int = 1,
    value_parts: int = 1,
) -> int:
    """Returns the number of parts into which each work tile's keys are cut, chosen so that the busiest CTA has the
    least work.

    The host does not know the lengths. The estimate assumes that all requests have equally many queries, and
    max_seq_len keys each.
    """
    if not (total_q and batch):
        return 1
    rows = -(-total_q // batch) * (num_q_heads // num_kv_heads)
    tiles = min(batch, total_q) * -(-rows // tile_rows) * num_kv_heads // tile_heads * value_parts
    blocks = -(-max_seq_len * tile_heads // BLOCK_TOKENS)

    def time(splits: int) -> float:
        """Returns the time of the busiest CTA, in units of the time of one block of keys."""
        extra = PARTIAL_COST if splits > 1 else 0.0
        rounds = -(-tiles * splits // num_sms)
        return rounds * (blocks / splits + TILE_COST + extra) + (COMBINE_COST if splits > 1 else 0.0)

    return min(range(1, min(MAX_EXTEND_SPLITS, max(blocks, 1)) + 1), key=time)
