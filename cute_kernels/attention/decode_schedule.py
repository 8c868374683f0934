"""Chooses the configuration of a decode call, and the number of splits into which its rows are cut. Plain Python, no
GPU.

Decode attention reads every byte of the cache once. So it takes the time to stream these bytes at the memory's rate,
plus two overheads of the schedule. SMs have unequal shares, and the splits have to be merged. The model below adds up
all three times; its constants were measured on an H200 (docs/design/decode_attention.md says how).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cute_kernels.attention.candidates import MOST_CTAS, candidate_configs, costs_of
from cute_kernels.attention.decode_config import DecodeConfig, copies_per_tile
from cute_kernels.attention.problem import AttentionProblem

MEMORY_BYTES_PER_US = 4.5e6  # what streaming kernels reach on an H200
# How much more than its share of the memory's rate an SM can digest.
SM_RATE_ADVANTAGE = {"dense": 1.6, "byte": 1.6, "int4": 1.55}
# The same where the configurations have different numbers of KV heads, by blocks of queries that a warp carries.
SM_RATE_ADVANTAGE_OF_BLOCKS = {1: 1.4, 2: 0.95, 4: 0.5}
COPY_US, COPIED_BYTES_PER_US = 0.0078, 4e4  # of an SM: a copy of a token's rows, its bytes
COMBINE_US = 0.8  # combining splits: store and load
COMBINE_PER_SPLIT_US = 0.04
LONELY_EXPONENT = 0.7  # how an SM's rate falls when it holds fewer CTAs than the configuration is made for
ALIKE = (7, 8)  # lengths are alike if the longest row has at most 8/7 of the mean
MAX_CUT_BATCH = 4096  # every CTA looks at all lengths
UNEVEN_COST = 0.02  # share of a part's time that is added where lengths may differ a little
SMALL_TILE_COST = 0.02  # share of the streaming time that is added where four CTAs with small INT4 tiles share an SM
MOST_WAVES = 4  # of CTAs, one for each range and head block
WELL_FILLED = 0.75  # share of the GPU's places that waves of ranges have to take
WAVE_GAP_US = 2.5  # start of a CTA that waits for another one's place
ROWS_US = 0.3  # to rotate queries, for each CTA of an SM after the first
# Tokens of the widest block table whose width is taken for the requests' length; wider ones are an engine's limit.
KNOWN_TOKENS = 16384
# For wider tables: the lengths that requests may have, with their weights, besides the table's width.
LIKELY_TOKENS = {4096: 1.0, 8192: 1.0, 16384: 1.0, 32768: 0.5}
LONGEST_WEIGHT = 0.5


@dataclass(frozen=True)
class DecodeSchedule:
    """The layout of one launch.

    Attributes:
        config: the compiled variant.
        num_splits: number of CTAs that share the tokens of a row. A row is a request and the KV heads of a CTA.
        head_blocks: number of CTAs per split that together cover all query heads.
        more_rows: number of rows of CTAs beyond the batch, so that there is a CTA for each range.
        ranges: number of ranges into which the tiles of all requests are cut if lengths differ; each head block has a
            CTA for each range. 0: every row has ``num_splits`` splits whatever its length.
    """

    config: DecodeConfig
    num_splits: int
    head_blocks: int
    more_rows: int = 0
    ranges: int = 0


@lru_cache(maxsize=4096)
def make_schedule(problem: AttentionProblem, num_splits: int | None = None) -> DecodeSchedule:
    """Returns the fastest schedule by the model. num_splits: a fixed number of splits, or None.

    The order in which splits are combined depends on their number alone. So with fixed splits a request's result does
    not depend on the rest of the batch.
    """
    configs = candidate_configs(problem)
    if num_splits is not None:
        return DecodeSchedule(configs[0], num_splits, head_blocks(problem, configs[0]))
    options = [(config, splits) for config in configs for splits in split_options(problem, config)]
    costs = expected_costs(problem, options)
    _, splits, index = min(
        (cost, option[1], configs.index(option[0])) for cost, option in zip(costs, options, strict=True)
    )
    return schedule_of(problem, configs[index], splits)


def schedule_of(problem: AttentionProblem, config: DecodeConfig, splits: int) -> DecodeSchedule:
    """Returns a configuration's schedule with ``splits`` splits. If the configuration cuts rows by their lengths, the
    schedule also has ranges.
    """
    blocks = head_blocks(problem, config)
    if not config.units or not 1 < problem.batch <= MAX_CUT_BATCH:
        return DecodeSchedule(config, splits, blocks)
    ranges = ranges_of(problem.num_sms * config.pipeline.ctas_per_sm, blocks)
    return DecodeSchedule(config, splits, blocks, max(0, -(-ranges // splits) - problem.batch), ranges)


def ranges_of(places: int, head_blocks: int) -> int:
    """Returns the number of ranges into which the tiles of all requests are cut. Each head block has a CTA for each
    range.

    There are as many ranges as fit the smallest number of waves of CTAs in which the fraction `WELL_FILLED` of the GPU
    is busy. If no number up to `MOST_WAVES` reaches this fraction, the best one is taken. places: number of CTAs that
    the GPU holds at a time.
    """
    counts = [max(1, waves * places // head_blocks) for waves in range(1, MOST_WAVES + 1)]
    busy = {count: count * head_blocks / (-(-count * head_blocks // places) * places) for count in counts}
    return next((count for count in counts if busy[count] >= WELL_FILLED), max(counts, key=lambda count: busy[count]))


def most_combiners(problem: AttentionProblem, schedule: DecodeSchedule) -> int:
    """Returns how many CTAs may combine a row.

    Combining CTAs wait for each other, so all have to be resident together. They may fill half of the GPU, since
    another launch may hold the other half. With ranges, CTAs of other heads lie between the CTAs of a row, and may wait
    as well.
    """
    places = problem.num_sms * schedule.config.pipeline.ctas_per_sm // 2
    return max(1, places // schedule.head_blocks if schedule.ranges else places)


def expected_costs(problem: AttentionProblem, options: list[tuple[DecodeConfig, int]]) -> list[float]:
    """Returns the expected cost of each option (configuration, splits). Costs compare only with each other.

    If the possible lengths are known, a cost is in microseconds. If the block table is as wide as an engine's longest
    request, it says nothing about the actual lengths. The best option for 128k tokens can take 1.3 times as long as the
    best option for 8k, if requests have 8k. So with a wide table a cost is a ratio: the option's time divided by the
    best option's time. It is a weighted mean over the lengths `LIKELY_TOKENS` and the longest length.
    """
    by_heads = len({config.mainloop.num_heads for config, _ in options}) > 1
    if not problem.features.paged or problem.max_seq_len <= KNOWN_TOKENS:
        return [estimate_us(problem, *option, by_heads=by_heads) for option in options]
    lengths = {tokens: weight for tokens, weight in LIKELY_TOKENS.items() if tokens < problem.max_seq_len}
    costs = [0.0] * len(options)
    for tokens, weight in (lengths | {problem.max_seq_len: LONGEST_WEIGHT}).items():
        actual = replace(problem, max_seq_len=tokens)
        times = [
            estimate_us(actual, config, min(splits, max(1, -(-tokens // config.tile_tokens))), by_heads=by_heads)
            for config, splits in options
        ]
        best = min(times)
        costs = [cost + weight * time / best for cost, time in zip(costs, times, strict=True)]
    return costs


def head_blocks(problem: AttentionProblem, config: DecodeConfig) -> int:
    """Returns how many CTAs cover the heads of one request."""
    query_groups = -(-problem.rows // config.head_queries)
    return problem.num_kv_heads // config.mainloop.num_heads * query_groups


def split_options(problem: AttentionProblem, config: DecodeConfig) -> range:
    """Returns the numbers of splits worth considering: 1 alone for configurations made for many short rows."""
    if _is_for_short_rows(config):
        return range(1, 2)
    tiles = max(1, -(-problem.max_seq_len // config.tile_tokens))
    rows = problem.batch * head_blocks(problem, config)
    most = max(1, min(tiles, 2 * problem.num_sms * config.pipeline.ctas_per_sm // rows))
    return range(1, most + 1)


def estimate_us(problem: AttentionProblem, config: DecodeConfig, num_splits: int, *, by_heads: bool = False) -> float:
    """Returns the microseconds that the model expects if every row has max_seq_len tokens, without the launch overhead.

    by_heads: whether the compared configurations differ in their number of KV heads. Then the model also counts the
    costs of several queries and of copies of single tokens.
    """
    rows = problem.batch * head_blocks(problem, config)
    tiles = -(-problem.max_seq_len // config.tile_tokens)
    tile_bytes = config.tile_tokens * config.mainloop.num_heads * problem.token_bytes
    total_bytes = rows * tiles * tile_bytes
    ctas = rows * num_splits
    cta_bytes = -(-tiles // num_splits) * tile_bytes
    # CTAs beyond what the SMs hold at a time wait for a place: whole waves.
    slots = problem.num_sms * config.pipeline.ctas_per_sm
    waves = -(-ctas // slots)
    per_sm = -(-ctas // problem.num_sms) if waves == 1 else waves * config.pipeline.ctas_per_sm
    advantage = min(SM_RATE_ADVANTAGE[kind] for kind in costs_of(config.formats))
    copying = partials = 0.0
    if by_heads:
        advantage = SM_RATE_ADVANTAGE_OF_BLOCKS[config.mainloop.blocks_per_warp]
        partials = _more_partials_us(problem, config, num_splits)
        if not config.runs.contiguous:
            copies = -(-tiles // num_splits) * copies_per_tile(config)
            copying = per_sm * (copies * COPY_US + cta_bytes / COPIED_BYTES_PER_US)
    sm_rate = MEMORY_BYTES_PER_US / problem.num_sms * advantage
    busiest = per_sm * cta_bytes / (sm_rate * min(1.0, per_sm / config.pipeline.ctas_per_sm) ** LONELY_EXPONENT)
    # Between the limits the memory, the busiest SM and its copies wait for each other: a soft maximum.
    streaming = ((total_bytes / MEMORY_BYTES_PER_US) ** 4 + busiest**4 + copying**4) ** 0.25 + partials
    if _is_for_short_rows(config):
        streaming *= 1 + SMALL_TILE_COST
    if config.units and problem.batch > 1:
        # Lengths may differ a little without being cut into ranges, which large parts balance badly.
        streaming += UNEVEN_COST * cta_bytes / sm_rate
    if problem.appends:
        streaming += ROWS_US * (per_sm - 1)
    return streaming + (waves - 1) * WAVE_GAP_US / config.pipeline.ctas_per_sm + _combine_us(num_splits)


def _more_partials_us(problem: AttentionProblem, config: DecodeConfig, num_splits: int) -> float:
    """Returns the microseconds in which partial results are written and read, for all queries of a request except the
    first. `COMBINE_PER_SPLIT_US` covers the first query.
    """
    if num_splits == 1:
        return 0.0
    rows = problem.batch * (problem.q_len - 1) * problem.num_q_heads
    return 2 * 4 * config.partial_words * rows * num_splits / MEMORY_BYTES_PER_US


def _is_for_short_rows(config: DecodeConfig) -> bool:
    """Returns whether the configuration is for short rows: INT4, four CTAs to an SM, and tiles with one block of tokens
    for each warp instead of two."""
    return (
        config.pipeline.ctas_per_sm == MOST_CTAS
        and config.mainloop.blocks_per_slice == 1
        and costs_of(config.formats) == {"int4"}
    )


def _combine_us(num_splits: int) -> float:
    return COMBINE_US + COMBINE_PER_SPLIT_US * num_splits if num_splits > 1 else 0.0
