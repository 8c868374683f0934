"""Lists the decode configurations that a schedule chooses from. All of them fit an SM, and their copies can load the
caches.

Plain Python, no GPU. docs/design/decode_attention.md has the measurements behind the choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cute_kernels.attention import policies
from cute_kernels.attention.checks import CACHES, check_readable
from cute_kernels.attention.decode_config import DecodeConfig, copies_per_tile
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import MAP_UNIT, kernel_format, map_problem
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.formats.scores import options_in
from cute_kernels.formats.scores.features import PLAIN
from cute_kernels.runtime.composed import changed

BULK_BYTES = 16  # sizes and addresses of bulk copies are multiples of this
TARGET_WARPS = 8
WIDE_HEAD_DIM, WIDE_WARPS = 512, 4  # so few warps have 255 registers a thread: accumulators of 8 queries take 128
MOST_CTAS = 4  # the most CTAs on an SM
COPIES_PER_WARP = 4  # copies of a tile for each producer warp, which takes some 90 cycles to issue one
MAPPED_HEADS = 2  # KV heads of a CTA from which on tensor maps copy their rows
FEW_REQUESTS = 2  # requests up to which single queries are worth fewer heads a CTA
SM_PARTITIONS = 4
MAX_PRODUCER_WARPS = 4
MAX_WARPS = 16
SMALL_PAGE = 32  # tokens of a page below which its rows are many small copies
STAGE_BYTES = 50 * 1024  # the most bytes of a tile of K and V where a warp takes two blocks of it


def candidate_configs(problem: AttentionProblem) -> list[DecodeConfig]:
    """Returns the configurations worth considering for a problem. They differ in how many CTAs share an SM and, for
    formats with headers, in how many KV heads a CTA has.

    Raises ValueError if the kernels cannot read the caches.
    """
    names = (kernel_format(problem.k_format), kernel_format(problem.v_format))
    for cache, name, head_dim in zip(CACHES, names, (problem.head_dim, problem.v_head_dim), strict=True):
        check_readable(cache, format_of(name), head_dim)
    blocks, _ = query_blocks(problem)
    with_headers = [format_of(name).has_header for name in names]
    if not any(with_headers):
        base = _base_config(problem, names, 1, blocks, contiguous=True, row_copy="")
        configs = [bare_config(base, ctas) for ctas in _cta_counts(problem, contiguous=True)]
    else:
        configs = [
            row_config(_base_config(problem, names, heads or 1, blocks, contiguous, copy), ctas)
            for heads, copy in _heads_of_a_cta(problem, names, blocks)
            for contiguous in (_is_contiguous(problem, heads or 1),)
            # Maps of several heads are for CTAs that are alone on their SM.
            for ctas in ((1,) if copy == "map" and heads > 1 else _cta_counts(problem, contiguous or copy == "map"))
        ]
    borrows = _borrows_registers(problem)
    return list(dict.fromkeys(_with_producer_warps(_roomy(config), borrows) for config in configs))


def _cta_counts(problem: AttentionProblem, contiguous: bool) -> tuple[int, ...]:
    """Returns the numbers of CTAs per SM to consider. contiguous: whether the rows that a CTA reads have no gaps
    between them, or tensor maps load them."""
    if _borrows_registers(problem):
        return (1,)
    return (1, 2, MOST_CTAS) if contiguous else (2,)


def _row_copy(problem: AttentionProblem, names: tuple[str, str], heads: int, most: int) -> str:
    """Returns how a CTA loads rows with headers: "bulk", "map" or "word", as in `CacheLoad.copy`. heads: number of KV
    heads of the CTA; 0 for one head by "word". most: the largest number of KV heads that a CTA has room for.
    """
    if not heads:
        return "word"
    if not MAPPED_HEADS <= heads < most or problem.appends:
        return "bulk"  # with an append, vLLM took 4 % longer by maps (one request)
    return "map" if _maps_fit(problem, names, heads) else "bulk"


def _maps_fit(problem: AttentionProblem, names: tuple[str, str], heads: int) -> bool:
    """Returns whether tensor maps can load rows with headers, ``heads`` KV heads of a token at a time."""
    dims = (problem.head_dim, problem.v_head_dim)
    rows = [(format_of(name), dim) for name, dim in zip(names, dims, strict=True) if format_of(name).has_header]
    token_bytes = [problem.num_kv_heads * form.row_bytes(dim) for form, dim in rows]
    unfit = any(size % MAP_UNIT for size in token_bytes) or any(map_problem(form, dim, heads) for form, dim in rows)
    return problem.aligned and problem.heads_touch and not unfit


def _heads_of_a_cta(problem: AttentionProblem, names: tuple[str, str], num_query_blocks: int) -> list[tuple[int, str]]:
    """Returns pairs (number of KV heads of a CTA, how it loads rows with headers), largest number first. 0 stands for
    one head whose rows are copied by words.

    A CTA may take fewer heads than it has room for. The same number of CTAs then cuts each row into fewer, longer
    parts. This is considered for INT4 with more than one block of queries, where each CTA has much to multiply. It is
    also considered for few requests with one block of queries, where start-up and partial results take most of the
    time.

    If each head has pages of its own, a CTA takes one head. A tensor map loads the head's rows if they are not
    contiguous.
    """
    most = row_heads(problem, names, num_query_blocks) if problem.aligned else 0
    forms = [format_of(name) for name in names]
    one_block = problem.rows <= policies.BLOCK_QUERIES
    few = problem.batch <= FEW_REQUESTS and problem.features.paged and not problem.after_append
    if problem.features.by_head and not _is_contiguous(problem, 1) and _maps_fit(problem, names, 1):
        return [(1, "map")]
    one_head = problem.features.head_major or problem.features.by_head
    if one_head or not (few if one_block else costs_of(forms) == {"int4"}):
        return [(most, "bulk" if most else "word")]
    sizes = [form.row_bytes(d) for form, d in zip(forms, (problem.head_dim, problem.v_head_dim), strict=True)]
    fewer = [heads for heads in (4, 2, 1) if heads < most and not most % heads]
    copied = [(heads, _row_copy(problem, names, heads, most)) for heads in (most, *fewer)]
    return [
        (heads, copy)
        for heads, copy in copied
        if heads == most or copy == "map" or not (one_block or any(heads * size % BULK_BYTES for size in sizes))
    ]


def _is_contiguous(problem: AttentionProblem, num_heads: int) -> bool:
    """Returns whether the rows that a CTA of ``num_heads`` KV heads reads lie one after the other in memory."""
    return problem.tokens_touch and (problem.features.head_major or num_heads == problem.num_kv_heads)


def _with_producer_warps(config: DecodeConfig, borrows: bool) -> DecodeConfig:
    """Returns the configuration with as many producer warps as its tiles' copies need and its registers allow.

    An SM has four partitions, and distributes warps to them in turn. The registers of a warp depend on the largest
    number of warps in a partition. So producer warps cost no registers as long as this number does not grow.

    borrows: whether four producer warps lend registers to eight consumer warps.
    """
    if "word" in config.copies or (borrows and config.num_warps == TARGET_WARPS):
        return changed(config, producer_warps=MAX_PRODUCER_WARPS)
    # Maps are few copies, but four warps lend registers.
    copies = copies_per_tile(config) if "map" not in config.copies else config.tile_tokens
    wanted = min(MAX_PRODUCER_WARPS, -(-copies // COPIES_PER_WARP))
    partition_warps = -(-config.pipeline.ctas_per_sm * (config.num_warps + 1) // SM_PARTITIONS)
    free = partition_warps * SM_PARTITIONS // config.pipeline.ctas_per_sm - config.num_warps
    return changed(config, producer_warps=max(1, min(wanted, free)))


def _roomy(config: DecodeConfig) -> DecodeConfig:
    """Returns ``config``, with fewer CTAs to an SM if its threads would have too few registers."""
    if config.mainloop.blocks_per_warp == 1 and replace(config.features, paged=False, head_major=False) == PLAIN:
        return config
    while config.pipeline.ctas_per_sm > 1 and config.num_warps * config.pipeline.ctas_per_sm > TARGET_WARPS:
        config = changed(config, ctas_per_sm=config.pipeline.ctas_per_sm // 2)
    return config


def query_blocks(problem: AttentionProblem) -> tuple[int, int]:
    """Returns how a CTA divides the queries of a KV head: (warps, blocks of 8 queries for each warp). Further queries
    take more CTAs."""
    wide = _target_warps(problem.head_dim, problem.v_head_dim) == WIDE_WARPS
    per_warp = 2 if problem.rows > policies.BLOCK_QUERIES and not wide else 1
    if problem.rows > per_warp * policies.BLOCK_QUERIES and _fits_four_blocks(problem):
        per_warp = policies.MAX_BLOCKS_PER_WARP
    return 2 if problem.rows > per_warp * policies.BLOCK_QUERIES else 1, per_warp


def _groups(form: KvFormat) -> int:
    """Returns the number of groups of a row, for estimates of registers.

    Keys in blocks count as at least four groups, because their scales multiply the queries. With four groups, a warp
    can have two blocks of queries if an SM has one CTA. A warp never has registers for four blocks.
    """
    return max(form.num_groups, 4 if form.in_blocks else 1)


def _fits_four_blocks(problem: AttentionProblem) -> bool:
    """Returns whether a warp can carry four blocks of queries, so that each row is decoded once instead of twice.

    The accumulators of four blocks leave registers only for codes with one group of at most 128 columns. Score options
    have to allow four blocks (``fits_four_blocks``). 16-bit caches need no decoding, so four blocks would gain nothing.
    """
    forms = [format_of(name) for name in (problem.k_format, problem.v_format)]
    return (
        not any(not form.is_coded or _groups(form) > 1 for form in forms)
        and max(problem.head_dim, problem.v_head_dim) <= 128
        and all(option.fits_four_blocks for option in options_in(problem.features))
    )


def _borrows_registers(problem: AttentionProblem) -> bool:
    """Returns whether eight consumer warps need more than 168 registers a thread, so that producer warps lend them
    registers. This holds for four query blocks a warp, and for two query blocks a warp with several INT4 groups.

    Two query blocks with four groups take 218 registers a thread. With so many registers, an SM holds only one CTA.
    Spills would go to the L2 cache, since the ring leaves the L1 cache no room.
    """
    forms = [format_of(name) for name in (problem.k_format, problem.v_format)]
    grouped = "int4" in costs_of(forms) and max(_groups(form) for form in forms) > 1
    blocks_per_warp = query_blocks(problem)[1]
    return blocks_per_warp == policies.MAX_BLOCKS_PER_WARP or (blocks_per_warp == 2 and grouped)


def _target_warps(*head_dims: int) -> int:
    """Returns how many consumer warps an SM has registers for."""
    return WIDE_WARPS if max(head_dims) == WIDE_HEAD_DIM else TARGET_WARPS


def row_heads(problem: AttentionProblem, names: tuple[str, str], num_query_blocks: int) -> int:
    """Returns the largest number of KV heads whose rows a CTA can copy in bulk, for one token at a time; 0 if there is
    none.
    """
    dims = (problem.head_dim, problem.v_head_dim)
    target = _target_warps(*dims)
    most = (MAX_WARPS if target == TARGET_WARPS and not _borrows_registers(problem) else target) // num_query_blocks
    forms = [format_of(name) for name in names]
    row_bytes = [form.row_bytes(d) for form, d in zip(forms, dims, strict=True) if form.has_header]
    # Head-major caches have one head's tokens side by side.
    one_by_one = problem.features.head_major or problem.features.by_head or not problem.heads_touch
    for heads in (1,) if one_by_one else dict.fromkeys((problem.num_kv_heads, 8, 4, 2, 1)):
        if heads > min(policies.BLOCK_QUERIES, most) or problem.num_kv_heads % heads:
            continue
        contiguous = _is_contiguous(problem, heads)
        if not contiguous and any(heads * size % BULK_BYTES for size in row_bytes):
            continue
        base = _base_config(problem, names, heads, num_query_blocks, contiguous, "bulk")
        if _num_stages(base, 1) >= 2 and base.smem_bytes <= base.limits.shared_bytes:
            return heads
    return 0


def _base_config(
    problem: AttentionProblem,
    names: tuple[str, str],
    num_heads: int,
    num_query_blocks: int,
    contiguous: bool,
    row_copy: str,
) -> DecodeConfig:
    """Returns the configuration that follows from the problem, with tiles of one slice of tokens."""
    dims = (problem.head_dim, problem.v_head_dim)
    k, v = (
        policies.CacheLoad(name, head_dim, row_copy if format_of(name).has_header else "tma")
        for name, head_dim in zip(names, dims, strict=True)
    )
    return DecodeConfig(
        k,
        v,
        problem.q_dtype,
        policies.WarpMma(num_heads, num_query_blocks, query_blocks(problem)[1], num_slices=1),
        policies.CopyPipeline(early_tiles=0 if problem.features.window or problem.after_append else 1),
        policies.TokenRuns(contiguous, problem.page_tokens),
        features=problem.features,
        units=problem.features.paged and not problem.features.by_head,
        after_append=problem.after_append,
    )


def row_config(base: DecodeConfig, ctas_per_sm: int) -> DecodeConfig:
    """Returns a configuration for rows with headers, with at most ``ctas_per_sm`` CTAs to an SM.

    One CTA to an SM is fastest for few long rows; it has 8 warps (4 for head_dim 512). Two or four CTAs are faster for
    many rows, since the beginning of one overlaps with the end of another. They have shorter rings, and as few warps as
    the registers require: two CTAs of 8 warps and a producer leave 96 registers to a thread. 96 are enough if K and V
    have the same kind of codes, with one group a row.
    """
    costs, groups = costs_of(base.formats), max(_groups(form) for form in base.formats)
    int4, roles = costs == {"int4"}, base.num_roles
    few_roles = roles <= TARGET_WARPS // 2
    crowded = int4 and (max(base.head_dims) > 128 or groups == 8)
    if crowded or roles > TARGET_WARPS or "word" in base.copies:
        ctas_per_sm = 1
    elif groups > 1 or (not int4 and "int4" in costs):
        ctas_per_sm = min(ctas_per_sm, 2 if int4 else MOST_CTAS, TARGET_WARPS // roles)
    elif ctas_per_sm == MOST_CTAS and not few_roles:
        ctas_per_sm = 1 if base.units else 2
    if int4:
        # Pages' pieces are waited for longer: warps with two blocks of tokens each need fewer tiles in turn.
        pieces = base.page_tokens > 0 and roles == base.mainloop.blocks_per_warp == 1
        few_warps = ctas_per_sm == MOST_CTAS or (ctas_per_sm == 2 and (groups > 1 or pieces))
        warps = TARGET_WARPS // 2 if few_warps else _target_warps(*base.head_dims)
        config = changed(base, num_slices=max(1, warps // roles))
        return _with_ring(config, ctas_per_sm, 3 if ctas_per_sm == 1 else 2)
    return _byte_config(base, ctas_per_sm)


def bare_config(base: DecodeConfig, ctas_per_sm: int) -> DecodeConfig:
    """Returns a configuration for rows without headers. 16-bit rows get few warps, since little is computed per
    byte."""
    if costs_of(base.formats) != {"dense"}:
        return _byte_config(base, ctas_per_sm)
    if max(base.head_dims) >= 256:
        ctas_per_sm = 1
    few = max(base.head_dims) > 128 or base.mainloop.num_query_blocks > 1 or ctas_per_sm > 1
    slices = 1 if WIDE_HEAD_DIM in base.head_dims else 2 if few else 4
    return _with_ring(changed(base, num_slices=slices), min(ctas_per_sm, 2), 3)


def _byte_config(base: DecodeConfig, ctas_per_sm: int) -> DecodeConfig:
    """Returns ``base`` with 8 consumer warps to an SM (4 for head_dim 512). Tiles are as large as possible while shared
    memory has room for three, or for two if it also holds the queries.
    """
    target = _target_warps(*base.head_dims)
    ctas_per_sm = 1 if target == WIDE_WARPS else ctas_per_sm
    slices = max(1, target // ctas_per_sm // base.num_roles)
    shapes = [(slices, 2)] + [(slices >> i, 1) for i in range(slices.bit_length())]
    configs = [changed(base, num_slices=s, blocks_per_slice=blocks, ctas_per_sm=ctas_per_sm) for s, blocks in shapes]
    if sum(configs[0].tile_bytes) > STAGE_BYTES or _takes_one_block(base):
        configs = configs[1:]
    least = 2 if base.shares_queries else 3
    fitting = next((config for config in configs if _num_stages(config, ctas_per_sm) >= least), configs[-1])
    # A third tile in flight only delays the second, unless there are two CTAs to an SM, many small copies to a tile, or
    # much to compute from it.
    many = "bulk" in base.copies and 0 < base.page_tokens < SMALL_PAGE
    stages = min(3 if ctas_per_sm == 2 or many or base.shares_queries else 2, _num_stages(fitting, ctas_per_sm))
    if stages < 2:
        return _byte_config(base, ctas_per_sm // 2)
    return changed(fitting, num_stages=stages)


def _takes_one_block(config: DecodeConfig) -> bool:
    """Returns whether a warp processes only one block of tokens of each tile, because a second block would take too
    many registers.

    With two blocks of queries and eight groups, one block of tokens causes 18 spills in the loop, two cause 88.
    """
    most_groups = max(_groups(form) for form in config.formats)
    crowded = config.shares_queries or (config.mainloop.blocks_per_warp == 2 and most_groups == 8)
    return crowded and max(config.head_dims) > 64


def _num_stages(config: DecodeConfig, ctas_per_sm: int) -> int:
    """Returns how many tiles fit the shared memory of one of ``ctas_per_sm`` CTAs."""
    budget = config.limits.sm_shared_bytes // ctas_per_sm - 2048 - config.query_bytes
    return budget // sum(config.tile_bytes)


def _with_ring(base: DecodeConfig, ctas_per_sm: int, num_stages: int) -> DecodeConfig:
    """Returns ``base`` with one or two blocks of tokens for each warp, and up to ``num_stages`` tiles. If shared memory
    has no room for two tiles, the result has fewer CTAs to an SM.
    """
    blocks = 2 if 2 * sum(base.tile_bytes) <= STAGE_BYTES and not _takes_one_block(base) else 1
    config = changed(base, ctas_per_sm=ctas_per_sm, blocks_per_slice=blocks)
    # Four CTAs with small tiles serve many short rows better than two with large ones.
    small = ctas_per_sm == MOST_CTAS and not base.units and base.mainloop.blocks_per_warp == 1
    if small and _num_stages(config, ctas_per_sm) < 2:
        config = changed(config, blocks_per_slice=1)
    stages = min(num_stages, _num_stages(config, ctas_per_sm))
    if stages < 2:
        return _with_ring(base, ctas_per_sm // 2, num_stages)
    return changed(config, num_stages=stages)


def costs_of(forms: Iterable[KvFormat]) -> set[str]:
    """Returns the kinds of decoding that the formats need: keys of ``SM_RATE_ADVANTAGE``."""
    return {form.decode.cost for form in forms if form.decode is not None}
