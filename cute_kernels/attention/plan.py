"""Makes the plans of calls: compiled kernels, constant arguments of their launches, and the choice between launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from cute_kernels.arguments import check_aligned, shape_of
from cute_kernels.attention.arguments import (
    BIAS_STRIDES,
    COMBINE,
    LIST_STRIDES,
    UNPACK,
    decode_arguments,
    extend_arguments,
)
from cute_kernels.attention.call import AttentionCall, Given
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import CTAS_SHIFT, KEEP_PARTIALS, WRITE_LSE
from cute_kernels.attention.decode_schedule import DecodeSchedule, make_schedule, most_combiners
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import UNPACK_CTAS_PER_SM
from cute_kernels.attention.extend_schedule import (
    MAX_UNPACKED_BYTES,
    choose,
    choose_fp8,
    choose_key_rows,
    choose_newer,
    choose_unpacked,
    heads_of_tile,
    queries_to_unpack_for,
    serves_key_rows,
)
from cute_kernels.attention.launches import Algorithm, ExtendLaunch, ExtendLaunches, UnpackedLaunch
from cute_kernels.attention.operands import CacheOperand, GivenScale
from cute_kernels.attention.options import NO_OPTIONS
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.scores import tensors_in
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.memory import blank, byte_view
from cute_kernels.runtime.operator import Plan
from cute_kernels.runtime.plans import ALIGNMENT
from cute_kernels.runtime.spec import KernelSpec

MAX_TOKEN_STRIDE = 2**23  # bytes: those of a tile of extend attention fit 32 bits


def make_plan(call: AttentionCall) -> Plan:
    """Returns the plan of a checked call."""
    if not call.extends:
        return decode_plan(call)
    launches = extend_launches(call)
    return Plan(call.q.device.index, launches.launch, (launches,))


def problem_of(call: AttentionCall, *, after_append: bool = False) -> AttentionProblem:
    """Returns the problem of a call, for which a schedule is chosen."""
    rows, features = [operand for operand in (call.k, call.v) if operand.form.has_header], call.features
    device = call.q.device
    return AttentionProblem(
        batch=call.batch,
        max_seq_len=call.max_seq_len,
        num_q_heads=call.num_q_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        v_head_dim=call.v.head_dim,
        k_format=call.k.form.name,
        v_format=call.v.form.name,
        q_dtype=Q_DTYPES[call.q.dtype],
        q_len=call.q_len,
        page_tokens=max(size for size in PAGE_TOKENS if call.page_size % size == 0) if features.paged else 0,
        features=features,
        aligned=not any(_bits_of_addresses(call, operand) % ALIGNMENT for operand in rows),
        tokens_touch=all(operand.tokens_touch for operand in rows),
        heads_touch=call.head_major or all(operand.heads_touch for operand in rows),
        num_sms=GPU.num_sms(device) if device.type == "cuda" or GPU.takes_cpu else AttentionProblem.num_sms,
        after_append=after_append,
        tree=call.tree_mask is not None,
    )


def _bits_of_addresses(call: AttentionCall, operand: CacheOperand) -> int:
    """Returns the bitwise or of the cache's address and strides in bytes. Its lowest set bit is the alignment that all
    rows have.
    """
    bits = operand.cache.data_ptr() | operand.block_stride
    # Copies of several tokens are cut where the block ends.
    bits |= call.page_size * operand.token_stride if operand.tokens_touch else operand.token_stride
    return bits if operand.heads_touch and not call.head_major else bits | operand.head_stride


# -- decode attention --------------------------------------------------------------------------------------------------


def decode_plan(call: AttentionCall, *, after_append: bool = False) -> Plan:
    """Returns the plan of a checked call of decode attention. after_append: whether the launch directly follows an
    append of the newest tokens, and may start before the append has ended.
    """
    problem = problem_of(call, after_append=after_append)
    schedule = make_schedule(problem, call.num_splits)
    return decode_plan_of(call, problem, schedule, decode_sender(call, schedule))


def decode_plan_of(
    call: AttentionCall, problem: AttentionProblem, schedule: DecodeSchedule, send: Callable[..., Any]
) -> Plan:
    """Returns the plan of a checked call with a given schedule.

    Args:
        send: the compiled kernel, bound to its constant arguments. It takes the call's arguments
            (:mod:`cute_kernels.attention.arguments`) by name; those of features and of appended tokens it finds in
            ``options`` and ``new``. In native code it compares the shape, strides, dtype, alignment and device of every
            tensor with its compiled signature. It launches on torch's current stream of the tensors' device.
    """
    index, own_scale, num_words = call.q.device.index, call.softmax_scale, workspace_words(schedule, problem)
    new_out, new_lse = blank(call.out_shape, call.q.dtype), blank(call.out_shape[:3], torch.float32)
    k_view, v_view = byte_view(call.k.cache), byte_view(call.v.cache)
    plan_mode = (most_combiners(problem, schedule).bit_length() - 1) << CTAS_SHIFT

    def launch(
        given: Given, partials: torch.Tensor | None = None, new: tuple[Any, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches on the current stream of the plan's device, which is the current device. Returns (out or a new
        tensor, lse if asked for).

        ``partials``: a workspace of the caller's, in which the partial results of all splits stay. ``new``: None,
        except for a decode step in one launch. Then ``new`` is what the step appends, (k, v, constants, extras); k and
        v of the newest tokens are [batch, num_kv_heads, head_dim]. The function makes no objects and calls little,
        since each layer of a decoding step waits for it.
        """
        q, k_cache, v_cache, seq_lens, _, softmax_scale, _, return_lse, out, options, _ = given
        if out is None:
            out = GPU.empty(*new_out)
        lse, lse_address, mode = None, 0, plan_mode
        if return_lse:
            lse = GPU.empty(*new_lse)
            lse_address, mode = lse.data_ptr(), mode | WRITE_LSE
        workspace = 0
        if partials is not None:
            workspace, mode = partials.data_ptr(), mode | KEEP_PARTIALS
        elif num_words:
            workspace = GPU.workspace(index, GPU.stream(index), num_words)
        if k_view is not None:
            k_cache = k_cache.view(k_view)
        if v_view is not None:
            v_cache = v_cache.view(v_view)
        send(
            q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, out=out, lse=lse_address, workspace=workspace,
            softmax_scale=own_scale if softmax_scale is None else softmax_scale, mode=mode,
            options=options or NO_OPTIONS, new=new,
        )  # fmt: skip
        return out, lse

    return Plan(index, launch, (schedule.config,))


def decode_sender(call: AttentionCall, schedule: DecodeSchedule) -> Callable[..., Any]:
    """Returns the compiled kernel of a schedule, bound to the arguments that the plan fixes."""
    config = schedule.config
    function = load(AttentionSpec(config), arch_of(call.q.device.index))
    declared, known = decode_arguments(config.features, config.page_tokens > 0), known_arguments(call, schedule)
    return declared.bound(function, *known, ignored=("options", "new"))


def known_arguments(call: AttentionCall, schedule: DecodeSchedule) -> tuple[dict[str, int | float], dict[str, Place]]:
    """Returns two dicts of the kernel's arguments for features, by name: the values of arguments that are constant for
    a plan, and the places in a call's options of the remaining arguments.
    """
    config = schedule.config
    features = config.features
    fixed = _scale_strides(call) | {"num_splits": schedule.num_splits}
    given = {"k_scale": call.k.scale is not None, "v_scale": call.v.scale is not None}
    options: dict[str, Place] = {}
    if config.has_features:
        table, pages = call.block_table, _table_pages(call)
        table_stride = pages if table is None or table.shape[0] < 2 else table.stride(0)
        strides = (0, 0, 0, 0) if call.bias is None else call.bias.strides
        fixed |= {"more_rows": schedule.more_rows, "ranges": schedule.ranges}
        fixed |= {"max_pages": pages, "table_stride": table_stride}
        fixed |= {"window": call.window or 0, "soft_cap": call.soft_cap or 1.0}
        fixed |= dict(zip(BIAS_STRIDES, strides, strict=True))
        given |= {"block_table": table is not None, "sinks": call.sinks is not None}
        given["alibi_slopes"] = call.alibi_slopes is not None
        options["bias"] = ("options", "attn_bias")
    numbers, lists = _lists(call)
    fixed, options = fixed | numbers, options | lists
    if features.transformed:
        given |= {"q_shift": features.shift, "out_factor": features.v_factor}
    options |= _found_in_options(*(name for name, is_given in given.items() if is_given))
    fixed |= {name: 0 for name, is_given in given.items() if not is_given}
    if features.tail:
        options |= _found_in_options("k_tail", "tail_slots")
    return fixed, options | _score_tensors(features)


def _scale_strides(call: AttentionCall) -> dict[str, int | float]:
    operands = {"k": call.k, "v": call.v}
    return {f"{name}_scale_stride": 0 if x.scale is None else x.scale.head_stride for name, x in operands.items()}


def _lists(call: AttentionCall) -> tuple[dict[str, int | float], dict[str, Place]]:
    """Returns how the kernel gets the arguments of chosen blocks, in the form of `known_arguments`. Both dicts are
    empty without chosen blocks."""
    if (blocks := call.blocks) is None:
        return {}, {}
    numbers = dict(zip(LIST_STRIDES, (*blocks.list.stride(), *blocks.counts.stride()), strict=True))
    numbers |= {"max_blocks": blocks.list.shape[2], "block_tokens": blocks.tokens, "page_size": call.page_size}
    return {**numbers}, _found_in_options("block_list", "block_counts")


def _found_in_options(*names: str) -> dict[str, Place]:
    return {name: ("options", name) for name in names}


def _score_tensors(features: Features) -> dict[str, Place]:
    return {tensor.name: ("options", "score_options", tensor.name) for tensor in tensors_in(features)}


def workspace_words(schedule: DecodeSchedule, problem: AttentionProblem) -> int:
    """Returns how many words the partial results of all units take; 0 if no row has more than one unit."""
    if schedule.num_splits == 1 and not schedule.ranges:
        return 0
    units = max(problem.batch * schedule.num_splits, problem.batch + schedule.ranges)
    return units * problem.q_len * problem.num_q_heads * schedule.config.partial_words


# -- extend attention --------------------------------------------------------------------------------------------------


def extend_launches(call: AttentionCall, config: ExtendConfig | None = None) -> ExtendLaunches:
    """Returns the launches of a checked call of extend attention. config: the configuration that reads the cache; None
    chooses one."""
    chosen, *others = configs_of(call, config)
    return ExtendLaunches(
        algorithms=_algorithms_of(call, chosen, ALGORITHMS if config is None else ALGORITHMS_OF_A_CONFIG),
        k_view=byte_view(call.k.cache) if chosen.decoded[0] else None,
        v_view=byte_view(call.v.cache) if chosen.decoded[1] else None,
        copies_table=call.block_table is not None and not call.block_table.is_contiguous(),
        has_cache=call.k.cache.numel() > 0 and call.max_seq_len > 0,
        newer=_launch_of(call, others[0]) if others else None,
    )


def configs_of(call: AttentionCall, config: ExtendConfig | None = None) -> list[ExtendConfig]:
    """Returns the configurations of a call's launches: the launch over the cache and, if the queries' own tokens are
    outside the cache, the launch over these tokens."""
    config = choose(problem_of(call)) if config is None else config
    if call.new is None:
        return [config]
    # Sinks count once; a tree's mask is about new tokens, and the older ones are all seen.
    older = replace(config, features=replace(config.features, sinks=False), tree=False)
    return [older, choose_newer(config)]


def _algorithms_of(call: AttentionCall, config: ExtendConfig, kinds: Iterable[AlgorithmsOf]) -> tuple[Algorithm, ...]:
    """Returns the algorithms for calls with configuration ``config``, in the order in which they are tried. The last
    one supports all calls, so no algorithm after it is compiled.
    """
    algorithms: list[Algorithm] = []
    for algorithms_of in kinds:
        algorithms += algorithms_of(call, config)
        if algorithms and algorithms[-1].supports is None:
            break
    return tuple(algorithms)


def _unpacked(call: AttentionCall, config: ExtendConfig) -> list[Algorithm]:
    """Returns a list with the algorithm that unpacks the cache and attends to the unpacked rows. The list is empty if
    the cache is never unpacked."""
    least = _queries_to_unpack_for(call, config)
    if least is None:
        return []
    unpack, attention = choose_fp8(config) if call.fp8_products else choose_unpacked(config)
    fixed: dict[str, int | float] = {
        "window": call.window or 0,
        "max_pages": _table_pages(call),
        "num_ctas": _num_sms(call) * UNPACK_CTAS_PER_SM,
    }
    send = UNPACK.bound(load(AttentionSpec(unpack), arch_of(call.q.device.index)), fixed)
    launch = UnpackedLaunch(send, unpack, _launch_of(call, attention))
    if call.unpack is True or call.fp8_products:
        return [Algorithm(launch)]

    def supports(num_queries: int, max_seq_len: int | None) -> bool:
        return num_queries >= least and launch.num_bytes(max_seq_len) <= MAX_UNPACKED_BYTES

    return [Algorithm(launch, supports)]


def _queries_to_unpack_for(call: AttentionCall, config: ExtendConfig) -> int | None:
    """Returns the smallest number of queries for which a call's cache is unpacked; None if it is never unpacked."""
    if config.unpacked or config.ragged or config.key_rows is not None or call.unpack is False or call.blocks:
        return None
    if call.unpack is True or call.fp8_products:
        return 0
    # Rows' scales are rounded in other places: a request's result would depend on its batch.
    if call.num_splits is not None and any(config.tile_scales):
        return None
    return queries_to_unpack_for(config, call.batch, call.group, call.window)


def _table_pages(call: AttentionCall) -> int:
    """Returns the number of pages of a request; 0 for a contiguous cache. With chosen blocks, the blocks of a
    contiguous cache count as pages.
    """
    if call.block_table is not None:
        return call.block_table.shape[1]
    return 0 if call.blocks is None else call.k.cache.shape[1] // call.page_size


def _key_rows(call: AttentionCall, config: ExtendConfig) -> list[Algorithm]:
    """Returns the algorithms with keys as rows of MMAs and a request's few queries as columns. With fixed splits there
    are none: a request's bits would depend on the number of queries in the batch."""
    if call.num_splits is not None or call.unpack is True or call.fp8_products:
        return []
    if not lies_in_pieces(call):
        return []

    def algorithm(few: ExtendConfig) -> Algorithm:
        sizes = call.batch, call.q.shape[1], call.num_kv_heads, _num_sms(call)  # kept, unlike the call's tensors
        return Algorithm(_launch_of(call, few), lambda queries, _: serves_key_rows(few, queries, *sizes))

    return [algorithm(few) for few in key_rows_for(call, config)]


def key_rows_for(call: AttentionCall, config: ExtendConfig) -> list[ExtendConfig]:
    """Returns the variants of ``config`` with key rows (`choose_key_rows`), for a call with few queries a request. The
    variant for the fewest queries comes first.
    """
    return choose_key_rows(config, lies_in_maps(call), heads_of_tile(call.num_kv_heads))


def _as_it_lies(call: AttentionCall, config: ExtendConfig) -> list[Algorithm]:
    """Returns the algorithm that reads the cache directly. It supports any number of queries."""
    if config.key_rows is not None and not lies_in_pieces(call):
        raise ValueError(
            f"k_cache, v_cache: got rows that key rows cannot bring: config {config.name} wants caches, and blocks of "
            f"them, that begin at multiples of {ALIGNMENT} bytes"
        )
    if call.num_kv_heads % config.tile_heads:
        raise ValueError(
            f"k_cache, v_cache: got {call.num_kv_heads} KV heads: config {config.name} wants a multiple of "
            f"{config.tile_heads}"
        )
    if config.mapped and not lies_in_maps(call):
        raise ValueError(
            f"k_cache, v_cache: got rows that tensor maps cannot bring: config {config.name} wants caches, blocks and "
            f"tokens that begin at multiples of {ALIGNMENT} bytes, and so rows, or a token's heads one behind the other"
        )
    return [Algorithm(_launch_of(call, config))]


AlgorithmsOf = Callable[[AttentionCall, ExtendConfig], list[Algorithm]]
ALGORITHMS: tuple[AlgorithmsOf, ...] = (_unpacked, _key_rows, _as_it_lies)
"""The algorithms that may support calls of a configuration, in the order in which they are tried."""
ALGORITHMS_OF_A_CONFIG: tuple[AlgorithmsOf, ...] = (_unpacked, _as_it_lies)
"""The algorithms for a configuration that the caller gives. Key rows are missing, since they have configurations of
their own."""


def lies_in_pieces(call: AttentionCall) -> bool:
    """Returns whether copies in pieces can load a call's caches as key rows."""
    return all(_lies_in_pieces(operand) for operand in (call.k, call.v))


def lies_in_maps(call: AttentionCall) -> bool:
    """Returns whether tensor maps can load a call's rows with their headers."""
    return all(_lies_in_maps(operand) for operand in (call.k, call.v))


def _lies_in_maps(operand: CacheOperand) -> bool:
    """Returns whether a tensor map can describe K or V. Blocks and tokens have to begin at multiples of 16 bytes. Also,
    either rows begin at such multiples, or a token's rows lie one after the other."""
    row_bytes = operand.form.row_bytes(operand.head_dim)
    places = operand.cache.data_ptr() | operand.block_stride | operand.token_stride
    if row_bytes % ALIGNMENT == 0:
        places |= operand.head_stride
    elif operand.head_stride != row_bytes:
        return False
    return places % ALIGNMENT == 0


def _lies_in_pieces(operand: CacheOperand) -> bool:
    """Returns whether K or V can be loaded by copies of aligned 16-byte pieces or by copies of words.

    Rows of a multiple of 16 bytes are loaded in pieces, so their addresses have to be multiples of 16. Rows of an fp32
    scale and 8-bit codes are loaded with all pieces that they touch, so blocks have to begin at multiples of 16. All
    other rows are loaded in words, and may begin at any multiple of a word.
    """
    form, places = operand.form, operand.cache.data_ptr() | operand.block_stride
    if form.row_bytes(operand.head_dim) % ALIGNMENT == 0:
        places |= operand.token_stride | operand.head_stride
    elif form.code_bits != 8:
        return True
    return places % ALIGNMENT == 0


def _launch_of(call: AttentionCall, config: ExtendConfig) -> ExtendLaunch:
    """Makes the launch of a call with a configuration, and loads the configuration's compiled kernels."""
    arch, cannot_split = arch_of(call.q.device.index), config.merges or call.num_splits == 1
    return ExtendLaunch(
        send=_extend_sender(call, config),
        config=config,
        device_index=call.q.device.index,
        num_sms=_num_sms(call),
        batch=call.batch,
        num_kv_heads=call.num_kv_heads,
        softmax_scale=call.softmax_scale,
        max_seq_len=call.max_seq_len,
        num_splits=call.num_splits,
        combine=None if cannot_split else COMBINE.bound(load(combine_spec(config), arch), {}),
    )


def _num_sms(call: AttentionCall) -> int:
    """Returns how many SMs a launch may use."""
    return max(GPU.num_sms(call.q.device) - call.sm_margin, 1)


def _extend_sender(call: AttentionCall, config: ExtendConfig) -> Callable[..., Any]:
    """Returns the compiled kernel of a configuration, bound to the arguments that the plan fixes."""
    fixed = _scale_strides(call) | {"window": call.window or 0, "soft_cap": call.soft_cap or 1.0}
    if not config.unpacked:
        fixed |= {"max_pages": _table_pages(call), "tile_scales": 0}
    numbers, lists = _lists(call)
    fixed |= numbers
    options = _found_in_options("k_scale", "v_scale", "sinks", "alibi_slopes") | _score_tensors(config.features) | lists
    function = load(AttentionSpec(config), arch_of(call.q.device.index))
    return extend_arguments(config.features).bound(function, fixed, options)


def specs_of(config: ExtendConfig, splits: bool = True) -> list[KernelSpec]:
    """Returns the specs of all kernels that calls with ``config`` may launch, except kernels over the queries' own
    tokens. splits: whether keys may be cut into splits.
    """
    specs: list[KernelSpec] = [AttentionSpec(config), *([combine_spec(config)] if splits else [])]
    few = [few for mapped in (True, False) for heads in (2, 1) for few in choose_key_rows(config, mapped, heads)]
    specs += [AttentionSpec(own) for own in dict.fromkeys(few)]
    if queries_to_unpack_for(config, 1, 1, None) is not None:
        unpack, attention = choose_unpacked(config)
        specs += [AttentionSpec(unpack), AttentionSpec(attention)]
    return specs


def combine_spec(config: ExtendConfig) -> AttentionSpec:
    """Returns the spec of the kernel that combines the splits of a configuration's launches."""
    return AttentionSpec(CombineConfig(config.q_dtype))


# -- addresses ---------------------------------------------------------------------------------------------------------


def check_columns(name: str, scale: GivenScale) -> None:
    """Raises ValueError unless the scales of a head's columns are contiguous and each head's scales begin at multiples
    of 16 bytes."""
    apart = scale.head_stride * scale.tensor.element_size() % ALIGNMENT and scale.tensor.shape[0] > 1
    if scale.channel_stride != 1 or apart:
        raise ValueError(
            f"{name}: got strides {scale.tensor.stride()} for shape {shape_of(scale.tensor)}, want a KV head's columns "
            f"side by side, on multiples of {ALIGNMENT} bytes"
        )


def check_alignment(call: AttentionCall) -> None:
    """Raises ValueError if a tensor's address or strides are not aligned as the kernels need."""
    tensors: dict[str, tuple[torch.Tensor | None, int]] = {"q": (call.q, ALIGNMENT), "out": (call.out, ALIGNMENT)}
    if call.tail is not None:
        tensors["k_tail"] = call.tail.rows, ALIGNMENT
    if call.new is not None:
        tensors |= {"new_k": (call.new[0], ALIGNMENT), "new_v": (call.new[1], ALIGNMENT)}
    for name, operand in (("k", call.k), ("v", call.v)):
        by_words = operand.form.is_coded if call.extends else operand.form.has_header
        wanted = 4 if by_words else ALIGNMENT
        tensors[f"{name}_cache"] = operand.cache, wanted
        if call.extends:
            _check_strides(f"{name}_cache", operand, wanted)
        if operand.scale is not None and operand.form.given_scale == "channel":
            check_columns(f"{name}_scale", operand.scale)
            tensors[f"{name}_scale"] = operand.scale.tensor, ALIGNMENT
    for name, (tensor, wanted) in tensors.items():
        if tensor is not None:
            check_aligned(name, tensor, wanted)


def _check_strides(name: str, operand: CacheOperand, alignment: int) -> None:
    """Raises ValueError unless the strides of a cache are multiples of ``alignment`` bytes and tokens lie less than
    `MAX_TOKEN_STRIDE` bytes apart."""
    strides = operand.block_stride, operand.token_stride, operand.head_stride
    if any(stride % alignment for stride in strides):
        raise ValueError(f"{name}: got rows {strides} bytes apart, want multiples of {alignment}")
    if operand.token_stride >= MAX_TOKEN_STRIDE:
        raise ValueError(f"{name}: got tokens {operand.token_stride} bytes apart, want less than {MAX_TOKEN_STRIDE}")
