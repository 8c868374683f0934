"""Swapping the layers of a model for quantised ones."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from cute_kernels.arguments import check_flag, device_of
from cute_kernels.linear.module import ModelProgress, QuantizedLinear
from cute_kernels.linear.quantize import check_options
from cute_kernels.moe.module import QuantizedMoE, is_moe_block


def quantize_model(
    model: nn.Module,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    zero_point: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    skip: Sequence[str] = ("lm_head",),
    progress: ModelProgress | None = None,
) -> nn.Module:
    """Swaps the nn.Linear layers of a model for `QuantizedLinear`, and its mixtures of experts for `QuantizedMoE`.

    That is done in place, one after the other; each layer's weight is freed before the next one is quantised, if
    nothing else holds it. A layer that stands in several places is quantised once. Subclasses of nn.Linear stay as they
    are, since their forward is their own, and so do mixtures of experts that `QuantizedMoE.from_block` does not know.
    Routers stay as they are; the Linear layers of shared experts are layers like any other.

    Args:
        bits, group_size, zero_point, dtype, device: as for `quantize_weight`.
        batch_invariant: what that attribute of the new layers is: whether no row's, or token's, result of theirs may
            depend on what others there are.
        skip: layers that stay as they are: shell patterns for the qualified name or its last part. Layers within a
            mixture of experts that stays are not skipped by its name.
        progress: called after each layer with its qualified name, the number of layers done and that of all.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an argument is wrong, or a layer's weight has values that are not finite; the message
            names it. Layers before that one have been swapped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want an nn.Module")
    if isinstance(model, nn.Linear):
        raise TypeError("model: got an nn.Linear itself, want a module around it, or QuantizedLinear.from_linear")
    if is_moe_block(model):
        raise TypeError("model: got a mixture of experts itself, want a module around it, or QuantizedMoE.from_block")
    if isinstance(skip, str) or not isinstance(skip, Sequence) or not all(isinstance(name, str) for name in skip):
        raise TypeError(f"skip: got {skip!r}, want a sequence of names")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: got {type(progress).__name__}, want None or a function")
    check_options(bits, group_size, zero_point, dtype)
    check_flag("batch_invariant", batch_invariant)
    device = device_of(device)
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        wanted = type(module) is nn.Linear or is_moe_block(module)
        if wanted and not _is_skipped(name, skip):
            places.setdefault(module, []).append(name)
    total = len(places)
    for done in range(1, total + 1):
        module = next(iter(places))
        names = places.pop(module)
        make = QuantizedLinear.from_linear if isinstance(module, nn.Linear) else QuantizedMoE.from_block
        try:
            layer = make(module, bits, group_size, zero_point, dtype, device=device)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{names[0]}: {error}") from error
        layer.batch_invariant = batch_invariant
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
        del module
        if progress is not None:
            progress(names[0], done, total)
    return model


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    return any(fnmatchcase(candidate, pattern) for pattern in skip for candidate in (name, name.rpartition(".")[2]))
