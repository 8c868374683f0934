"""Hugging Face transformers (5.x): an attention implementation and a KV cache that decode through `decode_attention`.

    import cute_kernels.integrations.transformers as integration

    integration.register()
    model = LlamaForCausalLM(config, ...)                      # any model with plain causal attention
    model.set_attn_implementation(integration.ATTENTION_NAME)
    cache = integration.DecodeCache("int4_g4", max_seq_len=8192)
    model(input_ids, past_key_values=cache)                    # prefill: exact, then quantised into the cache
    model(next_id, past_key_values=cache)                      # decode: reads the packed rows

`DecodeCache.update` does not return K and V but a handle to the packed rows, which only this attention implementation
understands. Prefill attends to the K and V it has just computed; only later tokens see the quantised ones. All
requests of a batch have the same length: padding in the attention mask is refused, as are dropout, sliding windows and
soft caps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

import cute_kernels
from cute_kernels.arguments import check_count
from cute_kernels.kv_formats import FORMATS, format_of

ATTENTION_NAME = "cute_kernels"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def register() -> None:
    """Makes `attn_implementation="cute_kernels"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, refuse_padding)


@dataclass(frozen=True)
class CachedTokens:
    """What attention needs of one layer's cache, passed where transformers passes K and V.

    k_rows, v_rows: [batch, max_seq_len, num_kv_heads, row] in `kv_format`; the first `length` tokens are written.
    seq_lens: int32 [batch], all equal to `length`. new_k, new_v: [batch, num_kv_heads, new tokens, head_dim], the
    tokens just added, before quantisation.
    """

    kv_format: Any  # a KvFormatName
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    seq_lens: torch.Tensor
    length: int
    new_k: torch.Tensor
    new_v: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: a DecodeCache hands out packed rows, not K and V; it works only with "
            f"attn_implementation={ATTENTION_NAME!r}"
        )

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, num_kv_heads, length, head_dim] of all tokens: older ones dequantised, new ones exact."""
        past = self.length - self.new_k.shape[2]
        if not past:
            return self.new_k, self.new_v
        form, head_dim = format_of(self.kv_format), self.new_k.shape[3]
        k, v = (
            torch.cat((form.dequantize(rows[:, :past], head_dim, new.dtype).transpose(1, 2), new), dim=2)
            for rows, new in ((self.k_rows, self.new_k), (self.v_rows, self.new_v))
        )
        return k, v


class DecodeCacheLayer(CacheLayerMixin):
    """One layer's K and V as packed rows, allocated once for `max_seq_len` tokens."""

    is_sliding = False
    is_compileable = False

    def __init__(self, kv_format: str, max_seq_len: int) -> None:
        super().__init__()
        self.form = format_of(kv_format)
        self.max_seq_len = max_seq_len
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the rows. key_states, value_states: [batch, num_kv_heads, tokens, head_dim], of one shape."""
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"value_states: got shape {tuple(value_states.shape)}, want key_states' {tuple(key_states.shape)}"
            )
        batch, num_kv_heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.form.cache_dtype.is_floating_point and self.form.cache_dtype != self.dtype:
            raise TypeError(f"kv_format: got {self.form.name!r}, want the format of the model's {self.dtype}")
        size = (batch, self.max_seq_len, num_kv_heads, self.form.row_elements(head_dim))
        self.keys = torch.zeros(size, dtype=self.form.cache_dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Appends tokens [batch, num_kv_heads, tokens, head_dim]; returns the handle twice, in place of K and V."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.max_seq_len:
            raise ValueError(f"key_states: got token {end}, want at most the cache's max_seq_len {self.max_seq_len}")
        assert self.keys is not None and self.values is not None
        new_rows = self._pack(torch.stack((key_states, value_states)).transpose(2, 3))
        self.keys[:, self.length : end], self.values[:, self.length : end] = new_rows
        self.length = end
        self.seq_lens.fill_(end)
        handle = CachedTokens(self.form.name, self.keys, self.values, self.seq_lens, end, key_states, value_states)
        return handle, handle

    def _pack(self, values: torch.Tensor) -> torch.Tensor:
        """[2, batch, tokens, num_kv_heads, head_dim] to rows; K and V together, which halves the launches."""
        return self.form.quantize(values)

    def reset(self) -> None:
        """Forgets all tokens, keeps the memory."""
        self.length = 0
        if self.is_initialized:
            self.seq_lens.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest `tokens_to_remove` tokens."""
        if not 0 <= tokens_to_remove <= self.length:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, want 0 to {self.length}")
        self.length -= tokens_to_remove
        if self.is_initialized:
            self.seq_lens.fill_(self.length)

    def get_seq_length(self) -> int:
        """Tokens of each request in the cache."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens of a request that there is room for."""
        return self.max_seq_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that ``query_length`` new tokens see, and at which one they begin: what transformers sizes a mask by."""
        return self.length + query_length, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that hold tokens (not of the whole allocation)."""
        if self.keys is None or not self.length:
            return 0
        return 2 * self.keys[:, : self.length].numel() * self.keys.element_size()


class DecodeCache(Cache):
    """A cache of `DecodeCacheLayer`s, as many as the model has layers.

    Args:
        kv_format: any whose scales, if it has some, are in its rows: the model's own dtype, "int4_g4" and other INT4
            formats, "e5m2", "int8_token_head", "e4m3_token_head", "int8_g4" and the like.
        max_seq_len: tokens that each request may reach; allocated on first use.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """

    def __init__(self, kv_format: str, max_seq_len: int) -> None:
        # Refused here, not in the first forward pass.
        if format_of(kv_format).given_scale:
            wanted = ", ".join(name for name, form in FORMATS.items() if not form.given_scale)
            raise ValueError(f"kv_format: got {kv_format!r}, which wants scales beside the cache, want one of {wanted}")
        check_count("max_seq_len", max_seq_len, 1)
        self.kv_format = kv_format
        self.max_seq_len = max_seq_len
        super().__init__(layer_class_to_replicate=self._make_layer)  # type: ignore[arg-type]

    def _make_layer(self) -> DecodeCacheLayer:
        return DecodeCacheLayer(self.kv_format, self.max_seq_len)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest `tokens_to_remove` tokens of every layer (what the name means in transformers changed)."""
        for layer in self.layers:
            assert isinstance(layer, DecodeCacheLayer)
            layer.crop(tokens_to_remove)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' rows that hold tokens."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, DecodeCacheLayer))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: CachedTokens | torch.Tensor,
    value: CachedTokens | torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. query: [batch, num_q_heads, q_len, head_dim]; returns
    [batch, q_len, num_q_heads, head_dim] and no weights.

    One query token with a `DecodeCache` goes through `decode_attention`. Everything else (prefill, no cache) is torch's
    SDPA, causal, the last query aligned with the last key. Raises ValueError for what neither does.
    """
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, want None: requests of equal length"
        )
    if dropout:
        raise ValueError(f"dropout: got {dropout}, want 0")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"{name}: got {options[name]!r}, want None: only plain causal attention is supported")
    if isinstance(key, CachedTokens) and query.shape[2] == 1:
        out = cute_kernels.decode_attention(
            query.transpose(1, 2).contiguous(),
            key.k_rows,
            key.v_rows,
            key.seq_lens,
            kv_format=key.kv_format,
            softmax_scale=scaling,
        )
        return out, None
    if isinstance(key, CachedTokens):
        key, value = key.dense()
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    return _causal_sdpa(query, key, value, scaling).transpose(1, 2).contiguous(), None


def _causal_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    q_len, kv_len = query.shape[2], key.shape[2]
    mask = None
    if q_len != kv_len:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def refuse_padding(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """transformers' mask function: no mask is needed, and one with padding is a ValueError rather than wrong output."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: got padding, want all ones: every request of the batch has the same length")
