"""A KV cache of packed rows, in transformers' terms."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from cute_kernels.arguments import check_count
from cute_kernels.integrations.transformers.handle import CachedTokens
from cute_kernels.kv_formats import FORMATS, format_of

_ZERO_IS_A_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
_POSITIVE_IS_A_LENGTH = Version(Version(transformers.__version__).base_version) < Version("5.18")


def tokens_to_forget(count: int, length: int) -> int:
    """How many of ``length`` tokens `Cache.crop(count)` forgets in the installed release of transformers.

    A negative count is tokens to forget. A positive one is the length to keep until 5.17, an error from 5.18 on; zero
    is a length as well where the argument is called max_length.
    """
    count = operator.index(count)  # some releases give a tensor
    if count < -length:
        raise ValueError(f"tokens_to_remove: got {count}, want at most the cache's {length} tokens removed")
    if count < 0:
        return -count
    if count > 0 and not _POSITIVE_IS_A_LENGTH:
        raise ValueError(f"tokens_to_remove: got {count}, want a negative number: that many tokens are removed")
    return max(length - count, 0) if count or _ZERO_IS_A_LENGTH else 0


class DecodeCacheLayer(CacheLayerMixin):
    """One layer's K and V as packed rows, allocated once for `max_seq_len` tokens."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, kv_format: str, max_seq_len: int) -> None:
        super().__init__()
        self.form = format_of(kv_format)
        self.max_seq_len = max_seq_len
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the rows. key_states, value_states: [batch, num_kv_heads, tokens, head_dim]; V may have another
        head_dim."""
        batch, num_kv_heads, _, _ = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.form.cache_dtype.is_floating_point and self.form.cache_dtype != self.dtype:
            raise TypeError(f"kv_format: got {self.form.name!r}, want the format of the model's {self.dtype}")
        self.keys, self.values = (
            torch.zeros(
                (batch, self.max_seq_len, num_kv_heads, self.form.row_elements(states.shape[3])),
                dtype=self.form.cache_dtype,
                device=self.device,
            )
            for states in (key_states, value_states)
        )
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
        for rows, states in ((self.keys, key_states), (self.values, value_states)):
            rows[:, self.length : end] = self._pack(states.transpose(1, 2))
        self.length = end
        self.seq_lens.fill_(end)
        handle = CachedTokens(self.form.name, self.keys, self.values, self.seq_lens, end, key_states, value_states)
        return handle, handle

    def _pack(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, num_kv_heads, head_dim] to rows."""
        return self.form.quantize(values)

    def reset(self) -> None:
        """Forgets all tokens, keeps the memory."""
        self.length = 0
        if self.is_initialized:
            self.seq_lens.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens: -n for n of them, as transformers calls it (see `tokens_to_forget`)."""
        self.length -= tokens_to_forget(tokens_to_remove, self.length)
        if self.is_initialized:
            self.seq_lens.fill_(self.length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Request b becomes what request beam_idx[b] was; the rows are copied within the allocation."""
        if self.length:
            assert self.keys is not None and self.values is not None
            for rows in (self.keys, self.values):
                rows[:, : self.length] = rows[:, : self.length].index_select(0, beam_idx.to(rows.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each request `repeats` times, side by side."""
        check_count("repeats", repeats, 1)
        if self.is_initialized:
            self._take(torch.arange(self.seq_lens.shape[0], device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the requests that ``indices`` names, a tensor of numbers or a boolean mask, in its order."""
        if self.is_initialized:
            requests = torch.arange(self.seq_lens.shape[0], device=self.device)
            self._take(requests[torch.as_tensor(indices, device=self.device)])

    def _take(self, requests: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys.index_select(0, requests), self.values.index_select(0, requests)
        self.seq_lens = self.seq_lens.index_select(0, requests)

    def offload(self) -> None:
        """Refused: the rows are read by kernels on their own device."""
        raise NotImplementedError("offload: a DecodeCache stays on its device; want one of transformers' caches")

    prefetch = offload

    def get_seq_length(self) -> int:
        """Tokens of each request in the cache."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens of a request that there is room for."""
        return self.max_seq_len

    def get_max_cache_shape(self) -> int:
        """`get_max_length` as older releases call it."""
        return self.max_seq_len

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Keys that ``query_length`` new tokens see, and at which one they begin: what transformers sizes a mask by.
        Older releases give the new tokens' positions instead of their number."""
        count = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.length + count, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that hold tokens (not of the whole allocation)."""
        if self.keys is None or self.values is None or not self.length:
            return 0
        return sum(rows[:, : self.length].numel() * rows.element_size() for rows in (self.keys, self.values))


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

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' rows that hold tokens."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, DecodeCacheLayer))
