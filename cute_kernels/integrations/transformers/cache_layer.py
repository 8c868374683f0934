"""One layer's cache of packed rows, and the handle that it passes to attention instead of K and V."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from cute_kernels.attention import decode_attention
from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.transformers.cache_options import Scales, formats_of_layer
from cute_kernels.integrations.transformers.columns import GRANULE, Columns, NotStaticError
from cute_kernels.integrations.transformers.known_code import computes_attention
from cute_kernels.kv_cache import append_and_decode, append_kv, dequantize_kv
from cute_kernels.names import KvFormatName

ATTENTION_NAME = "cute_kernels"


@dataclass(frozen=True)
class Prologue:
    """The operations on q and k before attention.

    Attributes:
        options: arguments with which `append_and_decode` performs the operations.
        rotate: a function that performs the operations on q and k [batch, heads, columns, head_dim] by the model's own
            operators, for calls that `append_and_decode` does not compute.
    """

    options: dict[str, Any]
    rotate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class CachedTokens:
    """One layer's cache as attention needs it, passed where transformers passes K and V.

    The new tokens are not in the cache yet. Attention appends them, in its own launch if possible, since it knows the
    mask. A layer that reads another layer's keys gets that layer's handle, whose tokens are already appended.

    Attributes:
        layer: the rows, their formats and scales.
        columns: the state that all layers share.
        new_k, new_v: [batch, num_kv_heads, new columns, head_dim], before quantisation.
        prologue: the operations that new keys and queries need first; None if there are none.
    """

    def __init__(self, layer: DecodeCacheLayer, columns: Columns, new_k: torch.Tensor, new_v: torch.Tensor) -> None:
        self.layer = layer
        self.columns = columns
        self.new_k = new_k
        self.new_v = new_v
        self.is_appended = self.is_settled = False
        self.prologue: Prologue | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {why_not()}")

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        raise AttributeError(f"{getattr(function, '__name__', function)}: {why_not()}")

    def to(self, device: torch.device) -> CachedTokens:
        """Returns the handle itself. Raises ValueError for a device other than the layer's.

        A transformers layer that reads another layer's keys calls this to move the keys to its own device; here all
        layers are on one device.
        """
        if device != self.new_k.device:
            raise ValueError(f"device: got {device}, want the cache's {self.new_k.device}: a model on one device")
        return self

    @property
    def new(self) -> int:
        """The number of new columns in this pass."""
        return self.new_k.shape[2]

    def settle(self, padding: object) -> None:
        """Passes the padding of this pass's mask to `Columns.settle`. If the mask hides older tokens, drops their rows
        from the layer.
        """
        try:
            self.columns.settle(padding)
        except ValueError:
            self.layer.count -= self.new  # the first layer: none else has taken anything yet
            raise
        if self.columns.kept is not None and not self.is_settled:
            self.layer.keep(self.columns.kept)
        self.is_settled = True

    def rotated(self, query: torch.Tensor) -> torch.Tensor:
        """Applies the prologue, if there is one, to the queries and to the handle's new keys, and returns the queries.
        Call it if `attend` does not compute the call; the kernel of `attend` applies the prologue itself.
        """
        if self.prologue is not None:
            query, self.new_k = self.prologue.rotate(query, self.new_k)
            self.prologue = None
        return query

    def append(self) -> None:
        """Writes the new tokens into the cache; padding is not written."""
        if self.is_appended:
            return
        assert self.prologue is None
        if self.columns.static:
            raise NotStaticError("the new token is not appended by the kernel that attends to it")
        k, v = (token_major(x).flatten(0, 1) for x in (self.new_k, self.new_v))
        append_kv(k, v, slot_mapping=self.columns.slots, **self.layer.operands())
        self.is_appended = True

    def attend(self, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attends to all tokens, and appends the new ones first if they are not appended yet.

        query: [batch, num_q_heads, new columns, head_dim]; `can_attend` must hold: at most 16 new columns, none of them
        padding. Returns [batch, new columns, num_q_heads, head_dim].
        """
        lens, operands = self.columns.seq_lens, self.layer.operands()
        k_cache, v_cache = operands.pop("k_cache"), operands.pop("v_cache")
        if self.is_appended:
            return decode_attention(query.transpose(1, 2).contiguous(), k_cache, v_cache, lens, **operands, **options)
        q, k, v = (token_major(x) for x in (query, self.new_k, self.new_v))
        self.is_appended = True
        prologue = {} if self.prologue is None else self.prologue.options
        return append_and_decode(q, k, v, k_cache, v_cache, lens, **operands, **prologue, **options)

    def serves(self, asked: dict[str, Any]) -> bool:
        """Returns whether `attend` takes these options. An additive bias must have the shape [batch, q_len, heads,
        capacity]."""
        return asked["attn_bias"] is None or asked["attn_bias"].dim() == 4

    @property
    def can_attend(self) -> bool:
        """Whether `attend` takes this pass: all new columns are tokens, and there are at most 16."""
        return self.columns.is_whole and self.new <= MAX_Q_LEN

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V [batch, num_kv_heads, columns, head_dim] of all columns.

        Older columns are dequantised; new ones are exact.
        """
        if self.columns.static:
            raise NotStaticError("attention reads all keys as tensors, whose number changes")
        if self.new == self.columns.count:
            return self.new_k, self.new_v
        old = self.columns.count - self.new
        rows = self.columns.older_rows()
        parts = zip(self.layer.rows, self.layer.formats, self.layer.scales, (self.new_k, self.new_v), strict=True)
        transform = self.layer.transform
        undo = (None, None) if transform is None else (transform.original_keys, transform.restore)
        k, v = (
            torch.cat((_numbers(cache[:, :, :old].transpose(1, 2), name, scale, new, rows, undone), new), dim=2)
            for (cache, name, scale, new), undone in zip(parts, undo, strict=True)
        )
        return k, v


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

    def __init__(self, book: Book, index: int) -> None:
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
        """Moves scales and transform to the layer's device. Raises ValueError, naming the layer, for a transform whose
        sizes do not fit."""
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
        """Gives request b the rows of request requests[b]. If the batch size does not change, the copy stays within the
        allocation.
        """
        if not self.is_initialized:
            return
        for name, rows in zip(self.stored, self.rows, strict=True):
            if len(requests) == rows.shape[0]:
                rows[..., : self.count, :] = rows[..., : self.count, :].index_select(0, requests)
            else:
                setattr(self, name, rows.index_select(0, requests))

    @torch.inference_mode(False)
    def keep(self, rows: torch.Tensor) -> None:
        """Reorders each request's first rows: old row ``rows[b, i]`` of request b becomes its row i."""
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
        """Returns the largest number of columns that fit; -1 for no limit."""
        return -1 if self.book.max_seq_len is None else self.book.max_seq_len

    get_max_cache_shape = get_max_length  # as older releases call it

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Returns (number of keys that ``query_length`` new tokens see, index of the first key). transformers makes
        masks of this size.

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
        """The number of bytes of the rows of all columns in the layer, without unused capacity."""
        if not self.is_initialized:
            return 0
        return sum(rows[..., : self.count, :].numel() * rows.element_size() for rows in self.rows)


@dataclass(eq=False)
class Book:
    """The state that a cache's layers share. It refers to no layer or cache, so that a layer or cache is freed once it
    is no longer used."""

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
        """Returns a layer's transform; None if the layer has no transform, or a transform that changes nothing."""
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
        """Grows the capacity to ``columns`` if needed. Raises ValueError for more columns than the cache may have."""
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


def token_major(x: torch.Tensor) -> torch.Tensor:
    """Returns x [batch, heads, columns, head_dim] as [batch, columns, heads, head_dim], with strides that the kernels
    read.

    x is copied only if its heads are not adjacent or its columns are not evenly spaced.
    """
    x = x.transpose(1, 2)
    batch, columns, heads, head_dim = x.shape
    side_by_side = x.stride(3) == 1 and (heads == 1 or x.stride(2) == head_dim)
    evenly = batch == 1 or columns == 1 or x.stride(0) == columns * x.stride(1)
    return x if side_by_side and evenly else x.contiguous()


def _numbers(
    cache: torch.Tensor,
    name: KvFormatName,
    scale: torch.Tensor | None,
    like: torch.Tensor,
    rows: torch.Tensor | None,
    undo: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Dequantises rows [batch, tokens, num_kv_heads, row] to [batch, num_kv_heads, columns, head_dim] in ``like``'s
    dtype.

    rows: int64 [batch, columns], the row of each column; None if column i is in row i. undo: undoes the cache's
    transform; None if there is none.
    """
    dtype = like.dtype if undo is None else torch.float32
    numbers = dequantize_kv(cache.contiguous(), kv_format=name, head_dim=like.shape[3], dtype=dtype, scale=scale)
    found = (numbers if undo is None else undo(numbers).to(like.dtype)).transpose(1, 2)
    if rows is None:
        return found
    return found.gather(2, rows[:, None, :, None].expand(-1, found.shape[1], -1, found.shape[3]))


def why_not() -> str:
    """Returns the error message for code that uses the handle as if it were a tensor. The message names the calling
    module and the remedy.
    """
    rule = f"a DecodeCache hands out packed rows, not K and V; only attn_implementation={ATTENTION_NAME!r} reads them"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back
    if frame is None:
        return rule
    module = frame.f_locals["self"]
    name = type(module).__name__
    offers = hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    if not offers or computes_attention(type(module)):
        return f"{rule}; {name} offers no choice: it computes attention itself. Want another cache for this model"
    found = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if found != ATTENTION_NAME:
        return f"{rule}, and the model's is {found!r}; want model.set_attn_implementation({ATTENTION_NAME!r}) before"
    return (
        f"{rule}; {name}.{frame.f_code.co_name} computes with what it caches before it asks for attention. Want "
        "another cache for this model"
    )


@torch.inference_mode(False)
def _widened(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    wider = rows.new_zeros((*rows.shape[:-2], capacity, rows.shape[-1]))
    wider[..., : rows.shape[-2], :] = rows
    return wider
