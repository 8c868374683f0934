"""transformers' attention function: which path a call takes.

| keys and values | call | path |
|---|---|---|
| tensors: no cache, or any of transformers' | plain or masked, causal or not, dropout | transformers' SDPA |
| | soft cap, sinks | the model's own eager function, which defines them |
| a `DecodeCache`'s handle | up to 16 queries, causal over all tokens, window, soft cap, sinks | `decode_attention` |
| | anything else | as tensors: older tokens dequantised, new ones exact |
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import cute_kernels
from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.integrations.transformers.handle import CachedTokens
from cute_kernels.integrations.transformers.masks import EVERYTHING, Pattern, additive, causal_mask, pattern_of

EAGER_OPTIONS = ("softcap", "s_aux", "sinks")
"""What SDPA does not compute and a model's own eager function does."""
REFUSED_OPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
"""Sequences packed side by side: SDPA would let them see each other."""
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
    """Attention as transformers' layers call it; the module's table says which path it takes.

    Args:
        module: the layer. Its ``is_causal`` (default True) holds where the argument is None.
        query: [batch, num_q_heads, q_len, head_dim].
        key, value: [batch, num_kv_heads, keys, head_dim], or a `DecodeCache`'s handle, given twice.
        attention_mask: as `make_mask` makes it, or any that broadcasts to [batch, num_q_heads, q_len, keys]: boolean
            (True is seen) or added to the scores. None: all keys, or causal; more than one query aligned with the
            first of the keys, as in SDPA, and with the last of a handle's.
        scaling: of the scores; default head_dim ** -0.5.
        dropout: probability.
        is_causal: see ``module``.
        options: ``softcap``, ``s_aux`` (sinks), ``position_bias`` are honoured. A ``sliding_window`` is in the mask
            already; without a mask it may not hide anything.

    Returns:
        [batch, q_len, num_q_heads, head_dim] and, from an eager function, the weights.

    Raises:
        ValueError: an option that neither path honours; the message names it.
    """
    for name in REFUSED_OPTIONS:
        if options.get(name) is not None:
            raise ValueError(f"{name}: got packed sequences, want None and one sequence for each row of the batch")
    if options.get("output_attentions"):
        raise ValueError("output_attentions: got True, want attn_implementation='eager', which keeps the weights")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if pattern_of(attention_mask) is EVERYTHING:
        attention_mask, causal = None, False
    if not isinstance(key, CachedTokens):
        assert isinstance(value, torch.Tensor)
        _check_window(options.get("sliding_window"), attention_mask, key.shape[2])
        return _dense(module, query, key, value, attention_mask, scaling, dropout, causal, options)
    if (out := _packed(query, key, attention_mask, scaling, dropout, causal, options)) is not None:
        return out, None
    k, v = key.dense()
    q_len, keys = query.shape[2], k.shape[2]
    if attention_mask is None and causal and 1 < q_len < keys:
        attention_mask = causal_mask(q_len, keys, query.device)
    return _dense(module, query, k, v, attention_mask, scaling, dropout, causal, options)


def _packed(
    query: torch.Tensor,
    tokens: CachedTokens,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """`decode_attention` over the packed rows, None for a call that it does not compute."""
    pattern = pattern_of(mask) if mask is not None else Pattern(causal=causal)
    q_len = query.shape[2]
    if pattern is None or dropout or q_len > MAX_Q_LEN:
        return None
    if mask is not None and tuple(mask.shape[2:]) != (q_len, tokens.length):
        return None
    if q_len > 1 and q_len == tokens.length:  # prefill attends to exact keys and values
        return None
    if options.get("position_bias") is not None or options.get("sinks") is not None:
        return None
    window = pattern.window
    if mask is None and options.get("sliding_window") is not None:
        window = options["sliding_window"]
    sinks = options.get("s_aux")
    return cute_kernels.decode_attention(
        query.transpose(1, 2).contiguous(),
        tokens.k_rows,
        tokens.v_rows,
        tokens.seq_lens,
        kv_format=tokens.kv_format,
        softmax_scale=scaling,
        causal=pattern.causal,
        window_size=window,
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.float().reshape(-1),
    )


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
    """Attention over K and V as tensors."""
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
