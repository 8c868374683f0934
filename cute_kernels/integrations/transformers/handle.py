"""The handle that a layer's cache passes to attention instead of K and V."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cute_kernels.attention import decode_attention
from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.integrations.transformers.columns import Columns, NotStaticError
from cute_kernels.integrations.transformers.known_code import computes_attention
from cute_kernels.kv_cache import append_and_decode, append_kv, dequantize_kv
from cute_kernels.names import KvFormatName

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.cache import DecodeCacheLayer

ATTENTION_NAME = "cute_kernels"


@dataclass(frozen=True)
class Prologue:
    """The operations on q and k before attention.

    Attributes:
        options: arguments of `append_and_decode`, which then performs the operations.
        rotate: performs them on q and k [batch, heads, columns, head_dim] by the model's own operators, for other
            attention.
    """

    options: dict[str, Any]
    rotate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class CachedTokens:
    """One layer's cache as attention needs it, passed where transformers passes K and V.

    The new tokens are not in the cache yet. Attention appends them, since it knows the mask, in the same launch if it
    can. A layer that reads another layer's keys gets that layer's handle, whose tokens are already appended.

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
        """Returns the handle itself; ValueError for another device.

        Layers that read another layer's keys move them to their own device; here all layers are on one device.
        """
        if device != self.new_k.device:
            raise ValueError(f"device: got {device}, want the cache's {self.new_k.device}: a model on one device")
        return self

    @property
    def new(self) -> int:
        """The columns of this pass."""
        return self.new_k.shape[2]

    def settle(self, padding: object) -> None:
        """Calls `Columns.settle` for this handle's pass, and drops rows of the layer that the pass hides."""
        try:
            self.columns.settle(padding)
        except ValueError:
            self.layer.count -= self.new  # the first layer: none else has taken anything yet
            raise
        if self.columns.kept is not None and not self.is_settled:
            self.layer.keep(self.columns.kept)
        self.is_settled = True

    def rotated(self, query: torch.Tensor) -> torch.Tensor:
        """Returns the rotated queries, for any attention but `attend`. The new keys are rotated in place of the old
        ones."""
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

        query: [batch, num_q_heads, new columns, head_dim] with at most 16 columns, all tokens. Returns [batch, new
        columns, num_q_heads, head_dim].
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
        """Returns whether `attend` takes these options; an additive bias is [batch, q_len, heads, capacity]."""
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


def token_major(x: torch.Tensor) -> torch.Tensor:
    """Returns x [batch, heads, columns, head_dim] as [batch, columns, heads, head_dim], with strides that the kernels
    read.

    Heads must be adjacent and columns evenly spaced. x is copied only if they are not.
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

    ``undo`` undoes a transform.
    """
    dtype = like.dtype if undo is None else torch.float32
    numbers = dequantize_kv(cache.contiguous(), kv_format=name, head_dim=like.shape[3], dtype=dtype, scale=scale)
    found = (numbers if undo is None else undo(numbers).to(like.dtype)).transpose(1, 2)
    if rows is None:
        return found
    return found.gather(2, rows[:, None, :, None].expand(-1, found.shape[1], -1, found.shape[3]))


def why_not() -> str:
    """Returns the message for code that does not understand the handle. It names the calling module and the remedy."""
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
