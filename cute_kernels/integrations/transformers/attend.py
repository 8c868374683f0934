"""transformers' attention function. It chooses the path on which a call is computed.

| keys and values | call, and options that it may have | path |
|---|---|---|
| tensors: no cache, or any of transformers' | plain or masked, causal or not, dropout | transformers' SDPA |
| | soft cap, sinks | the model's own eager function, which defines them |
| a `DecodeCache`'s handle | up to 16 queries; padding, window, soft cap, sinks, any mask | `append_and_decode` |
| | more queries, or padding among them; causal, window, soft cap, sinks | `extend_attention`, or SDPA: see below |
| | anything else | as tensors: older tokens dequantised, new ones exact |
| a handle of latents | up to 16 queries; padding | `mla_decode` |
| | anything else | as tensors, of latents expanded |

In a first turn the cache has no tokens yet. A first turn without mask, soft cap and sinks takes SDPA. In
`extend_attention` a first turn attends to the exact keys and values that it has just computed. A later turn attends to
the packed rows, which include its own new tokens. For `extend_attention` padding is removed first: queries and keys are
only tokens, one request after the other.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.extend_policies import EXTEND_HEAD_DIMS, cannot_read
from cute_kernels.formats.kv import format_of
from cute_kernels.gemm.gradient import differentiable
from cute_kernels.integrations.transformers.cache_layer import CachedTokens, token_major
from cute_kernels.integrations.transformers.columns import UNKNOWN, Columns
from cute_kernels.integrations.transformers.masks import EVERYTHING, Pattern, additive, causal_mask, pattern_of

EAGER_OPTIONS = ("softcap", "s_aux", "sinks")
"""Options that SDPA does not compute; a model's own eager function does."""
REFUSED_OPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
"""Options of sequences packed into one row, which are refused: SDPA would let the sequences see each other."""
_DENSE_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SDPA_OPTIONS = inspect.signature(sdpa_attention_forward).parameters


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: CachedTokens | torch.Tensor,
    value: CachedTokens | torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention as transformers' layers call it; the module's table says which path it takes.

    Args:
        module: the layer. Its ``is_causal`` (default True) is used if the argument is None.
        query: [batch, num_q_heads, q_len, head_dim].
        key, value: [batch, num_kv_heads, keys, head_dim], or a `DecodeCache`'s handle, given twice.
        attention_mask: a result of `make_mask`, or any mask that broadcasts to [batch, num_q_heads, q_len, keys]:
            boolean (True is seen) or added to the scores. None: all keys, or causal. Several causal queries are aligned
            with the first keys of a tensor, as in SDPA, and with the last keys of a handle.
        scaling: the factor of the scores; default head_dim ** -0.5.
        dropout: the probability of dropout.
        is_causal: see ``module``.
        options: ``softcap``, ``s_aux`` (sinks) and ``position_bias`` are supported. A mask includes the
            ``sliding_window``. Without a mask, there must be no more keys in tensors than the window has.

    Returns:
        The output [batch, q_len, num_q_heads, head_dim], and the attention weights of an eager function, else None.

    Raises:
        TypeError, ValueError: a mask of integers, or an option that no path supports; the message names it.
    """
    for name in REFUSED_OPTIONS:
        if options.get(name) is not None:
            raise ValueError(f"{name}: got packed sequences, want None and one sequence for each row of the batch")
    if options.get("output_attentions"):
        raise ValueError("output_attentions: got True, want attn_implementation='eager', which keeps the weights")
    if attention_mask is not None and not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
        raise TypeError(
            f"attention_mask: got {attention_mask.dtype} {list(attention_mask.shape)}, want bool, True where a key is "
            "seen, or a floating one, which is added to the scores"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if pattern_of(attention_mask) is EVERYTHING:
        attention_mask, causal = None, False
    if not isinstance(key, CachedTokens):
        assert isinstance(value, torch.Tensor)
        _check_window(options.get("sliding_window"), attention_mask, key.shape[2])
        return _dense(module, query, key, value, attention_mask, scaling, dropout, causal, options)
    pattern = pattern_of(attention_mask) if attention_mask is not None else Pattern(causal=causal)
    key.settle(pattern.padding if pattern is not None else UNKNOWN)
    asked = None if dropout else _asked(key, attention_mask, pattern, scaling, options)
    if asked is not None and _attends(key, asked):
        return _without_gradient(lambda q: key.attend(q, **asked), query), None
    query = key.rotated(query)
    if asked is not None and _extends(key, attention_mask, asked):
        asked.pop("attn_bias")
        return _without_gradient(lambda q: _extend(key, q, **asked), query), None
    k, v = key.dense()
    key.append()
    q_len, keys = query.shape[2], k.shape[2]
    if attention_mask is None and causal and 1 < q_len < keys:
        attention_mask = causal_mask(q_len, keys, query.device)
    return _dense(module, query, k, v, attention_mask, scaling, dropout, causal, options)


def _without_gradient(function: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> torch.Tensor:
    """Returns function(query). The backward pass of the result raises an error.

    Kernels over a cache have no backward pass. Without the error, their gradients would be missing without notice.
    """
    if torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling():
        return differentiable(function, _refuse_gradients, query)
    return function(query)


def _refuse_gradients(_: torch.Tensor) -> NoReturn:
    raise NotImplementedError("query: got one that wants a gradient, which attention over a DecodeCache has not")


def _asked(
    tokens: CachedTokens,
    mask: torch.Tensor | None,
    pattern: Pattern | None,
    scaling: float | None,
    options: dict[str, Any],
) -> dict[str, Any] | None:
    """Returns the kernels' arguments for a call over the packed rows; None for a call that no kernel computes."""
    columns = tokens.columns
    if options.get("sinks") is not None or (pattern is not None and not columns.is_told(pattern.padding)):
        return None
    is_known = pattern is not None and pattern.is_known
    window = options.get("sliding_window") if mask is None else pattern.window if pattern is not None else None
    if window is not None and not columns.is_left:  # distances between tokens are not those between columns
        return None
    sinks = options.get("s_aux")
    return {
        "softmax_scale": scaling,
        "causal": pattern.causal if pattern is not None and is_known else False,  # any other mask says it all
        "window_size": window,
        "softcap": options.get("softcap"),
        "sinks": None if sinks is None else sinks.float().reshape(-1),
        "attn_bias": _bias(options.get("position_bias"), None if is_known else mask, columns),
    }


def _is_first_turn(tokens: CachedTokens) -> bool:
    """Returns whether a call is a first turn: it has several new columns, and the cache has no older ones. Such a call
    attends to exact keys and values."""
    return tokens.new == tokens.columns.count and tokens.new > 1


def _attends(tokens: CachedTokens, asked: dict[str, Any]) -> bool:
    """Returns whether `append_and_decode` computes a call."""
    return tokens.can_attend and not _is_first_turn(tokens) and tokens.serves(asked)


def _extends(tokens: CachedTokens, mask: torch.Tensor | None, asked: dict[str, Any]) -> bool:
    """Returns whether `extend_attention` computes a call; a plain first turn goes to SDPA."""
    is_plain = _is_first_turn(tokens) and mask is None and asked["softcap"] is None and asked["sinks"] is None
    return not is_plain and asked["attn_bias"] is None and _can_extend(tokens, asked["softcap"])


_IMPOSSIBLE = torch.empty(0)
"""Stands for a bias that no kernel supports: it has a value for each column, but the cache has no rows for padding."""


def _bias(bias: torch.Tensor | None, mask: torch.Tensor | None, columns: Columns) -> torch.Tensor | None:
    """Returns the additive bias of the scores for the kernels, fp32 [batch, q_len, heads, capacity]. Returns None if
    there is no bias, and `_IMPOSSIBLE` if kernels do not support it.
    """
    if mask is not None:
        added = additive(mask, torch.float32 if bias is None else bias.dtype)
        bias = added if bias is None else bias + added
    if bias is None:
        return None
    if not columns.all_tokens or bias.dim() != 4:
        return _IMPOSSIBLE
    return F.pad(bias.float(), (0, columns.capacity - bias.shape[3]), value=-math.inf).transpose(1, 2)


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention over K and V as tensors: by transformers' SDPA, or by the model's eager function if the call
    has options that SDPA lacks."""
    eager = [name for name in EAGER_OPTIONS if options.get(name) is not None]
    if options.get("position_bias") is not None and "position_bias" not in _SDPA_OPTIONS:
        eager.append("position_bias")
    if not eager:
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, is_causal=causal, **options
        )
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(f"{eager[0]}: got a value from {type(module).__name__}, which defines no eager attention")
    q_len, keys = query.shape[2], key.shape[2]
    if mask is None and causal and q_len > 1:
        key, value = key[:, :, :q_len], value[:, :, :q_len]
        mask = causal_mask(q_len, min(q_len, keys), query.device)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    added = additive(mask, query.dtype)
    return function(module, query, key, value, added, scaling=scaling, dropout=dropout, **options)


def _check_window(window: int | None, mask: torch.Tensor | None, keys: int) -> None:
    if window is not None and mask is None and keys > window:
        raise ValueError(
            f"sliding_window: got {window} without a mask over {keys} keys, want attention_mask: which keys a query's "
            "window holds depends on its position"
        )


# -- many new columns, or padding among them ---------------------------------------------------------------------------


def _can_extend(tokens: CachedTokens, softcap: float | None) -> bool:
    """Returns whether `extend_attention` can read the cache and the new tokens of a turn."""
    transform = tokens.layer.transform
    if softcap is not None and transform is not None and transform.k_center is not None:
        return False
    head_dim = tokens.new_k.shape[3]
    if (
        head_dim not in EXTEND_HEAD_DIMS
        or tokens.new_v.shape[3] != head_dim
        or tokens.new_k.dtype not in _DENSE_FORMATS
    ):
        return False
    return not any(cannot_read(format_of(name)) for name in tokens.layer.formats)


def _extend(tokens: CachedTokens, query: torch.Tensor, **options: Any) -> torch.Tensor:
    """Appends all new columns and computes `extend_attention` over them.

    query: [batch, num_q_heads, new columns, head_dim]. Returns [batch, new columns, num_q_heads, head_dim], 0 for
    padding.
    """
    columns, is_first = tokens.columns, tokens.new == tokens.columns.count
    fresh = columns.fresh
    if is_first:
        operands = _new_as_cache(tokens, fresh)
    else:
        operands = tokens.layer.operands()
    tokens.append()
    q = token_major(query)
    counts = torch.full((columns.batch,), tokens.new, device=q.device) if fresh is None else fresh.sum(1)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    packed = q.flatten(0, 1) if fresh is None else q[fresh]
    out = extend_attention(packed.contiguous(), seq_lens=columns.seq_lens, cu_seqlens_q=ends, **operands, **options)
    if fresh is None:
        return out.view(q.shape)
    return q.new_zeros(q.shape).masked_scatter_(fresh[:, :, None, None], out)


def _new_as_cache(tokens: CachedTokens, fresh: torch.Tensor | None) -> dict[str, Any]:
    """Returns the new keys and values as a contiguous cache in their dtype. In it, each request's tokens come before
    its padding.
    """
    k, v = token_major(tokens.new_k).contiguous(), token_major(tokens.new_v).contiguous()
    if fresh is not None:
        order = (~fresh).to(torch.uint8).argsort(dim=1, stable=True)[:, :, None, None]
        k, v = (x.gather(1, order.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    return {"k_cache": k, "v_cache": v, "kv_format": _DENSE_FORMATS[k.dtype]}
