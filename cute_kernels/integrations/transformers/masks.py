"""Attention masks. transformers describes a mask by a function of four indices; each attention implementation makes a
mask from this function.

This implementation makes SDPA's boolean mask, which is right for every function. A note on the tensor says which option
of the kernels can replace it: causal, or causal within a window. A model that changes the mask makes a tensor without
the note, and the kernels are not used. So an unrecognised pattern takes more time, but results are right.

If a layer of the model adds masks to its own scores, or changes them, the model gets an additive mask.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.columns import Columns, NotStaticError
from cute_kernels.integrations.transformers.known_code import may_add_masks, passes_masks_on, supports_sdpa

_NOTE = "_cute_kernels_pattern"
_recorded = threading.local()


def recorded_columns() -> Columns | None:
    """Returns the columns of the cache whose decode step this thread is recording; None otherwise."""
    return getattr(_recorded, "columns", None)


@contextmanager
def recording(columns: Columns) -> Iterator[None]:
    """Within this context, this thread records a decode step over ``columns``. The step's masks have a constant
    size."""
    _recorded.columns = columns
    try:
        with columns.recording():
            yield
    finally:
        _recorded.columns = None


@dataclass(frozen=True)
class Pattern:
    """A mask in the kernels' terms.

    A query at position p sees keys p - window < j <= p; without a window all keys up to p; if not ``causal`` all keys.
    It never sees columns that ``padding`` excludes.

    Attributes:
        padding: bool [batch, columns], True for columns that are tokens; None if all are.
        is_known: whether the pattern can replace the mask; otherwise only the mask says which keys a query sees.
    """

    window: int | None = None
    causal: bool = True
    padding: torch.Tensor | None = None
    is_known: bool = True


EVERYTHING = Pattern(causal=False)


def make_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Makes a mask when transformers asks for one; the arguments are those of its `sdpa_mask`.

    Returns bool [batch, 1, q_len, keys], True if a query sees a key. If possible, the tensor has a note that
    `pattern_of` reads. There are three exceptions:

    - SDPA needs no mask, as ``is_causal`` of the attention module says which keys a query sees: returns None.
    - A layer of the model adds masks to its own scores, as eager attention does, or changes them: returns the additive
      mask, never None.
    - The step is being recorded: returns the mask of `_mask_of_recorded_step`.
    """
    if (columns := recorded_columns()) is not None:
        return _mask_of_recorded_step(columns, options)
    asking, config = _asking_module(), type(options.get("config"))
    is_added = may_add_masks(config) if asking is None else _is_added(asking, config)
    mask = None if is_added else sdpa_mask(*args, **options)
    if mask is None and (is_added or (_may_be_causal(options) and _denies_being_causal(asking, config))):
        mask = sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})
    if mask is None and options.get("allow_is_bidirectional_skip"):
        # Without a mask a module may be causal: it is asked, not the configuration that made the model bidirectional.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=options.get("device"))
        mask = mask.expand(options["batch_size"], 1, _q_len(options), options["kv_length"])
        mask = _as_read(mask, is_added, options)
        setattr(mask, _NOTE, EVERYTHING)
        return mask
    if mask is None:
        return None
    mask = _as_read(mask, is_added, options)
    if torch.compiler.is_compiling():
        return mask
    if _is_aligned(options):
        pattern = _pattern_by(options.get("mask_function", causal_mask_function)) or Pattern(is_known=False)
        setattr(mask, _NOTE, replace(pattern, padding=options.get("attention_mask")))
    return mask


def _may_be_causal(options: dict[str, Any]) -> bool:
    """Returns whether `sdpa_mask` may return None for a causal mask, not only for a mask that hides nothing."""
    return options.get("allow_is_causal_skip", True) and _q_len(options) > 1


def _asking_module() -> torch.nn.Module | None:
    """Returns the module whose code asks for a mask; None if it is unknown, as while torch.compile traces."""
    if torch.compiler.is_compiling():
        return None
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _denies_being_causal(asking: torch.nn.Module | None, config: type) -> bool:
    """Returns whether all parts of a module that have an attribute ``is_causal`` have False there, as in some decoders.

    Without a mask such a module would see all keys. For an unknown module the result is True if a model class of its
    configuration does not support SDPA.
    """
    if asking is None:
        return not supports_sdpa(config)
    parts = asking.modules()
    return {vars(part).get("is_causal", getattr(type(part), "is_causal", None)) for part in parts} - {None} == {False}


def _is_added(asking: torch.nn.Module, config: type) -> bool:
    """Returns whether a part of a module adds masks to its own scores, as eager attention does, or changes them.

    Only a model that does not support SDPA may do so, since SDPA takes boolean masks.
    """
    if asking._supports_sdpa if isinstance(asking, PreTrainedModel) else supports_sdpa(config):
        return False
    kinds = {type(part) for part in asking.modules() if not isinstance(part, PreTrainedModel)}
    return not all(map(passes_masks_on, kinds))


def _as_read(mask: torch.Tensor, is_added: bool, options: dict[str, Any]) -> torch.Tensor:
    """Returns a boolean mask as the module reads it: unchanged, or as an additive mask."""
    return additive(mask, options.get("dtype") or torch.float32) if is_added else mask


def _mask_of_recorded_step(columns: Columns, options: dict[str, Any]) -> torch.Tensor | None:
    """Returns `make_mask`'s mask for one new token; all values that depend on the step are read on the device."""
    batch, capacity = columns.batch, columns.capacity
    device = columns.seq_lens.device
    pattern = _pattern_by(options.get("mask_function", causal_mask_function))
    if pattern is None:
        if not columns.all_tokens:
            raise NotStaticError("a mask that is no window, over a padded batch")
        mask = sdpa_mask(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        assert mask is not None
        return mask & (torch.arange(capacity, device=device) <= columns.before)
    if pattern.window is None:
        return None
    if not columns.is_left:
        raise NotStaticError("a window over a batch with padding between tokens")
    # Only the note is read. No key can be taken from a mask without columns: whoever tries is told by an error.
    mask = torch.empty(batch, 1, 1, 0, dtype=torch.bool, device=device)
    setattr(mask, _NOTE, pattern)
    return mask


def pattern_of(mask: torch.Tensor | None) -> Pattern | None:
    """Returns the pattern that can replace a mask; None for a mask without a note."""
    return None if mask is None else getattr(mask, _NOTE, None)


def causal_mask(q_len: int, keys: int, device: torch.device) -> torch.Tensor:
    """Returns bool [1, 1, q_len, keys]: the last query sees all keys, each earlier query one key less."""
    return torch.ones(1, 1, q_len, keys, dtype=torch.bool, device=device).tril(keys - q_len)


@overload
def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...
@overload
def additive(mask: None, dtype: torch.dtype) -> None: ...
def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Converts a boolean mask to the numbers that eager attention adds to scores. Returns other masks unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _pattern_by(function: Callable[..., Any]) -> Pattern | None:
    """Returns the pattern of a mask function if it is transformers' own for causal masks, with or without a window;
    else None."""
    if function is causal_mask_function:
        return Pattern()
    size = _parts(function)
    return Pattern(size) if size is not None and _same(function, sliding_window_causal_mask_function(size)) else None


def _parts(function: Callable[..., Any]) -> int | None:
    """Returns the integer that a composed mask function holds, if it holds one integer and nothing else; else None."""
    found: list[Any] = []
    pending = [function]
    while pending:
        for cell in pending.pop().__closure__ or ():
            held = cell.cell_contents if isinstance(cell.cell_contents, (tuple, list)) else (cell.cell_contents,)
            found += (value for value in held if not callable(value))
            pending += (value for value in held if hasattr(value, "__closure__"))
    return found[0] if len(found) == 1 and type(found[0]) is int else None


def _same(one: Foreign, other: Foreign) -> bool:
    """Returns whether two values are equal. Functions are equal if their code and their closures are."""
    if not (hasattr(one, "__code__") and hasattr(other, "__code__")):
        if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
            return all(_same(a, b) for a, b in zip(one, other, strict=True))
        return type(one) is type(other) and one == other
    cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
    return one.__code__ is other.__code__ and _same(*cells)


def _is_aligned(options: dict[str, Any]) -> bool:
    """Returns whether the mask's columns start at the cache's first column, and the queries are the last columns."""
    if options.get("kv_offset"):
        return False
    if (positions := options.get("cache_position")) is not None:
        return int(positions[-1]) == options["kv_length"] - 1
    first = options.get("q_offset", 0)
    return isinstance(first, int) and first + options["q_length"] == options["kv_length"]


def _q_len(options: dict[str, Any]) -> int:
    """Returns the number of queries. Older releases pass their positions instead."""
    positions = options.get("cache_position")
    return options["q_length"] if positions is None else positions.shape[0]
