"""A KV cache of packed rows as a cache of transformers."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from cute_kernels.arguments import check_count
from cute_kernels.formats.kv import format_of, told_formats
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.transformers.cache_options import (
    FormatOfLayers,
    Scales,
    Transforms,
    check_formats,
    constants_for,
    formats_of_layer,
)
from cute_kernels.integrations.transformers.columns import GRANULE, Columns
from cute_kernels.integrations.transformers.handle import CachedTokens, why_not
from cute_kernels.integrations.transformers.latents import (
    LATENT_FORMATS,
    ROPE_DIM,
    V_DIM,
    CachedLatents,
)
from cute_kernels.mla.formats import FORMATS as MLA_FORMATS

_ZERO_IS_A_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
_POSITIVE_IS_A_LENGTH = Version(Version(transformers.__version__).base_version) < Version("5.18")


def tokens_to_forget(count: int, length: int) -> int:
    """Returns how many of ``length`` tokens `Cache.crop(count)` forgets in the installed release of transformers.

    A negative count is the number of tokens to forget. A positive one is the length to keep until 5.17, and an error
    from 5.18 on. Zero is a length to keep in releases whose argument is called max_length.
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
    """One layer's K and V as packed rows [batch, num_kv_heads, capacity, row]; see `DecodeCache`.

    A head's tokens are adjacent, so a CTA of attention reads one head instead of all heads. A small batch then occupies
    more CTAs.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    handle_type = CachedTokens
    stored = ("k_rows", "v_rows")
    k_rows: torch.Tensor
    v_rows: torch.Tensor

    def __init__(self, book: _Book, index: int) -> None:
        super().__init__()
        self.book = book
        self.formats = formats_of_layer(book.kv_format, index)
        self.scales = book.scales_of(index)
        self.transform = book.transform_of(index)
        self.index = index
        self.count = 0

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the rows. key_states, value_states: [batch, num_kv_heads, tokens, head_dim]; V may have another
        head_dim."""
        self.dtype, self.device = key_states.dtype, key_states.device
        for name in self.formats:
            form = format_of(name)
            if not form.fits(self.dtype):
                raise TypeError(f"kv_format: got {name!r}, want the format of the model's {self.dtype}")
        self._place_constants(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        columns = self.book.columns_for(key_states.shape[0], key_states.shape[2], self.device)
        self.k_rows, self.v_rows = (
            torch.zeros(
                (columns.batch, states.shape[1], columns.capacity, form.row_elements(states.shape[3])),
                dtype=form.cache_dtype,
                device=self.device,
            )
            for states, form in zip((key_states, value_states), map(format_of, self.formats), strict=True)
        )
        self.is_initialized = True

    def _place_constants(self, num_kv_heads: int, head_dim: int, v_head_dim: int) -> None:
        """Moves scales and transform to the layer's device. A transform of other sizes is a ValueError, which names the
        layer."""
        k_scale, v_scale = self.scales
        self.scales = tuple(None if scale is None else scale.to(self.device) for scale in (k_scale, v_scale))
        if self.transform is None:
            return
        try:
            self.transform.validate(num_kv_heads, head_dim, v_head_dim)
        except ValueError as error:
            raise ValueError(f"kv_transform: layer {self.index}: {error}") from error
        self.transform = self.transform.to(self.device)

    @property
    def columns(self) -> Columns:
        """The columns that all layers share."""
        assert self.book.columns is not None
        return self.book.columns

    def _keys(self) -> Any:
        raise AttributeError(f"keys: {why_not()}")

    def _is_unset(self, value: object) -> None:
        assert value is None  # what transformers' own `__init__` sets

    # What reads them past `update` would take packed rows for K and V.
    keys = values = cast("torch.Tensor", property(_keys, _is_unset))

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The packed rows of K and V, or of latents."""
        return tuple(getattr(self, name) for name in self.stored)

    def operands(self) -> dict[str, Any]:
        """Returns the cache's arguments of kernel calls."""
        (k, v), (k_scale, v_scale) = self.rows, self.scales
        known = {"k_cache": k, "v_cache": v, "kv_format": self.formats, "k_scale": k_scale, "v_scale": v_scale}
        known["cache_layout"] = "HND"
        return known if self.transform is None else known | {"transform": self.transform}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Takes new tokens [batch, num_kv_heads, tokens, head_dim]. Returns a handle twice, in place of K and V.

        Raises ValueError, with nothing changed, for more tokens than the cache may hold.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns, new = self.columns, key_states.shape[2]
        if key_states.shape[0] != columns.batch:
            raise ValueError(f"key_states: got a batch of {key_states.shape[0]}, want {columns.batch}, the cache's")
        if columns.static:
            if self.book.is_first(self):
                columns.begin(new)
        else:
            if self.count != columns.count and new != columns.new:
                raise ValueError(
                    f"key_states: got {new} tokens for layer {self.index} in a pass over {columns.new}, want as many: "
                    "a DecodeCache has no room for cross-attention"
                )
            if self.count == columns.count:  # no layer of this pass has been here before
                self.book.make_room(columns.count + new)
                self.book.first = weakref.ref(self)
                columns.begin(new)
            self.count += new
            self._grow()
        handle = self.handle_type(self, columns, key_states, value_states)
        return handle, handle

    def _grow(self) -> None:
        """Grows the layer to the capacity of the other layers."""
        for name, rows in zip(self.stored, self.rows, strict=True):
            if rows.shape[-2] < self.columns.capacity:
                setattr(self, name, _widened(rows, self.columns.capacity))

    @torch.inference_mode(False)
    def take(self, requests: torch.Tensor) -> None:
        """Gives request b the rows of request requests[b]. The copy stays within the allocation if the batch size
        stays."""
        if not self.is_initialized:
            return
        for name, rows in zip(self.stored, self.rows, strict=True):
            if len(requests) == rows.shape[0]:
                rows[..., : self.count, :] = rows[..., : self.count, :].index_select(0, requests)
            else:
                setattr(self, name, rows.index_select(0, requests))

    @torch.inference_mode(False)
    def keep(self, rows: torch.Tensor) -> None:
        """Moves the rows that ``rows`` [batch, rows] names to the front of each request."""
        for own in self.rows:
            first = own[..., : rows.shape[1], :].view(torch.uint8)
            index = rows.view(rows.shape[0], *[1] * (first.dim() - 3), rows.shape[1], 1)
            first.copy_(first.take_along_dim(index, dim=-2))

    def get_seq_length(self) -> Any:
        """Returns the number of cached columns; a device tensor while a step is recorded."""
        if self.is_initialized and self.columns.static:
            return self.columns.before
        return self.count

    def get_max_length(self) -> int:
        """Returns the most columns that fit; -1 for no limit."""
        return -1 if self.book.max_seq_len is None else self.book.max_seq_len

    get_max_cache_shape = get_max_length  # as older releases call it

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Returns (number of keys that ``query_length`` new tokens see, first key), by which transformers sizes a mask.

        Older releases pass the new tokens' positions instead of their number.
        """
        if self.is_initialized and self.columns.static:
            return self.columns.capacity, 0
        count = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.count + count, 0

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for `pickle` and `copy`, with rows of existing columns only. The capacity grows again with
        new tokens."""
        rows = {name: x[..., : self.count, :].clone() for name, x in vars(self).items() if name in self.stored}
        return vars(self) | rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.is_initialized:
            self.device = self.rows[0].device  # which `torch.load` may choose

    def offload(self) -> None:
        """Raises NotImplementedError, since kernels read the rows on their own device."""
        raise NotImplementedError("offload: a DecodeCache stays on its device; want one of transformers' caches")

    prefetch = offload

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of existing columns (not of the whole allocation)."""
        if not self.is_initialized:
            return 0
        return sum(rows[..., : self.count, :].numel() * rows.element_size() for rows in self.rows)


class LatentCacheLayer(DecodeCacheLayer):
    """One layer's latents as packed tokens [batch, capacity, row]; see `latents`."""

    handle_type = CachedLatents
    stored = ("k_rows",)

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the rows.

        key_states: latents [batch, 1, tokens, 512]. value_states: rotated keys [batch, 1, tokens, 64].
        """
        form = MLA_FORMATS[self.formats[0]]
        wanted = {"latents": (key_states, V_DIM), "rotated keys": (value_states, ROPE_DIM)}
        for what, (states, columns) in wanted.items():
            if (states.shape[1], states.shape[3]) != (1, columns):
                found = f"{states.shape[1]} heads of {states.shape[3]} columns"
                raise ValueError(f"kv_format: got {self.formats[0]!r} for {found}, want one head of {columns}: {what}")
        if form.q_dtype != key_states.dtype:
            raise TypeError(f"kv_format: got {self.formats[0]!r}, want the format of the model's {key_states.dtype}")
        self.dtype, self.device = key_states.dtype, key_states.device
        columns = self.book.columns_for(key_states.shape[0], key_states.shape[2], self.device)
        shape = (columns.batch, columns.capacity, form.row_elements(V_DIM + ROPE_DIM))
        self.k_rows = torch.zeros(shape, dtype=form.cache_dtypes[0], device=self.device)
        self._block_table: torch.Tensor | None = None
        self.is_initialized = True

    @property
    def block_table(self) -> torch.Tensor:
        """int32 [batch, 1]: each request's rows are one page."""
        batch = self.rows[0].shape[0]
        if self._block_table is None or len(self._block_table) != batch:
            self._block_table = torch.arange(batch, dtype=torch.int32, device=self.device)[:, None]
        return self._block_table


@dataclass(eq=False)
class _Book:
    """The state that a cache's layers share. It refers to no layer or cache, so that these are freed once nobody uses
    them."""

    kv_format: object
    max_seq_len: int | None
    capacity: int
    scales: Scales | None
    transforms: CacheTransform | Sequence[CacheTransform | None] | None
    columns: Columns | None = None
    first: weakref.ref[DecodeCacheLayer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"first": None}  # for recorded steps, which are recorded anew

    def scales_of(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.scales is None:
            return None, None
        if index >= len(self.scales):
            raise ValueError(f"scales: got those of {len(self.scales)} layers, want layer {index}'s, too")
        return self.scales[index]

    def transform_of(self, index: int) -> CacheTransform | None:
        """Returns a layer's transform; None if it changes nothing."""
        found = self.transforms
        if isinstance(found, Sequence):
            if index >= len(found):
                raise ValueError(f"kv_transform: got {len(found)} layers', want layer {index}'s, too")
            found = found[index]
        return None if found is None or found.identity else found

    def is_first(self, layer: DecodeCacheLayer) -> bool:
        """Returns whether a layer is the first of a pass."""
        return self.first is not None and self.first() is layer

    def columns_for(self, batch: int, new: int, device: torch.device) -> Columns:
        """Returns the shared columns. The first layer's tokens create them."""
        if self.columns is None:
            self.columns = Columns(batch, max(self.capacity, 1), device)
        return self.columns

    def make_room(self, columns: int) -> None:
        """Grows the capacity to ``columns`` if needed; ValueError for more columns than the cache may have."""
        if self.max_seq_len is not None and columns > self.max_seq_len:
            raise ValueError(
                f"key_states: got token {columns}, want at most the cache's max_seq_len {self.max_seq_len}"
            )
        assert self.columns is not None
        if columns <= self.columns.capacity:
            return
        self.columns.call_back()
        wanted = -(-max(columns, 3 * self.columns.capacity // 2) // GRANULE) * GRANULE
        self.columns.capacity = wanted if self.max_seq_len is None else min(wanted, self.max_seq_len)
        self.columns.graphs.clear()


class DecodeCache(Cache):
    """A cache of packed rows, as many layers as the model has, read by `attn_implementation="cute_kernels"` alone.

    Padding is not stored: a request's rows are its tokens. transformers counts columns, which include padding.
    `copy.deepcopy` and `torch.save` keep the tokens; `torch.load` then needs weights_only=False.

    Args:
        kv_format: a format's name, a pair (K's, V's), or a dict of these by the layer's number, -1 for all others:
            ``{0: "bf16", 1: "bf16", -1: "int4_g4"}``; or a file of these that `cute-kernels calibrate --budget`
            wrote. For latents: "mla_bf16", "mla_fp16" or "mla_fp8".
        max_seq_len: columns that each request may reach; allocated on first use. None: no limit; the capacity
            grows by half.
        capacity: columns to begin with, without ``max_seq_len``.
        scales: for formats with a scale beside the cache: each layer's (K's, V's) as `append_kv` takes them; None
            for a format without (see `calibrate`).
        kv_transform: how K and V are transformed before they are written: transforms alone, or constants that
            `calibrate_cache` or `cute-kernels calibrate` found. Their scales are used if ``scales`` is None.

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
        self.book = _Book(kv_format, max_seq_len, max_seq_len or capacity, scales, transforms)
        self._take_layers([])

    def _take_layers(self, layers: list[Any]) -> None:
        super().__init__(layer_class_to_replicate=cast("type[Any]", partial(_next_layer, self.book, layers)))
        self.layers = layers

    @classmethod
    def over(cls, layers: list[Any], book: _Book) -> DecodeCache:
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
        """Gives request b the tokens of request beam_idx[b]; rows are copied within the allocation."""
        self._select(lambda requests: requests[beam_idx.to(requests.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each request `repeats` times, side by side."""
        check_count("repeats", repeats, 1)
        self._select(lambda requests: requests.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the requests that ``indices``, a tensor of numbers or a boolean mask, names, in the order of
        ``indices``."""
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
        """Bytes of all layers' rows of existing columns."""
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


def _next_layer(book: _Book, layers: list[Any]) -> DecodeCacheLayer:
    """Makes the next layer. transformers asks for layers in order, as the first pass reaches them."""
    kind = LatentCacheLayer if book.kv_format in LATENT_FORMATS else DecodeCacheLayer
    return kind(book, len(layers))


@torch.inference_mode(False)
def _widened(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    wider = rows.new_zeros((*rows.shape[:-2], capacity, rows.shape[-1]))
    wider[..., : rows.shape[-2], :] = rows
    return wider
