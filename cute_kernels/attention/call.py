"""A call of decode attention as one object: checked, and every option in the form that kernels and reference take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import torch

from cute_kernels.arguments import (
    check_apart,
    check_contiguous,
    check_flag,
    check_optional_count,
    check_optional_positive,
    check_place,
    check_tensors,
    check_vector,
    shape_of,
    strides_of,
)
from cute_kernels.attention import checks
from cute_kernels.attention.checks import MAX_TOKENS
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.scores import SIZES, check_given, check_mapping
from cute_kernels.formats.scores.features import Features
from cute_kernels.names import CacheLayout, WindowSize


class ScoreOptions(TypedDict, total=False):
    """What a plain call leaves alone; :func:`cute_kernels.attention.decode_attention` says what each means."""

    block_table: torch.Tensor | None
    cache_layout: CacheLayout
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    causal: bool
    window_size: WindowSize | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    attn_bias: torch.Tensor | None


class CallOptions(ScoreOptions, total=False):
    """`ScoreOptions`, what transformed queries already bring, and keys that wait for their block to be full."""

    q_shift: torch.Tensor | None
    k_tail: torch.Tensor | None
    tail_slots: torch.Tensor | None
    score_options: Mapping[str, torch.Tensor] | None


NO_OPTIONS: CallOptions = {
    "block_table": None,
    "cache_layout": "NHD",
    "k_scale": None,
    "v_scale": None,
    "causal": True,
    "window_size": None,
    "softcap": None,
    "sinks": None,
    "alibi_slopes": None,
    "attn_bias": None,
    "q_shift": None,
    "k_tail": None,
    "tail_slots": None,
}
"""The defaults, complete and in the order that every complete set of options has; ``score_options`` come after them, in
calls that have some."""


def options_of(
    block_table: torch.Tensor | None,
    cache_layout: CacheLayout,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
    window_size: WindowSize | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    q_shift: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    tail_slots: torch.Tensor | None = None,
) -> CallOptions | None:
    """Complete options, or None where all of them are the defaults, which is what most calls ask for."""
    plain = block_table is k_scale is v_scale is window_size is softcap is sinks is alibi_slopes is attn_bias is None
    if plain and q_shift is k_tail is tail_slots is None and causal is True and cache_layout == "NHD":
        return None
    return {
        "block_table": block_table,
        "cache_layout": cache_layout,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "causal": causal,
        "window_size": keys_seen(window_size) if isinstance(window_size, (tuple, list)) else window_size,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "q_shift": q_shift,
        "k_tail": k_tail,
        "tail_slots": tail_slots,
    }


def with_score_options(options: CallOptions | None, given: Mapping[str, torch.Tensor]) -> CallOptions:
    """Complete options, and those that are registered; TypeError unless these are a mapping."""
    check_mapping(given)
    return cast(CallOptions, {**(options or NO_OPTIONS), "score_options": given})


def keys_seen(pair: Any) -> int | None:
    """FlashAttention's (left, right) as the number of keys that a query sees, its own among them; None for all.

    -1 stands for no bound. Keys after the query's own are never seen through a window, so right is 0.
    """
    numbers = len(pair) == 2 and all(isinstance(side, int) and not isinstance(side, bool) for side in pair)
    if not numbers or pair[0] < -1 or pair[1] != (-1 if pair[0] == -1 == pair[1] else 0):
        raise ValueError(
            f"window_size: got {pair!r}, want the number of keys that a query sees, or (left, 0): so many "
            "before its own, -1 for all of them"
        )
    if pair[1] == -1:
        return None
    return MAX_TOKENS if pair[0] == -1 else pair[0] + 1


def complete_options(options: dict[str, Any]) -> CallOptions | None:
    """Options as an operator's implementation gets them, those that differ from the schema's defaults and maybe others,
    as the calls take them."""
    return cast(CallOptions, {**NO_OPTIONS, **options}) if options else None


@dataclass(frozen=True, eq=False)
class GivenScale:
    """A scale that lies beside the cache: of head h and column d it is element h * head_stride + d * channel_stride.

    tensor: fp32, on the cache's device. A stride is 0 where one scale serves all heads, or all columns.
    """

    tensor: torch.Tensor
    head_stride: int
    channel_stride: int


@dataclass(frozen=True, eq=False)
class CacheOperand:
    """K or V of a call.

    Attributes:
        cache: 4 dimensions as the call's layout orders them; rows are contiguous, other strides free.
        form: its format.
        head_dim: elements that a row stands for.
        block_stride, token_stride, head_stride: bytes from one block (a page, or a request's contiguous cache), token
            or KV head to the next. Where the row of a token lies: block * block_stride + place in the block *
            token_stride + head * head_stride; the sum may exceed 32 bits.
        tokens_touch: whether tokens lie one behind the other, of all KV heads or, head-major, of each of them.
        heads_touch: whether the rows of a token's KV heads do or, head-major, the tokens of a block's.
        scale: where the format wants one that is given.
    """

    cache: torch.Tensor
    form: KvFormat
    head_dim: int
    block_stride: int
    token_stride: int
    head_stride: int
    tokens_touch: bool
    heads_touch: bool
    scale: GivenScale | None

    @property
    def row_bytes(self) -> int:
        return self.cache.shape[3] * self.cache.element_size()


@dataclass(frozen=True, eq=False)
class Tail:
    """Keys of a format in blocks that are beside the cache: those of each request's block that is not full.

    rows: fp16 [slots, 64, num_kv_heads, head_dim], contiguous, by position modulo 64. slots: int32 [batch].
    """

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class Bias:
    """An additive bias: element b * strides[0] + i * strides[1] + h * strides[2] + j * strides[3], strides 0 where it
    repeats; fp32 or bf16."""

    tensor: torch.Tensor
    strides: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One checked call.

    Attributes:
        q: [batch, q_len, num_q_heads, head_dim], the last two dimensions contiguous.
        k, v: the caches.
        seq_lens: int32 [batch].
        block_table: int32 [batch, max_pages], columns side by side, or None for contiguous caches.
        num_kv_heads, max_seq_len: of the caches; max_seq_len is what a request's row of the table, or its contiguous
            cache, has room for.
        page_size: tokens of a page; max_seq_len for contiguous caches, whose requests are one block each.
        num_blocks: pages of the cache; the batch for contiguous caches.
        head_major: whether the caches are "HND".
        softmax_scale: the default filled in.
        causal: whether keys after the query are hidden; a window implies it.
        window: None where it would hide nothing.
        soft_cap: None for none.
        sinks, alibi_slopes: fp32 [num_q_heads], contiguous.
        q_shift: fp32 [batch, q_len, num_q_heads], contiguous: added to q . k.
        v_rotation, v_factor: what the kernel has to undo of V's transform (the reference does not look at it).
        bias: over [batch, q_len, num_q_heads, max_seq_len].
        terms: names of the registered options (:mod:`cute_kernels.formats.scores`) that it has.
        score_tensors: their tensors, by name.
        tail: of keys in blocks, None for others.
        num_splits: as given.
        out: where the result goes, contiguous [batch, q_len, num_q_heads, v.head_dim] in q's dtype; None for a new one.
    """

    q: torch.Tensor
    k: CacheOperand
    v: CacheOperand
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    num_kv_heads: int
    max_seq_len: int
    page_size: int
    num_blocks: int
    head_major: bool
    softmax_scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    bias: Bias | None
    num_splits: int | None
    out: torch.Tensor | None
    q_shift: torch.Tensor | None = None
    v_rotation: int = 1
    v_factor: bool = False
    terms: tuple[str, ...] = ()
    score_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tail: Tail | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def q_len(self) -> int:
        return self.q.shape[1]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        """Of q and K; V's is ``v.head_dim``."""
        return self.q.shape[3]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_len, self.num_q_heads, self.v.head_dim

    def first_seen(self, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [batch]: the first position that some query sees; a window hides what lies further back from all."""
        if self.window is None:
            return torch.zeros_like(lengths)
        return (lengths - self.q_len - self.window + 1).clamp(min=0)

    @property
    def features(self) -> Features:
        """What decides the compiled variant besides shapes and formats."""
        return Features(
            queries=self.q_len > 1,
            causal=self.causal and self.q_len > 1,
            window=self.window is not None,
            soft_cap=self.soft_cap is not None,
            sinks=self.sinks is not None,
            alibi=self.alibi_slopes is not None,
            shift=self.q_shift is not None,
            v_rotation=self.v_rotation,
            v_factor=self.v_factor,
            bias=checks.BIAS_DTYPES[self.bias.tensor.dtype] if self.bias is not None else None,
            terms=self.terms,
            paged=self.block_table is not None,
            head_major=self.head_major,
            tail=self.tail is not None,
        )


def make_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: object,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    q_shift: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    tail_slots: torch.Tensor | None = None,
    score_options: Mapping[str, torch.Tensor] | None = None,
) -> AttentionCall:
    """Checks everything that can be said without waiting for a device; arguments as `decode_attention` has them.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    forms = checks.check_formats(kv_format)
    checks.check_layout(cache_layout)
    needed = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
    optional = {
        "out": out,
        "block_table": block_table,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "q_shift": q_shift,
        "k_tail": k_tail,
        "tail_slots": tail_slots,
    }
    tensors = needed | {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        check_place(name, tensor, q.device)
    checks.check_query(q, forms)
    batch, q_len, num_q_heads, head_dim = q.shape
    blocks = _check_caches(q, k_cache, v_cache, forms, cache_layout == "HND", block_table)
    checks.check_key_rows(k_cache, forms[0], head_dim)
    v_head_dim = checks.check_value_rows(v_cache, forms[1])
    checks.check_readable("k_cache", forms[0], head_dim)
    checks.check_readable("v_cache", forms[1], v_head_dim)
    checks.check_blocks(forms, blocks.tokens if block_table is not None else None)
    check_vector("seq_lens", seq_lens, torch.int32, batch, "the batch of q")
    if sinks is not None:
        check_vector("sinks", sinks, torch.float32, num_q_heads, "one for each query head")
    if alibi_slopes is not None:
        check_vector("alibi_slopes", alibi_slopes, torch.float32, num_q_heads, "one for each query head")
    if q_shift is not None:
        checks.check_shift(q_shift, (batch, q_len, num_q_heads))
    check_optional_positive("softmax_scale", softmax_scale)
    check_optional_positive("softcap", softcap)
    check_flag("causal", causal)
    window = keys_seen(window_size) if isinstance(window_size, (tuple, list)) else window_size
    check_optional_count("window_size", window)
    check_optional_count("num_splits", num_splits, checks.MAX_SPLITS)
    if out is not None:
        checks.check_out(out, q, v_head_dim)
        check_contiguous("out", out)
        check_apart("out", out, {**{name: tensors[name] for name in tensors if name != "out"}, **(score_options or {})})
    max_seq_len = blocks.max_seq_len
    checks.check_tail(forms[0], k_tail, tail_slots, batch, (blocks.num_kv_heads, head_dim))
    numbers = (batch, q_len, num_q_heads, blocks.num_kv_heads, head_dim, max_seq_len)
    given = {} if score_options is None else score_options
    terms = check_given(given, q, dict(zip(SIZES, numbers, strict=True)))
    return AttentionCall(
        q=q,
        k=_operand("k_scale", k_cache, forms[0], head_dim, blocks, k_scale),
        v=_operand("v_scale", v_cache, forms[1], v_head_dim, blocks, v_scale),
        seq_lens=seq_lens,
        block_table=block_table,
        num_kv_heads=blocks.num_kv_heads,
        max_seq_len=max_seq_len,
        page_size=blocks.tokens,
        num_blocks=blocks.num_blocks,
        head_major=blocks.head_major,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        causal=causal or window is not None,
        window=window if window is not None and window < max_seq_len else None,
        soft_cap=None if softcap is None else float(softcap),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bias=None if attn_bias is None else _bias(attn_bias, (batch, q_len, num_q_heads, max_seq_len)),
        num_splits=num_splits,
        out=out,
        q_shift=q_shift,
        terms=terms,
        score_tensors=given,
        tail=None if k_tail is None or tail_slots is None else Tail(k_tail, tail_slots),
    )


def _bias(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> Bias:
    return Bias(bias, checks.check_bias(bias, shape))


@dataclass(frozen=True)
class _Blocks:
    """How the caches are cut: into pages, or into one block per request."""

    num_blocks: int
    tokens: int  # of a block
    num_kv_heads: int
    head_major: bool
    max_seq_len: int


def _check_caches(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    forms: tuple[KvFormat, KvFormat],
    head_major: bool,
    block_table: torch.Tensor | None,
) -> _Blocks:
    """What the two caches have in common; their rows are not looked at yet."""
    batch, num_q_heads = q.shape[0], q.shape[2]
    tokens_name = "max_seq_len" if block_table is None else "page_size"
    inner = f"num_kv_heads, {tokens_name}" if head_major else f"{tokens_name}, num_kv_heads"
    dimensions = f"[{'batch' if block_table is None else 'num_pages'}, {inner}, row]"
    for name, cache, form in (("k_cache", k_cache, forms[0]), ("v_cache", v_cache, forms[1])):
        checks.check_cache(name, cache, form, dimensions)
        if block_table is None and cache.shape[0] != batch:
            raise ValueError(f"{name}: got a batch of {cache.shape[0]}, want {batch}, that of q")
    num_blocks = k_cache.shape[0]
    num_kv_heads, tokens = (k_cache.shape[1], k_cache.shape[2]) if head_major else (k_cache.shape[2], k_cache.shape[1])
    if num_kv_heads == 0:
        raise ValueError("k_cache: got no KV heads, want at least 1")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {shape_of(v_cache)}, want that of k_cache, {shape_of(k_cache)}, in all but the last "
            "dimension"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(f"q: got {num_q_heads} query heads, want a multiple of the cache's {num_kv_heads} KV heads")
    max_seq_len = tokens
    if block_table is not None:
        checks.check_block_table(block_table, batch, num_blocks, tokens)
        max_seq_len = block_table.shape[1] * tokens
    name = "k_cache" if block_table is None else "block_table"
    if max_seq_len > checks.MAX_TOKENS:
        raise ValueError(f"{name}: got {max_seq_len} tokens a request, want at most {checks.MAX_TOKENS}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tokens * num_kv_heads * cache.shape[3] * cache.element_size() >= 2**40:
            raise ValueError(f"{name}: got {shape_of(cache)}, want less than 2**40 bytes a request")
    return _Blocks(num_blocks, tokens, num_kv_heads, head_major, max_seq_len)


def _operand(
    scale_name: str, cache: torch.Tensor, form: KvFormat, head_dim: int, blocks: _Blocks, scale: torch.Tensor | None
) -> CacheOperand:
    row = cache.shape[3] * cache.element_size()
    block_stride, outer_stride, inner_stride = (stride * cache.element_size() for stride in strides_of(cache)[:3])
    inner_touch = inner_stride == row
    outer_touch = inner_touch and outer_stride == cache.shape[2] * row
    token_stride, head_stride, tokens_touch, heads_touch = outer_stride, inner_stride, outer_touch, inner_touch
    if blocks.head_major:
        token_stride, head_stride, tokens_touch, heads_touch = inner_stride, outer_stride, inner_touch, outer_touch
    strides = checks.check_given_scale(scale_name, scale, form, blocks.num_kv_heads, head_dim)
    return CacheOperand(
        cache=cache,
        form=form,
        head_dim=head_dim,
        block_stride=block_stride,
        token_stride=token_stride,
        head_stride=head_stride,
        tokens_touch=tokens_touch,
        heads_touch=heads_touch,
        scale=None if scale is None or strides is None else GivenScale(scale, *strides),
    )


def check_device_values(call: AttentionCall) -> None:
    """Raises ValueError naming the request (and the position) of the first length or page that cannot be right.

    Looks at lengths and at the pages that hold a token which some query sees, so it waits for the device.
    """
    lengths = call.seq_lens.to(torch.int64).cpu()
    wrong = torch.nonzero((lengths < 0) | (lengths > call.max_seq_len))
    if wrong.numel():
        request = int(wrong[0])
        room = "the cache's tokens" if call.block_table is None else "the tokens of a row of block_table"
        raise ValueError(
            f"seq_lens: got {int(lengths[request])} for request {request}, want 0 to {call.max_seq_len}, {room}"
        )
    if call.tail is not None:
        slots, most = call.tail.slots.cpu(), call.tail.rows.shape[0]
        wrong = torch.nonzero((slots < 0) | (slots >= most))
        if wrong.numel():
            request = int(wrong[0])
            raise ValueError(f"tail_slots: got {int(slots[request])} for request {request}, want 0 to {most - 1}")
    if call.block_table is None:
        return
    table = call.block_table.cpu()
    first = torch.arange(table.shape[1]) * call.page_size  # token of each entry
    # From the first token that is seen in a page to behind the last one there.
    last = torch.minimum(first + call.page_size, lengths[:, None])
    used = torch.maximum(first, call.first_seen(lengths)[:, None]) < last
    wrong = torch.nonzero(used & ((table < 0) | (table >= call.num_blocks)))
    if wrong.numel():
        request, entry = wrong[0].tolist()
        raise ValueError(
            f"block_table: got page {int(table[request, entry])} for request {request} at position "
            f"{entry * call.page_size}, want 0 to {call.num_blocks - 1}, the cache's pages"
        )
