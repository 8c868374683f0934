"""Which configuration serves a call, and into how many splits and clusters its rows are cut. Plain Python, no GPU.

Decode attention reads every byte of the cache once, so its time is what those bytes take at the memory's rate, plus
what the schedule adds to it: SMs that are given less than others, and the merge of the splits. The model below adds up
these terms; its constants were measured on an H200 (docs/design/decode_attention.md says how).
"""

from dataclasses import dataclass
from functools import lru_cache

from cute_kernels.attention.config import HEADS_PER_WARP, MAX_SHARED_BYTES, DecodeConfig
from cute_kernels.kv_formats import DenseFormat, format_of

NUM_SMS = 132  # of H100 SXM and H200; the model's default
MEMORY_BYTES_PER_US = 4.5e6  # what streaming kernels reach on an H200
SM_RATE_ADVANTAGE = {"dense": 1.6, "int4": 1.55}  # how much more than its share of the memory's rate an SM can digest
COMBINE_US = 0.8  # combining splits: store and load
COMBINE_PER_SPLIT_US = 0.04
LONELY_EXPONENT = 0.7  # how an SM's rate falls when it holds fewer CTAs than the configuration is made for
SMALL_TILE_COST = 0.02  # of the streaming time, where four CTAs to an SM have small tiles
WAVE_GAP_US = 2.5  # start of a CTA that waits for another one's place
MAX_WARPS = 16
TARGET_WARPS = 8
STAGE_BYTES = 50 * 1024  # a tile of K and V may have up to this size if a warp takes two blocks of it


@dataclass(frozen=True)
class Problem:
    """Everything about a call that its schedule depends on; lengths are on the device and not known here.

    Attributes:
        batch, max_seq_len, num_q_heads, num_kv_heads, head_dim: of the tensors.
        kv_format, q_dtype: names.
        aligned: whether the caches start on 16 bytes and a request's cache is a multiple of 16 bytes.
        num_sms: SMs of the GPU.
    """

    batch: int
    max_seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str
    q_dtype: str
    aligned: bool = True
    num_sms: int = NUM_SMS

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class Schedule:
    """How one launch is laid out.

    Attributes:
        config: the compiled variant.
        num_splits: CTAs that share the tokens of a row (a request and the KV heads of a CTA).
        head_blocks: CTAs per split that cover all query heads.
    """

    config: DecodeConfig
    num_splits: int
    head_blocks: int


@lru_cache(maxsize=4096)
def make_schedule(problem: Problem, num_splits: int | None = None) -> Schedule:
    """The fastest schedule by the model; ``num_splits`` fixes the splits.

    Splits are combined in an order that depends on their number alone, so with fixed splits a request's result does not
    depend on the rest of the batch.
    """
    configs = candidate_configs(problem)
    if num_splits is not None:
        return Schedule(configs[0], num_splits, head_blocks(problem, configs[0]))
    options = [
        (estimate_us(problem, config, splits), splits, index)
        for index, config in enumerate(configs)
        for splits in split_options(problem, config)
    ]
    _, splits, index = min(options)
    return Schedule(configs[index], splits, head_blocks(problem, configs[index]))


def head_blocks(problem: Problem, config: DecodeConfig) -> int:
    """CTAs that cover the heads of one request."""
    query_groups = -(-problem.group // (HEADS_PER_WARP * config.num_query_blocks))
    return problem.num_kv_heads // config.num_heads * query_groups


def split_options(problem: Problem, config: DecodeConfig) -> range:
    """Numbers of splits worth considering."""
    tiles = max(1, -(-problem.max_seq_len // config.tile_tokens))
    rows = problem.batch * head_blocks(problem, config)
    most = max(1, min(tiles, 2 * problem.num_sms * config.ctas_per_sm // rows))
    return range(1, most + 1)


def estimate_us(problem: Problem, config: DecodeConfig, num_splits: int) -> float:
    """Microseconds that the model expects, without the launch itself, if every row has max_seq_len tokens."""
    form = config.format
    rows = problem.batch * head_blocks(problem, config)
    tiles = -(-problem.max_seq_len // config.tile_tokens)
    tile_bytes = 2 * config.tile_tokens * config.num_heads * form.row_bytes(problem.head_dim)
    total_bytes = rows * tiles * tile_bytes
    ctas = rows * num_splits
    cta_bytes = -(-tiles // num_splits) * tile_bytes
    # CTAs beyond what the SMs hold at a time wait for a place: whole waves.
    slots = problem.num_sms * config.ctas_per_sm
    waves = -(-ctas // slots)
    per_sm = -(-ctas // problem.num_sms) if waves == 1 else waves * config.ctas_per_sm
    kind = "dense" if isinstance(form, DenseFormat) else "int4"
    sm_rate = MEMORY_BYTES_PER_US / problem.num_sms * SM_RATE_ADVANTAGE[kind]
    busiest = per_sm * cta_bytes / (sm_rate * min(1.0, per_sm / config.ctas_per_sm) ** LONELY_EXPONENT)
    # Between the two limits the memory and the busiest SM wait for each other: a soft maximum.
    streaming = ((total_bytes / MEMORY_BYTES_PER_US) ** 4 + busiest**4) ** 0.25
    if config.ctas_per_sm == 4:
        streaming *= 1 + SMALL_TILE_COST
    return streaming + (waves - 1) * WAVE_GAP_US / config.ctas_per_sm + _combine_us(num_splits)


def _combine_us(num_splits: int) -> float:
    return COMBINE_US + COMBINE_PER_SPLIT_US * num_splits if num_splits > 1 else 0.0


# -- configurations ---------------------------------------------------------------------------------------------------


def candidate_configs(problem: Problem) -> list[DecodeConfig]:
    """The configurations worth considering for a problem, one per number of CTAs on an SM."""
    form = format_of(problem.kv_format)
    blocks = query_blocks(problem.group)
    if isinstance(form, DenseFormat):
        configs = [dense_config(problem.kv_format, problem.head_dim, blocks, ctas_per_sm=ctas) for ctas in (1, 2)]
        return list(dict.fromkeys(configs))
    heads = int4_heads(problem.num_kv_heads, blocks, form.row_bytes(problem.head_dim)) if problem.aligned else 0
    contiguous = (heads or 1) == problem.num_kv_heads
    configs = [
        int4_config(
            problem.kv_format,
            problem.q_dtype,
            problem.head_dim,
            num_heads=heads or 1,
            num_query_blocks=blocks,
            contiguous=contiguous,
            copy="bulk" if heads else "word",
            ctas_per_sm=ctas,
        )
        for ctas in ((1, 2, 4) if contiguous else (2,))
    ]
    return list(dict.fromkeys(configs))


def query_blocks(group: int) -> int:
    """Blocks of 8 query heads of a CTA: a power of two, at most 4; more are more CTAs."""
    blocks = 1
    while blocks < 4 and blocks * HEADS_PER_WARP < group:
        blocks *= 2
    return blocks


def int4_heads(num_kv_heads: int, num_query_blocks: int, row_bytes: int) -> int:
    """KV heads of a CTA such that a token's rows can be copied in bulk, 0 if there is no such number."""
    most = MAX_WARPS // num_query_blocks
    if num_kv_heads <= min(HEADS_PER_WARP, most):
        return num_kv_heads
    for heads in (8, 4, 2, 1):
        if heads <= most and num_kv_heads % heads == 0 and heads * row_bytes % 16 == 0:
            return heads
    return 0


def int4_config(
    kv_format: str,
    q_dtype: str,
    head_dim: int,
    *,
    num_heads: int,
    num_query_blocks: int,
    contiguous: bool,
    copy: str = "bulk",
    ctas_per_sm: int,
) -> DecodeConfig:
    """An INT4 configuration of 8 warps and a ring of 3 tiles; for more CTAs to an SM, a shorter ring and fewer warps.

    One CTA to an SM serves few long rows best; two or four, whose beginnings and ends overlap, many rows.
    """
    roles = num_heads * num_query_blocks
    # More than one CTA leaves 128 registers to a thread: enough up to head_dim 128 and 4 groups.
    if head_dim > 128 or kv_format == "int4_g8" or roles > TARGET_WARPS or copy == "word":
        ctas_per_sm = 1
    elif ctas_per_sm == 4 and roles > TARGET_WARPS // 2:
        ctas_per_sm = 2
    warps = TARGET_WARPS // 2 if ctas_per_sm == 4 else TARGET_WARPS
    base = DecodeConfig(
        kv_format,
        q_dtype,
        head_dim,
        num_heads=num_heads,
        num_query_blocks=num_query_blocks,
        num_slices=max(1, warps // roles),
        contiguous=contiguous,
        copy=copy,
    )
    return _with_ring(base, ctas_per_sm, 3 if ctas_per_sm == 1 else 2)


def dense_config(kv_format: str, head_dim: int, num_query_blocks: int, *, ctas_per_sm: int) -> DecodeConfig:
    """A bf16 or fp16 configuration: few warps, since little is to be computed per byte."""
    if head_dim == 256:
        ctas_per_sm = 1
    slices = 2 if head_dim == 256 or num_query_blocks > 1 or ctas_per_sm > 1 else 4
    base = DecodeConfig(
        kv_format,
        kv_format,
        head_dim,
        num_query_blocks=num_query_blocks,
        num_slices=slices,
        copy="tma",
    )
    return _with_ring(base, ctas_per_sm, 3)


def _with_ring(base: DecodeConfig, ctas_per_sm: int, num_stages: int) -> DecodeConfig:
    """``base`` with tiles of a useful size and up to ``num_stages`` of them, as the shared memory allows."""
    fields = base.to_dict() | {"ctas_per_sm": ctas_per_sm}
    fields["blocks_per_slice"] = 2 if 4 * base.tile_bytes <= STAGE_BYTES else 1
    tile_bytes = DecodeConfig(**fields).tile_bytes  # type: ignore[arg-type]
    budget = (MAX_SHARED_BYTES + 1024) // ctas_per_sm - 2048
    stages = min(num_stages, budget // (2 * tile_bytes))
    if stages < 2:
        return _with_ring(base, ctas_per_sm // 2, num_stages)
    return DecodeConfig(**(fields | {"num_stages": stages}))  # type: ignore[arg-type]
