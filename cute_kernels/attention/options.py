"""The options of attention's calls. Each is written once, with its default, in the syntax of torch's schemas."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from cute_kernels.attention.checks import MAX_TOKENS
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.names import CacheLayout, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack

OF_BOTH = (
    "Tensor? block_table=None, str cache_layout='NHD', Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, "
    "int? window_size=None, float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None"
)
OF_BIAS = "Tensor? attn_bias=None"
OF_DECODE = "Tensor? q_shift=None, Tensor? k_tail=None, Tensor? tail_slots=None"
OF_EXTEND = (
    "Tensor? new_k=None, Tensor? new_v=None, Tensor? tree_mask=None, int sm_margin=0, bool? unpack=None, "
    "int? max_seq_len=None, bool fp8_products=False"
)
OF_SCORES = "str score_names='', Tensor[]? score_tensors=None"
OF_BLOCKS = "Tensor? block_list=None, Tensor? block_counts=None, int? block_tokens=None"
OF_NUMBERS = "float? softmax_scale=None, int? num_splits=None"


def defaults_of(*schemas: str) -> dict[str, Any]:
    """Returns the options in ``schemas`` with their defaults, in order."""
    arguments = [argument.split()[1].split("=") for schema in schemas for argument in schema.split(", ")]
    return {name: ast.literal_eval(default) for name, default in arguments}


NO_OPTIONS = cast("CallOptions", defaults_of(OF_BOTH, OF_BIAS, OF_DECODE))
"""The defaults of decode attention's options. Every complete set of options has this order. In calls that have
``score_options`` or `OF_BLOCKS`, these come last."""

NO_EXTEND_OPTIONS = defaults_of(OF_BOTH, OF_EXTEND)
"""The defaults of extend attention's options."""


OPTIONS = {**NO_OPTIONS, "score_options": None, **defaults_of(OF_BLOCKS)}
"""Every option of decode attention, with its default."""

TENSORS = tuple(re.findall(r"Tensor\? (\w+)", f"{OF_BOTH}, {OF_BIAS}, {OF_DECODE}, {OF_BLOCKS}"))
"""Names of the options of decode attention that are tensors."""


class CallNumbers(TypedDict, total=False):
    """The arguments of every call of attention besides its options; :func:`cute_kernels.attention.decode_attention`
    documents each."""

    softmax_scale: float | None
    num_splits: int | None
    out: torch.Tensor | None


class MaskOptions(TypedDict, total=False):
    """Options that all calls of attention have; :func:`cute_kernels.attention.decode_attention` documents each."""

    causal: bool
    window_size: WindowSize | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


class AttentionOptions(MaskOptions, total=False):
    """Options of calls whose caches are given as tensors."""

    block_table: torch.Tensor | None
    cache_layout: CacheLayout
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class BlockOptions(TypedDict, total=False):
    """Options of chosen blocks; :func:`cute_kernels.attention.decode_attention` documents each."""

    block_list: torch.Tensor | None
    block_counts: torch.Tensor | None
    block_tokens: int | None


class ScoreOptions(AttentionOptions, total=False):
    """`AttentionOptions` and an additive bias; :func:`cute_kernels.attention.decode_attention` documents each."""

    attn_bias: torch.Tensor | None


class CallOptions(ScoreOptions, BlockOptions, total=False):
    """All options of decode attention; :func:`cute_kernels.attention.decode_attention` documents each."""

    q_shift: torch.Tensor | None
    k_tail: torch.Tensor | None
    tail_slots: torch.Tensor | None
    score_options: Mapping[str, torch.Tensor] | None


class AppendedOptions(AttentionOptions, CallNumbers, total=False):
    """Options that `extend_attention` and `append_and_extend` share: all options of `extend_attention` but new_k, new_v
    and chosen blocks. :func:`cute_kernels.attention.extend_attention` documents each."""

    transform: CacheTransform | None
    tree_mask: torch.Tensor | None
    sm_margin: int
    unpack: bool | None
    fp8_products: bool
    max_seq_len: int | None
    score_options: Mapping[str, torch.Tensor] | None


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
    """Returns the complete options of decode attention; None if all have their defaults, as in most calls."""
    plain = block_table is k_scale is v_scale is window_size is softcap is sinks is alibi_slopes is attn_bias is None
    if plain and q_shift is k_tail is tail_slots is None and causal is True and cache_layout == "NHD":
        return None
    return {
        "block_table": block_table,
        "cache_layout": cache_layout,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "causal": causal,
        "window_size": None if window_size is None else keys_seen(window_size),
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "q_shift": q_shift,
        "k_tail": k_tail,
        "tail_slots": tail_slots,
    }


def with_more(options: CallOptions | None, **more: Unpack[CallOptions]) -> CallOptions:
    """Returns ``options`` (None: the defaults) with the additional options ``more``: registered options or chosen
    blocks.
    """
    return cast(CallOptions, {**(options or NO_OPTIONS), **more})


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every option of a call of decode attention, with defaults for options that are not given. Raises
    TypeError for an unknown option."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{name}: got it as an option of attention, want one of {', '.join(OPTIONS)}")
    return {**OPTIONS, **options}


def keys_seen(window: WindowSize | None) -> int | None:
    """Returns the number of keys that a query sees through a window, its own key included; None for all keys. The
    number is at most `MAX_TOKENS`.

    window: the number itself, or FlashAttention's pair (left, right), in which -1 stands for no bound. A window hides
    the keys after the query's own, so right has to be 0.
    """
    if not isinstance(window, (tuple, list)):
        return min(window, MAX_TOKENS) if type(window) is int else window
    numbers = len(window) == 2 and all(isinstance(side, int) and not isinstance(side, bool) for side in window)
    if not numbers or window[0] < -1 or window[1] != (-1 if window[0] == -1 == window[1] else 0):
        raise ValueError(
            f"window_size: got {window!r}, want the number of keys that a query sees, or (left, 0): so many "
            "before its own, -1 for all of them"
        )
    if window[1] == -1:
        return None
    return MAX_TOKENS if window[0] == -1 else min(window[0] + 1, MAX_TOKENS)
