"""What a layer's cache hands to attention in place of K and V."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.kv_formats import format_of

ATTENTION_NAME = "cute_kernels"


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
        raise AttributeError(f"{name}: {_why_not()}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AttributeError(f"{getattr(function, '__name__', function)}: {_why_not()}")

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, num_kv_heads, length, head_dim] of all tokens: older ones dequantised, new ones exact."""
        past = self.length - self.new_k.shape[2]
        if not past:
            return self.new_k, self.new_v
        form = format_of(self.kv_format)
        k, v = (
            torch.cat((form.dequantize(rows[:, :past], new.shape[3], new.dtype).transpose(1, 2), new), dim=2)
            for rows, new in ((self.k_rows, self.new_k), (self.v_rows, self.new_v))
        )
        return k, v


def _why_not() -> str:
    """Why a reader does not understand the handle: names the module whose code asks, and what it does instead."""
    rule = f"a DecodeCache hands out packed rows, not K and V; only attn_implementation={ATTENTION_NAME!r} reads them"
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return rule
    module = frame.f_locals["self"]
    name = type(module).__name__
    if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"{rule}; {name} offers no choice: it computes attention itself. Want another cache for this model"
    found = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if found != ATTENTION_NAME:
        return f"{rule}, and the model's is {found!r}; want model.set_attn_implementation({ATTENTION_NAME!r}) before"
    return (
        f"{rule}; {name}.{frame.f_code.co_name} computes with what it caches before it asks for attention. Want "
        "another cache for this model"
    )
