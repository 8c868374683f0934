"""What of a call stays the same from call to call: the ways to serve it, compiled, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels.attention.arguments import COMBINE, UNPACK, extend_arguments
from cute_kernels.attention.call import CacheOperand
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend_call import ExtendCall, row_stride
from cute_kernels.attention.extend_config import CombineConfig, ExtendConfig
from cute_kernels.attention.extend_launches import ExtendLaunch, Keys, UnpackedLaunches, Way
from cute_kernels.attention.extend_policies import UNPACK_CTAS_PER_SM, has_channel_scales
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
from cute_kernels.attention.plan import check_columns
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.attention.problem import ExtendProblem
from cute_kernels.formats.scores import tensors_in
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.memory import blank, byte_view
from cute_kernels.runtime.plans import ALIGNMENT
from cute_kernels.runtime.spec import KernelSpec

MAX_TOKEN_STRIDE = 2**23  # bytes: those of a tile fit 32 bits


@dataclass(frozen=True)
class ExtendPlan:
    """Everything about a call that does not change between calls of the same shapes, but for how many queries there
    are, dtypes, device and options.

    Attributes:
        ways: in which calls are served: the first that says so serves one, and the last serves all.
        k_view, v_view: dtypes that the kernels take the caches as, None for their own.
        copies_table: whether the rows of the block table lie apart: the kernels know of none that do.
        has_cache: whether the cache has room for a token.
        newer: the launch over the queries' own tokens, where these are not in the cache.
    """

    ways: tuple[Way, ...]
    device_index: int
    k_view: torch.dtype | None
    v_view: torch.dtype | None
    copies_table: bool
    has_cache: bool = True
    newer: ExtendLaunch | None = None

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        kv_format: object,
        softmax_scale: float | None,
        return_lse: bool,
        out: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches on the current stream of the plan's device, which is the current one: (out or a new one, lse if
        asked for)."""
        if out is None:
            out = GPU.empty(*blank(tuple(q.shape), q.dtype))
        lse = self._new_lse(q) if return_lse else None
        if self.newer is None:
            self.call(q, k_cache, v_cache, cu_seqlens_q, seq_lens, out, lse, softmax_scale, options)
            return out, lse
        older = GPU.empty(*blank(tuple(q.shape), q.dtype)), self._new_lse(q)
        if self.has_cache:
            self.call(q, k_cache, v_cache, cu_seqlens_q, seq_lens, *older, softmax_scale, options, prefix_only=1)
        else:
            older = older[0].zero_(), older[1].fill_(-torch.inf)
        k, v = (rows.unsqueeze(0) for rows in (options["new_k"], options["new_v"]))
        self.newer.call(Keys(q, k, v, cu_seqlens_q, cu_seqlens_q, out, lse, softmax_scale, options), older)
        return out, lse

    def _new_lse(self, q: torch.Tensor) -> torch.Tensor:
        return GPU.empty(*blank(tuple(q.shape[:2]), torch.float32))

    def call(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float | None,
        options: dict[str, Any],
        *,
        prefix_only: int = 0,
    ) -> None:
        """Attention over the cache, as :class:`.ways.Keys` has it."""
        if self.copies_table:  # the copy may be freed before it is read: its memory is reused in the stream's order
            options = options | {"block_table": options["block_table"].contiguous()}
        k_cache = k_cache if self.k_view is None else k_cache.view(self.k_view)
        v_cache = v_cache if self.v_view is None else v_cache.view(self.v_view)
        launches = self.launches_for(q.shape[0], options["max_seq_len"])
        launches.call(Keys(q, k_cache, v_cache, cu_seqlens_q, lengths, out, lse, softmax_scale, options, prefix_only))

    def launches_for(self, num_queries: int, max_seq_len: int | None) -> ExtendLaunch | UnpackedLaunches:
        """Of the way that serves a call; max_seq_len: of its requests, if known."""
        ways = (way for way in self.ways if way.serves is None or way.serves(num_queries, max_seq_len))
        return next(ways).launches


def make_plan(call: ExtendCall, config: ExtendConfig | None = None) -> ExtendPlan:
    """The plan of a checked call; ``config`` instead of what the schedule would choose."""
    base, device = call.base, call.q.device
    chosen, *others = configs_of(call, config)
    return ExtendPlan(
        ways=_ways_of(call, chosen, WAYS if config is None else WAYS_OF_A_CONFIG),
        device_index=device.index,
        k_view=byte_view(base.k.cache) if chosen.decoded[0] else None,
        v_view=byte_view(base.v.cache) if chosen.decoded[1] else None,
        copies_table=base.block_table is not None and not base.block_table.is_contiguous(),
        has_cache=base.k.cache.numel() > 0 and base.max_seq_len > 0,
        newer=_launch_of(call, others[0]) if others else None,
    )


def configs_of(call: ExtendCall, config: ExtendConfig | None = None) -> list[ExtendConfig]:
    """Of a call's launches: over the cache, and over the queries' own tokens if they come beside it."""
    config = choose(problem_of(call)) if config is None else config
    if call.new is None:
        return [config]
    # Sinks count once; a tree's mask is about new tokens, and the older ones are all seen.
    older = replace(config, features=replace(config.features, sinks=False), tree=False)
    return [older, choose_newer(config)]


# -- ways -------------------------------------------------------------------------------------------------------------


def _ways_of(call: ExtendCall, config: ExtendConfig, kinds: Iterable[WaysOf]) -> tuple[Way, ...]:
    """In which calls are served whose configuration is ``config``, up to the first that serves all: what would never
    be asked is not compiled."""
    ways: list[Way] = []
    for ways_of in kinds:
        ways += ways_of(call, config)
        if ways and ways[-1].serves is None:
            break
    return tuple(ways)


def _unpacked(call: ExtendCall, config: ExtendConfig) -> list[Way]:
    """A launch that makes rows of 16 bits of the cache, and attention over them."""
    least = _queries_to_unpack_for(call, config)
    if least is None:
        return []
    unpack, attention = choose_fp8(config) if call.fp8_products else choose_unpacked(config)
    fixed: dict[str, int | float] = {
        "window": call.base.window or 0,
        "max_pages": _table_pages(call),
        "num_ctas": _num_sms(call) * UNPACK_CTAS_PER_SM,
    }
    send = UNPACK.bound(load(AttentionSpec(unpack), arch_of(call.q.device.index)), fixed)
    launches = UnpackedLaunches(send, unpack, _launch_of(call, attention))
    if call.unpack is True or call.fp8_products:
        return [Way(launches)]

    def serves(num_queries: int, max_seq_len: int | None) -> bool:
        return num_queries >= least and launches.num_bytes(max_seq_len) <= MAX_UNPACKED_BYTES

    return [Way(launches, serves)]


def _queries_to_unpack_for(call: ExtendCall, config: ExtendConfig) -> int | None:
    """How many queries a call must have for its cache to be unpacked; None if it never is."""
    if config.unpacked or config.ragged or config.key_rows is not None or call.unpack is False:
        return None
    if call.unpack is True or call.fp8_products:
        return 0
    # Rows' scales are rounded in other places: a request's result would depend on its batch.
    if call.num_splits is not None and any(config.tile_scales):
        return None
    return queries_to_unpack_for(config, call.batch, call.base.group, call.base.window)


def _table_pages(call: ExtendCall) -> int:
    """Of a request; 0 without a table."""
    return 0 if call.base.block_table is None else call.base.block_table.shape[1]


def _key_rows(call: ExtendCall, config: ExtendConfig) -> list[Way]:
    """Keys as rows of products and a request's few queries as columns. Not with fixed splits: a request's bits would
    depend on how many queries others have."""
    if call.num_splits is not None or call.unpack is True or call.fp8_products:
        return []
    if not lies_in_pieces(call):
        return []

    def way(few: ExtendConfig) -> Way:
        shape = call.q.shape[1], call.base.num_kv_heads, _num_sms(call)
        return Way(_launch_of(call, few), lambda queries, _: serves_key_rows(few, queries, call.batch, *shape))

    return [way(few) for few in key_rows_for(call, config)]


def key_rows_for(call: ExtendCall, config: ExtendConfig) -> list[ExtendConfig]:
    """What may serve a call of few queries a request that ``config`` serves, for the fewest first."""
    return choose_key_rows(config, lies_in_maps(call), heads_of_tile(call.base.num_kv_heads))


def _as_it_lies(call: ExtendCall, config: ExtendConfig) -> list[Way]:
    """The cache is read once, however many queries there are."""
    if config.key_rows is not None and not lies_in_pieces(call):
        raise ValueError(
            f"k_cache, v_cache: got rows that key rows cannot bring: config {config.name} wants caches, and blocks of "
            f"them, that begin at multiples of {ALIGNMENT} bytes"
        )
    if call.base.num_kv_heads % config.tile_heads:
        raise ValueError(
            f"k_cache, v_cache: got {call.base.num_kv_heads} KV heads: config {config.name} wants a multiple of "
            f"{config.tile_heads}"
        )
    if config.mapped and not lies_in_maps(call):
        raise ValueError(
            f"k_cache, v_cache: got rows that tensor maps cannot bring: config {config.name} wants caches, blocks and "
            f"tokens that begin at multiples of {ALIGNMENT} bytes, and so rows, or a token's heads one behind the other"
        )
    return [Way(_launch_of(call, config))]


WaysOf = Callable[[ExtendCall, ExtendConfig], list[Way]]
WAYS: tuple[WaysOf, ...] = (_unpacked, _key_rows, _as_it_lies)
"""What may serve calls of a configuration, in the order in which they are asked."""
WAYS_OF_A_CONFIG: tuple[WaysOf, ...] = (_unpacked, _as_it_lies)
"""Where the configuration is given: key rows are one."""


def lies_in_pieces(call: ExtendCall) -> bool:
    """Whether key rows can bring a call's caches."""
    return all(_lies_in_pieces(operand) for operand in (call.base.k, call.base.v))


def lies_in_maps(call: ExtendCall) -> bool:
    """Whether tensor maps can bring a call's rows with what is in front of them."""
    return all(_lies_in_maps(operand) for operand in (call.base.k, call.base.v))


def _lies_in_maps(operand: CacheOperand) -> bool:
    """Of K's or V's: rows of a multiple of 16 bytes each by itself, others as those of a token, one head's behind the
    other's."""
    row_bytes = operand.form.row_bytes(operand.head_dim)
    places = operand.cache.data_ptr() | operand.block_stride | operand.token_stride
    if row_bytes % ALIGNMENT == 0:
        places |= operand.head_stride
    elif operand.head_stride != row_bytes:
        return False
    return places % ALIGNMENT == 0


def _lies_in_pieces(operand: CacheOperand) -> bool:
    """Of K's or V's: rows of a multiple of 16 bytes by pieces of 16; bytes behind a scale by all pieces that they
    touch, in blocks that begin with one; others by words."""
    form, places = operand.form, operand.cache.data_ptr() | operand.block_stride
    if form.row_bytes(operand.head_dim) % ALIGNMENT == 0:
        places |= operand.token_stride | operand.head_stride
    elif form.code_bits != 8:
        return True
    return places % ALIGNMENT == 0


# -- launches ---------------------------------------------------------------------------------------------------------


def _launch_of(call: ExtendCall, config: ExtendConfig) -> ExtendLaunch:
    """One launch of attention, compiled."""
    base = call.base
    return ExtendLaunch(
        send=_sender(call, config),
        config=config,
        device_index=call.q.device.index,
        num_sms=_num_sms(call),
        batch=call.batch,
        num_kv_heads=base.num_kv_heads,
        softmax_scale=base.softmax_scale,
        max_seq_len=base.max_seq_len,
        num_splits=call.num_splits,
        combine=None if config.merges or call.num_splits == 1 else _combiner(config, call.q.device),
    )


def _num_sms(call: ExtendCall) -> int:
    """That a launch may use."""
    return max(GPU.num_sms(call.q.device) - call.sm_margin, 1)


def _sender(call: ExtendCall, config: ExtendConfig) -> Callable[..., Any]:
    """The compiled kernel, with the arguments that only what decides a plan decides."""
    base = call.base
    fixed: dict[str, int | float] = {
        "k_scale_stride": 0 if base.k.scale is None else base.k.scale.head_stride,
        "v_scale_stride": 0 if base.v.scale is None else base.v.scale.head_stride,
        "window": base.window or 0,
        "soft_cap": base.soft_cap or 1.0,
    }
    if not config.unpacked:
        fixed |= {"max_pages": _table_pages(call), "tile_scales": 0}
    options: dict[str, Place] = {name: ("options", name) for name in ("k_scale", "v_scale", "sinks", "alibi_slopes")}
    options |= {tensor.name: ("options", "score_options", tensor.name) for tensor in tensors_in(config.features)}
    return extend_arguments(config.features).bound(
        load(AttentionSpec(config), arch_of(call.q.device.index)), fixed, options
    )


def _combiner(config: ExtendConfig, device: torch.device) -> Callable[..., Any]:
    return COMBINE.bound(load(combine_spec(config), arch_of(device.index)), {})


def specs_of(config: ExtendConfig, splits: bool = True) -> list[KernelSpec]:
    """All kernels that calls which the schedule gives ``config`` may launch, but for those of new tokens.

    splits: whether keys may be cut.
    """
    specs: list[KernelSpec] = [AttentionSpec(config), *([combine_spec(config)] if splits else [])]
    few = [few for mapped in (True, False) for heads in (2, 1) for few in choose_key_rows(config, mapped, heads)]
    specs += [AttentionSpec(own) for own in dict.fromkeys(few)]
    if queries_to_unpack_for(config, 1, 1, None) is not None:
        unpack, attention = choose_unpacked(config)
        specs += [AttentionSpec(unpack), AttentionSpec(attention)]
    return specs


def combine_spec(config: ExtendConfig) -> AttentionSpec:
    """What puts the splits of a configuration's launches together."""
    return AttentionSpec(CombineConfig(config.q_dtype, config.head_dim))


def problem_of(call: ExtendCall) -> ExtendProblem:
    """What the schedule needs to know of a call."""
    base = call.base
    paged = base.block_table is not None
    return ExtendProblem(
        head_dim=call.q.shape[2],
        k_format=base.k.form.name,
        v_format=base.v.form.name,
        q_dtype=Q_DTYPES[call.q.dtype],
        page_tokens=max(size for size in PAGE_TOKENS if base.page_size % size == 0) if paged else 0,
        features=call.features,
        tree=call.tree_mask is not None,
        strided_q=row_stride(call.q) is not None,
    )


def check_alignment(call: ExtendCall) -> None:
    """Raises ValueError for a tensor that the kernels cannot address."""
    operands = {"k": call.base.k, "v": call.base.v}
    wanted = {name: 4 if operand.form.is_coded else ALIGNMENT for name, operand in operands.items()}
    tensors = {"q": (call.q, ALIGNMENT)}
    tensors |= {f"{name}_cache": (operand.cache, wanted[name]) for name, operand in operands.items()}
    if call.out is not None:
        tensors["out"] = call.out, ALIGNMENT
    if call.new is not None:
        tensors |= {"new_k": (call.new[0], ALIGNMENT), "new_v": (call.new[1], ALIGNMENT)}
    for name, operand in operands.items():
        _check_strides(f"{name}_cache", operand, wanted[name])
        if operand.scale is not None and has_channel_scales(operand.form):
            check_columns(f"{name}_scale", operand.scale)
            tensors[f"{name}_scale"] = operand.scale.tensor, ALIGNMENT
    for name, (tensor, alignment) in tensors.items():
        if tensor.data_ptr() % alignment:
            raise ValueError(
                f"{name}: got a tensor that starts {tensor.data_ptr() % alignment} bytes past a multiple of "
                f"{alignment}, want it aligned to {alignment} bytes"
            )


def _check_strides(name: str, operand: CacheOperand, alignment: int) -> None:
    """Raises ValueError unless the rows of a cache are aligned, and its tokens near enough."""
    strides = operand.block_stride, operand.token_stride, operand.head_stride
    if any(stride % alignment for stride in strides):
        raise ValueError(f"{name}: got rows {strides} bytes apart, want multiples of {alignment}")
    if operand.token_stride >= MAX_TOKEN_STRIDE:
        raise ValueError(f"{name}: got tokens {operand.token_stride} bytes apart, want less than {MAX_TOKEN_STRIDE}")
