"""Checks the arguments of `KVCache`: sizes, formats, scales and queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cute_kernels.arguments import check_all_positive, check_count, check_flag, check_floating, is_one_of
from cute_kernels.attention.checks import PAGE_SIZES
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat, check_layers, format_of, format_pair, formats_of_layer
from cute_kernels.formats.kv.transforms import CacheTransform


def check_sizes(
    num_layers: object,
    num_pages: object,
    page_size: object,
    num_kv_heads: object,
    head_dims: tuple[object, object],
    max_seq_len: object,
) -> None:
    """Raises TypeError or ValueError if a size of a cache is invalid. head_dims: (K's head_dim, V's head_dim)."""
    for name, value in (("num_layers", num_layers), ("num_pages", num_pages), ("num_kv_heads", num_kv_heads)):
        check_count(name, value, 1)
    if max_seq_len is not None:
        check_count("max_seq_len", max_seq_len, 1)
    if not is_one_of(page_size, PAGE_SIZES):
        raise ValueError(f"page_size: got {page_size}, want a multiple of 16 from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    for name, value in zip(("head_dim", "v_head_dim"), head_dims, strict=True):
        if not is_one_of(value, HEAD_DIMS):
            raise ValueError(f"{name}: got {value}, want one of {', '.join(map(str, HEAD_DIMS))}")


def check_new_tokens(counts: Iterable[int], q: torch.Tensor) -> None:
    """Raises ValueError unless every sequence has as many new tokens as q has positions. counts: number of new tokens
    of each sequence. Other shapes are checked by the operators.
    """
    q_len = q.shape[1] if q.dim() == 4 else None
    wrong = next((count for count in counts if q_len is not None and count != q_len), None)
    if wrong is not None:
        raise ValueError(f"batch: got a sequence with {wrong} new tokens, want {q_len} of each, the q_len of q")


def formats_for(kv_format: object, dtype: torch.dtype) -> tuple[KvFormat, KvFormat]:
    """Returns K's and V's format. Raises TypeError or ValueError unless a model in ``dtype`` can use both."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype: got {dtype}, want torch.bfloat16 or torch.float16")
    k_name, v_name = format_pair(kv_format)
    for form in (formats := (format_of(k_name), format_of(v_name))):
        if form.by_token or (form.in_blocks and form is formats[1]):
            raise ValueError(f"kv_format: got {form.name} for V, which is for keys alone; want a format of rows")
        if not form.fits(dtype):
            raise TypeError(f"kv_format: got {form.name!r} for a model in {dtype}, want the dense format of that dtype")
    return formats


def layers_formats(kv_format: object, num_layers: int, dtype: torch.dtype) -> tuple[tuple[KvFormat, KvFormat], ...]:
    """Returns (K's format, V's format) of each layer, checked as by `formats_for`. Raises ValueError if only some
    layers have keys in blocks."""
    check_layers(kv_format, num_layers)
    found = tuple(formats_for(formats_of_layer(kv_format, layer), dtype) for layer in range(num_layers))
    in_blocks = next((keys for keys, _ in found if keys.in_blocks), None)
    if in_blocks is not None and any(keys != in_blocks for keys, _ in found):
        raise ValueError(f"kv_format: got {in_blocks.name} keys in some layers, want them in all, or in none")
    return found


def check_max_seqs(keys: KvFormat, max_seqs: object) -> None:
    """Raises ValueError unless ``max_seqs`` is given for keys in blocks and is None for other keys."""
    if (max_seqs is None) == keys.in_blocks:
        want = "the number of sequences that there may be at a time" if keys.in_blocks else "None"
        raise ValueError(f"max_seqs: got {max_seqs!r}, want {want} for {keys.name} keys")
    if max_seqs is not None:
        check_count("max_seqs", max_seqs, 1)


def is_transformed(layer: int, transform: CacheTransform, given: bool | None, options: dict[str, Any]) -> bool:
    """Checks and returns ``given``, which says whether q is already transformed. The layer must have a transform.

    Raises ValueError if ``given`` is None, or if q is transformed and needs a q_shift that the options lack.
    """
    if given is None:
        raise ValueError(
            f"q_transformed: got None for layer {layer}, which has a transform; want True for q as append returns it, "
            "or False for q after RoPE alone"
        )
    check_flag("q_transformed", given)
    if given and sees_shift(options) and transform.k_center is not None and options.get("q_shift") is None:
        raise ValueError(
            f"q_shift: got None for layer {layer}, whose keys are centred, with a soft cap, sinks, score_options or "
            "the log-sum-exp; want what append writes to its q_shift"
        )
    return given


def sees_shift(options: dict[str, Any]) -> bool:
    """Returns whether attention's result with these options depends on a constant that is added to all scores of a
    query. Centred keys add such a constant.
    """
    asked = options.get("return_lse") or options.get("score_options")
    return bool(asked) or any(options.get(name) is not None for name in ("softcap", "sinks"))


def checked_scale(
    name: str, scale: torch.Tensor | None, form: KvFormat, held: torch.Tensor | None
) -> torch.Tensor | None:
    """Checks a layer's scale and returns it in fp32. Raises TypeError or ValueError if it is invalid or missing, or if
    the format needs none.

    held: the tensor to which the scale will be copied; None for a format that has no scale outside its rows.
    """
    if held is None:
        if scale is not None:
            raise ValueError(f"{name}: got a scale, want None: {form.name} keeps none beside the cache")
        return None
    want = tuple(held.shape)
    if scale is None:
        raise ValueError(f"{name}: got None, want {list(want)} for {form.name}")
    check_floating(**{name: scale})
    flat = {"tensor": (1,), "head": want[:1], "channel": want}[str(form.given_scale)]
    if tuple(scale.shape) not in (want, flat):
        raise ValueError(f"{name}: got shape {list(scale.shape)}, want {list(want)} for {form.name}")
    scale = scale.float()  # whose range is smaller than fp64's
    check_all_positive(name, scale)
    return scale
