"""What of a launch stays the same from call to call: the compiled function and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels.attention.call import CacheOperand
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.plan import address_of
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.attention.score_options import tensors_in
from cute_kernels.extend.arguments import COMBINE, UNPACK, attention_arguments
from cute_kernels.extend.call import ExtendCall
from cute_kernels.extend.compile import CombineSpec, ExtendSpec, UnpackSpec
from cute_kernels.extend.config import CombineConfig, ExtendConfig
from cute_kernels.extend.schedule import (
    ExtendProblem,
    choose,
    choose_fp8,
    choose_key_rows,
    choose_newer,
    choose_splits,
    choose_unpacked,
    count_tiles,
    queries_to_unpack_for,
    serves_key_rows,
)
from cute_kernels.extend.unpacked import UnpackPlan
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.memory import blank, byte_view
from cute_kernels.runtime.plans import ALIGNMENT
from cute_kernels.runtime.spec import KernelSpec

MAX_TOKEN_STRIDE = 2**23  # bytes: those of a tile fit 32 bits
COUNTER_WORDS = 4  # of workspace, of which one counts work tiles


@dataclass(frozen=True)
class ExtendPlan:
    """Everything about a launch that does not change between calls of the same shapes, but for how many queries there
    are, dtypes, device and options.

    Attributes:
        send: the compiled kernel, which compares every tensor that it is given with what it was compiled for; takes the
            arguments of a launch that are not the same for all of them by name, and ``options``. None where every call
            goes the other way.
        config: what it was compiled from.
        k_view, v_view: dtypes that the function takes the caches as, None for their own.
        copies_table: whether the rows of the block table lie apart: the kernels know of none that do.
        window: keys that a query sees, 0 for all.
        unpack: the other way to serve a call, for launches of many queries; None where there is none.
        num_sms: those that a launch may use.
        has_cache: whether the cache has room for a token.
        newer: the plan of the launch over the queries' own tokens, where these are not in the cache.
        key_rows: plans of launches of few queries a request, whose products have keys as rows; for the fewest first.
        combine: the compiled kernel that puts splits together, its arguments by name; None where there are never any.
        num_splits: parts that the keys of every work tile are cut into; None where each launch chooses.
        max_seq_len: tokens that a request may have.
    """

    send: Callable[..., Any] | None
    config: ExtendConfig
    device_index: int
    num_sms: int
    batch: int
    num_kv_heads: int
    softmax_scale: float
    k_view: torch.dtype | None
    v_view: torch.dtype | None
    copies_table: bool
    window: int
    has_cache: bool = True
    newer: ExtendPlan | None = None
    unpack: UnpackPlan | None = None
    key_rows: tuple[ExtendPlan, ...] = ()
    combine: Callable[..., Any] | None = None
    num_splits: int | None = None
    max_seq_len: int = 0

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
        self.newer.call(q, k, v, cu_seqlens_q, cu_seqlens_q, out, lse, softmax_scale, options, other=older)
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
        other: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        unpacked: tuple[int, torch.Tensor | None] | None = None,
    ) -> None:
        """One launch; lengths: what :mod:`.arguments` has as seq_lens. other: (out, lse) of another launch that the
        result is merged with. unpacked: of unpacked keys, tokens that a request may have, and tiles'
        scales."""
        config, index, max_seq_len = self.config, self.device_index, options["max_seq_len"]
        table = options["block_table"] if config.page_tokens else None
        if self.copies_table and table is not None:
            table = table.contiguous()  # may be freed before it is read: its memory is reused in the stream's order
        k_cache = k_cache if self.k_view is None else k_cache.view(self.k_view)
        v_cache = v_cache if self.v_view is None else v_cache.view(self.v_view)
        if self.unpack is not None and self.unpack.serves(q.shape[0], max_seq_len):
            given = (cu_seqlens_q, lengths, out, lse, softmax_scale, options, table, prefix_only)
            self.unpack.call(q, (k_cache, v_cache), *given)
            return
        few = self.key_rows_for(q)
        if few is not None:
            given = (cu_seqlens_q, lengths, out, lse, softmax_scale, options)
            few.call(q, k_cache, v_cache, *given, prefix_only=prefix_only)
            return
        splits, partials = self.splits_of(q, max_seq_len), None
        if splits > 1:
            partials = GPU.empty(*blank((splits, q.shape[0], q.shape[1], q.shape[2] + 1), torch.float32))
        num_tiles = count_tiles(q.shape[0], self.batch, q.shape[1], self.num_kv_heads, config.tile_rows) * splits
        mask = options["tree_mask"] if config.tree else None
        own = {} if unpacked is None else {"max_pages": unpacked[0], "tile_scales": address_of(unpacked[1])}
        assert self.send is not None
        self.send(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            cu_seqlens=cu_seqlens_q,
            seq_lens=lengths,
            out=out,
            lse=address_of(lse),
            other_out=address_of(other[0]),
            other_lse=address_of(other[1]),
            counter=GPU.workspace(index, GPU.stream(index), COUNTER_WORDS),
            prefix_only=prefix_only,
            softmax_scale=self.softmax_scale if softmax_scale is None else softmax_scale,
            block_table=address_of(table),
            tree_mask=address_of(mask),
            tree_words=0 if mask is None else mask.shape[1],
            num_splits=splits,
            partials=address_of(partials),
            num_ctas=min(num_tiles, self.num_sms),
            options=options,
            **own,
        )
        if splits > 1:
            assert self.combine is not None
            sinks = options["sinks"] if config.features.sinks else None
            self.combine(
                out=out, cu_seqlens=cu_seqlens_q, partials=address_of(partials), lse=address_of(lse),
                sinks=address_of(sinks), num_splits=splits,
            )  # fmt: skip

    def splits_of(self, q: torch.Tensor, max_seq_len: int | None) -> int:
        """Of a launch; max_seq_len: of its requests, if known."""
        if self.combine is None:
            return 1
        if self.num_splits is not None:
            return self.num_splits
        most = self.max_seq_len if max_seq_len is None else min(self.max_seq_len, max_seq_len)
        heads, tile_rows = self.num_kv_heads, self.config.tile_rows
        return choose_splits(q.shape[0], self.batch, q.shape[1], heads, most, self.num_sms, tile_rows)

    def key_rows_for(self, q: torch.Tensor) -> ExtendPlan | None:
        """The plan of key rows that serves such queries; None if this one does."""
        shape = (q.shape[0], self.batch, q.shape[1], self.num_kv_heads, self.num_sms)
        return next((plan for plan in self.key_rows if serves_key_rows(plan.config, *shape)), None)


def make_plan(call: ExtendCall, config: ExtendConfig | None = None) -> ExtendPlan:
    """The plan of a checked call; ``config`` instead of what the schedule would choose."""
    chosen, *others = configs_of(call, config)
    newer = make_plan_of(call, others[0]) if others else None
    plan = make_plan_of(call, chosen, newer)
    return replace(plan, key_rows=_key_rows_plans(call, chosen)) if config is None else plan


def configs_of(call: ExtendCall, config: ExtendConfig | None = None) -> list[ExtendConfig]:
    """Of a call's launches: over the cache, and over the queries' own tokens if they come beside it."""
    config = choose(problem_of(call)) if config is None else config
    if call.new is None:
        return [config]
    # Sinks count once; a tree's mask is about new tokens, and the older ones are all seen.
    older = replace(config, features=replace(config.features, sinks=False), tree=False)
    return [older, choose_newer(config)]


def make_plan_of(call: ExtendCall, config: ExtendConfig, newer: ExtendPlan | None = None) -> ExtendPlan:
    """The plan of a launch of ``config``; newer: that of a launch that merges what this one makes."""
    base, coded = call.base, config.decodes
    table, device = base.block_table, call.q.device
    unpack = _unpack_plan(call, config)
    return ExtendPlan(
        send=None if unpack is not None and unpack.serves_all else _sender(call, config),
        config=config,
        device_index=device.index,
        num_sms=max(GPU.num_sms(device) - call.sm_margin, 1),
        batch=call.batch,
        num_kv_heads=base.num_kv_heads,
        softmax_scale=base.softmax_scale,
        k_view=byte_view(base.k.cache) if coded else None,
        v_view=byte_view(base.v.cache) if coded else None,
        copies_table=table is not None and not table.is_contiguous(),
        window=base.window or 0,
        has_cache=base.k.cache.numel() > 0 and base.max_seq_len > 0,
        newer=newer,
        unpack=unpack,
        combine=None if config.merges or call.num_splits == 1 else _combiner(config, device),
        num_splits=call.num_splits,
        max_seq_len=base.max_seq_len,
    )


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
        fixed |= {"max_pages": 0 if base.block_table is None else base.block_table.shape[1], "tile_scales": 0}
    options: dict[str, Place] = {name: ("options", name) for name in ("k_scale", "v_scale", "sinks", "alibi_slopes")}
    options |= {tensor.name: ("options", "score_options", tensor.name) for tensor in tensors_in(config.features)}
    return attention_arguments(config.features).bound(
        load(ExtendSpec(config), arch_of(call.q.device.index)), fixed, options
    )


def _combiner(config: ExtendConfig, device: torch.device) -> Callable[..., Any]:
    return COMBINE.bound(load(combine_spec(config), arch_of(device.index)), {})


def _unpack_plan(call: ExtendCall, config: ExtendConfig) -> UnpackPlan | None:
    """How a call that ``config`` serves could be served over unpacked keys."""
    if config.unpacked or config.ragged or config.key_rows is not None or call.unpack is False:
        return None
    least: int | None = 0
    if call.unpack is None and not call.fp8_products:
        least = queries_to_unpack_for(config, call.batch, call.base.group, call.base.window)
        # Rows' scales are rounded in other places: a request's result would depend on its batch.
        is_fixed = call.num_splits is not None and any(config.tile_scales)
        if least is None or is_fixed:
            return None
    unpack, attention = choose_fp8(config) if call.fp8_products else choose_unpacked(config)
    send = UNPACK.bound(load(UnpackSpec(unpack), arch_of(call.q.device.index)), {})
    is_asked_for = call.unpack is True or call.fp8_products
    return UnpackPlan(send, unpack, make_plan_of(call, attention), least, is_asked_for)


def _key_rows_plans(call: ExtendCall, config: ExtendConfig) -> tuple[ExtendPlan, ...]:
    """How a call that ``config`` serves is served with few queries a request. Not with fixed splits: a request's bits
    would depend on how many queries others have."""
    if call.num_splits is not None or call.unpack is True or call.fp8_products:
        return ()
    if not all(_lies_in_pieces(operand) for operand in (call.base.k, call.base.v)):
        return ()
    return tuple(make_plan_of(call, few) for few in choose_key_rows(config))


def _lies_in_pieces(operand: CacheOperand) -> bool:
    """Whether key rows can bring a cache: rows of a multiple of 16 bytes by pieces of 16, others by words."""
    places = operand.cache.data_ptr() | operand.block_stride | operand.token_stride | operand.head_stride
    return bool(operand.form.row_bytes(operand.head_dim) % ALIGNMENT) or places % ALIGNMENT == 0


def specs_of(config: ExtendConfig, splits: bool = True) -> list[KernelSpec]:
    """All kernels that calls which the schedule gives ``config`` may launch, but for those of new tokens.

    splits: whether keys may be cut.
    """
    specs: list[KernelSpec] = [ExtendSpec(config), *([combine_spec(config)] if splits else [])]
    specs += map(ExtendSpec, choose_key_rows(config))
    if queries_to_unpack_for(config, 1, 1, None) is not None:
        unpack, attention = choose_unpacked(config)
        specs += [UnpackSpec(unpack), ExtendSpec(attention)]
    return specs


def combine_spec(config: ExtendConfig) -> CombineSpec:
    """What puts the splits of a configuration's launches together."""
    return CombineSpec(CombineConfig(config.q_dtype, config.head_dim))


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
    )


def check_alignment(call: ExtendCall) -> None:
    """Raises ValueError for a tensor that the kernels cannot address."""
    coded = call.base.k.form.row_elements(0) or call.base.k.cache.element_size() == 1
    wanted = 4 if coded else ALIGNMENT
    tensors = {"q": (call.q, ALIGNMENT), "k_cache": (call.base.k.cache, wanted), "v_cache": (call.base.v.cache, wanted)}
    if call.out is not None:
        tensors["out"] = call.out, ALIGNMENT
    if call.new is not None:
        tensors |= {"new_k": (call.new[0], ALIGNMENT), "new_v": (call.new[1], ALIGNMENT)}
    for name, operand in (("k_cache", call.base.k), ("v_cache", call.base.v)):
        _check_strides(name, operand, wanted)
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
