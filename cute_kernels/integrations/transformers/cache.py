"""A KV cache of packed rows as a cache of transformers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, DynamicLayer

from cute_kernels.arguments import check_count
from cute_kernels.formats.kv import told_formats
from cute_kernels.integrations.transformers.cache_layer import Book, DecodeCacheLayer
from cute_kernels.integrations.transformers.cache_options import (
    LATENT_FORMATS,
    FormatOfLayers,
    Scales,
    Transforms,
    check_formats,
    constants_for,
)
from cute_kernels.integrations.transformers.columns import GRANULE, Columns
from cute_kernels.integrations.transformers.latents import LatentCacheLayer

_ZERO_IS_A_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
_POSITIVE_IS_A_LENGTH = Version(Version(transformers.__version__).base_version) < Version("5.18")
_Book = Book  # the name in saved caches


def tokens_to_forget(count: int, length: int) -> int:
    """Returns how many of ``length`` tokens `Cache.crop(count)` forgets in the installed release of transformers.

    A negative count is the number of tokens to forget. Up to 5.17 a positive count is the length to keep; from 5.18 on
    it is an error. Zero is the length to keep in releases that call the argument max_length.
    """
    count = operator.index(count)  # some releases give a tensor
    if count < -length:
        raise ValueError(f"tokens_to_remove: got {count}, want at most the cache's {length} tokens removed")
    if count < 0:
        return -count
    if count > 0 and not _POSITIVE_IS_A_LENGTH:
        raise ValueError(f"tokens_to_remove: got {count}, want a negative number: that many tokens are removed")
    return max(length - count, 0) if count or _ZERO_IS_A_LENGTH else 0


class DecodeCache(Cache):
    """A cache of packed rows for all layers of a model. Only `attn_implementation="cute_kernels"` can read it.

    Padding is not stored: a request's rows are its tokens. transformers counts columns, which include padding.
    `copy.deepcopy` and `torch.save` keep the tokens; `torch.load` then needs weights_only=False.

    Args:
        kv_format: a format's name, a pair (K's, V's), or a dict of these by the layer's number, -1 for all others:
            ``{0: "bf16", 1: "bf16", -1: "int4_g4"}``; or a file of these that `cute-kernels calibrate --budget`
            wrote. For latents: "mla_bf16", "mla_fp16" or "mla_fp8".
        max_seq_len: the largest number of columns of a request, for which memory is allocated on first use. None: no
            limit; the capacity grows by half.
        capacity: the number of columns at the beginning, without ``max_seq_len``.
        scales: for formats with a scale beside the cache: each layer's (K's, V's) as `append_kv` takes them; None for a
            format without a scale (see `calibrate`).
        kv_transform: the transform of K and V before they are written: transforms, or constants that `calibrate_cache`
            or `cute-kernels calibrate` found. The scales of constants are used if ``scales`` is None.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """

    def __init__(
        self,
        kv_format: FormatOfLayers,
        max_seq_len: int | None = None,
        *,
        capacity: int = GRANULE,
        scales: Scales | None = None,
        kv_transform: Transforms | None = None,
    ) -> None:
        kv_format = told_formats(kv_format)
        scales, transforms = constants_for(scales, kv_transform)
        check_formats(kv_format, scales, transforms)
        if max_seq_len is not None:
            check_count("max_seq_len", max_seq_len, 1)
        check_count("capacity", capacity, 1)
        self.kv_format = kv_format
        self.max_seq_len = max_seq_len
        self.book = Book(kv_format, max_seq_len, max_seq_len or capacity, scales, transforms)
        self._take_layers([])

    def _take_layers(self, layers: list[Any]) -> None:
        super().__init__(layer_class_to_replicate=cast("type[Any]", partial(_next_layer, self.book, layers)))
        self.layers = layers

    @classmethod
    def over(cls, layers: list[Any], book: Book) -> DecodeCache:
        """Makes an empty cache in the memory of another one that is no longer used. The other cache's recorded steps
        stay valid."""
        cache = cls.__new__(cls)
        cache.kv_format, cache.max_seq_len, cache.book = book.kv_format, book.max_seq_len, book
        cache._take_layers(layers)
        cache.reset()
        return cache

    @property
    def columns(self) -> Columns | None:
        """The state that the layers share; None before the first pass."""
        return self.book.columns

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        for layer in self._layers:
            layer.count = 0
        if self.columns is not None:
            self.columns.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest columns; -n forgets n of them, as in transformers (see `tokens_to_forget`)."""
        forgotten = tokens_to_forget(tokens_to_remove, 0 if self.columns is None else self.columns.count)
        if forgotten and self.columns is not None:
            self.columns.forget(forgotten)
            for layer in self._layers:
                layer.count -= forgotten

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives request b the tokens of request beam_idx[b]. Rows are copied without a new allocation."""
        self._select(lambda requests: requests[beam_idx.to(requests.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each request `repeats` times, side by side."""
        check_count("repeats", repeats, 1)
        self._select(lambda requests: requests.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some of the requests. indices: the requests' numbers, in their new order, or a boolean mask."""
        self._select(lambda requests: requests[torch.as_tensor(indices, device=requests.device)])

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises NotImplementedError for states other than K and V: of convolutions, recurrences and indexers."""
        layer = kwargs.get("layer_idx", next((one for one in args if isinstance(one, int)), "?"))
        raise NotImplementedError(
            f"past_key_values: layer {layer} caches another state than keys and values, of which a DecodeCache has "
            "no room; want one of transformers' caches for this model"
        )

    get_conv_state = get_recurrent_state = _refuse
    update_conv_state = update_recurrent_state = update_indexer = _refuse

    def advance(self) -> None:
        """Records that a replayed step has added one token to each request."""
        assert self.columns is not None
        self.columns.advance()
        for layer in self._layers:
            layer.count += 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the rows of all columns in the cache, in all layers."""
        return sum(layer.num_bytes for layer in self._layers)

    def _select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.columns is None:
            return
        self.columns.call_back()  # before rows move
        requests = choose(torch.arange(self.columns.batch, device=self.columns.seq_lens.device))
        for layer in self._layers:
            layer.take(requests)
        self.columns.select(requests)

    @property
    def _layers(self) -> list[DecodeCacheLayer]:
        return cast("list[DecodeCacheLayer]", self.layers)


def _next_layer(book: Book, layers: list[Any]) -> DecodeCacheLayer:
    """Makes the next layer. transformers asks for layers in order, as the first pass reaches them."""
    kind = LatentCacheLayer if book.kv_format in LATENT_FORMATS else DecodeCacheLayer
    return kind(book, len(layers))
