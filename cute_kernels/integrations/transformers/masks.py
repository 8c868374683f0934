"""What an attention mask says. transformers describes a mask by a function of four indices and has each attention
implementation make of it what it reads.

This one makes SDPA's boolean mask, which is right for every function, and notes on the tensor what the kernels can take
as an option instead: causal, or causal within a window. A model that changes the mask makes another tensor, without
the note; the kernels are then not used. So a pattern that is not recognised costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

_NOTE = "_cute_kernels_pattern"


@dataclass(frozen=True)
class Pattern:
    """A mask in the kernels' terms: a query at position p sees keys p - window < j <= p, all up to p without window,
    all whatsoever if not ``causal``; and every column of transformers' keys is one written token."""

    window: int | None = None
    causal: bool = True


EVERYTHING = Pattern(causal=False)


def make_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """transformers' mask function of this attention implementation; arguments as its `sdpa_mask` has them.

    Returns bool [batch, 1, q_len, keys], True where a query sees a key, with a note that `pattern_of` reads; or None
    where SDPA needs no mask, causal or not as the attention module is.
    """
    mask = sdpa_mask(*args, **options)
    if mask is None and options.get("allow_is_bidirectional_skip"):
        # Without a mask a module may be causal: it is asked, not the configuration that made the model bidirectional.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=options.get("device"))
        mask = mask.expand(options["batch_size"], 1, _q_len(options), options["kv_length"])
        setattr(mask, _NOTE, EVERYTHING)
        return mask
    if mask is None or torch.compiler.is_compiling():
        return mask
    window = _window(options.get("mask_function", causal_mask_function))
    if window is not None and _is_aligned(options) and _is_full(options.get("attention_mask"), mask.shape[3]):
        setattr(mask, _NOTE, Pattern(window.size))
    return mask


def pattern_of(mask: torch.Tensor | None) -> Pattern | None:
    """What can be taken in place of a mask; None for a mask without a note, which says more than that."""
    return None if mask is None else getattr(mask, _NOTE, None)


def causal_mask(q_len: int, keys: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, q_len, keys]: the last query sees all keys, each one before it one less."""
    return torch.ones(1, 1, q_len, keys, dtype=torch.bool, device=device).tril(keys - q_len)


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as transformers' eager attention adds it to the scores; others as they are."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


@dataclass(frozen=True)
class _Window:
    size: int | None


def _window(function: Callable[..., Any]) -> _Window | None:
    """The window of transformers' own causal functions, None for any other function."""
    if function is causal_mask_function:
        return _Window(None)
    size = _parts(function)
    return _Window(size) if size is not None and _same(function, sliding_window_causal_mask_function(size)) else None


def _parts(function: Callable[..., Any]) -> int | None:
    """The only whole number that a composed mask function holds, None if there is none or more than one."""
    found: list[Any] = []
    pending = [function]
    while pending:
        for cell in pending.pop().__closure__ or ():
            held = cell.cell_contents if isinstance(cell.cell_contents, (tuple, list)) else (cell.cell_contents,)
            found += (value for value in held if not callable(value))
            pending += (value for value in held if hasattr(value, "__closure__"))
    return found[0] if len(found) == 1 and type(found[0]) is int else None


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, functions being equal when they share their code and what they close over."""
    if not (hasattr(one, "__code__") and hasattr(other, "__code__")):
        if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
            return all(_same(a, b) for a, b in zip(one, other, strict=True))
        return type(one) is type(other) and one == other
    cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
    return one.__code__ is other.__code__ and _same(*cells)


def _is_aligned(options: dict[str, Any]) -> bool:
    """Whether the mask's columns are tokens from the first one on, and the queries the last of them."""
    if options.get("kv_offset"):
        return False
    if (positions := options.get("cache_position")) is not None:
        return int(positions[-1]) == options["kv_length"] - 1
    first = options.get("q_offset", 0)
    return isinstance(first, int) and first + options["q_length"] == options["kv_length"]


def _q_len(options: dict[str, Any]) -> int:
    """Older releases give the queries' positions instead of their number."""
    positions = options.get("cache_position")
    return options["q_length"] if positions is None else positions.shape[0]


def _is_full(padding: torch.Tensor | None, keys: int) -> bool:
    """Whether a padding mask [batch, tokens] hides none of the keys."""
    return padding is None or (padding.shape[-1] == keys and bool(padding.all()))
