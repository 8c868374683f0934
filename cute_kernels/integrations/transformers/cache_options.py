"""The options of a `DecodeCache`: formats of its layers, scales outside the rows, transforms of K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from cute_kernels.formats import kv
from cute_kernels.formats.kv import FORMATS, format_of, format_pair
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform
from cute_kernels.kv_cache.constants import CacheConstants, constants_of

LATENT_FORMATS = ("mla_bf16", "mla_fp16", "mla_fp8")
FormatOfLayers = str | tuple[str, str] | Mapping[int, "str | tuple[str, str]"] | Path
"""Formats of a cache: one for all layers, a pair of K's and V's, a dict by layer, or a file (``*.json``, see
`LayerFormats`). A dict has a format or a pair for each layer's number; -1 is for all other layers."""
Scales = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
"""Each layer's (K's scale, V's scale), for formats with a scale beside the cache."""
Transforms = CacheConstants | str | Path | CacheTransform | Sequence[CacheTransform | None]
"""Constants of a cache or their file, one `CacheTransform` for all layers, or a `CacheTransform` or None for each
layer."""


def formats_of_layer(kv_format: object, index: int) -> tuple[Any, Any]:
    """Returns a layer's formats (K's, V's). Raises ValueError if ``kv_format`` is a dict without a format for the
    layer. A format of latents is returned twice."""
    if isinstance(kv_format, str) and kv_format in LATENT_FORMATS:
        return kv_format, kv_format
    return kv.formats_of_layer(kv_format, index)


def told(kv_format: object) -> str:
    """Describes formats in a few words: the one format of all layers, or each layer's."""
    if isinstance(kv_format, kv.LayerFormats):
        counts = {one: kv_format.layers.count(one) for one in dict.fromkeys(kv_format.layers)}
        return ", ".join(f"{told(one)} in {count} layers" for one, count in counts.items())
    if isinstance(kv_format, Mapping):
        layers = [("others" if layer == -1 else f"layer {layer}", told(one)) for layer, one in kv_format.items()]
        return ", ".join(f"{layer}: {one}" for layer, one in layers)
    names = formats_of_layer(kv_format, 0)
    return " + ".join(dict.fromkeys(name if name in LATENT_FORMATS else format_of(name).name for name in names))


def constants_for(
    scales: Scales | None, kv_transform: object
) -> tuple[Scales | None, CacheTransform | Sequence[CacheTransform | None] | None]:
    """Returns (scales, transforms) from the arguments of `DecodeCache`.

    Raises:
        TypeError, ValueError: ``kv_transform`` is of another type, or names a file without constants.
    """
    if isinstance(kv_transform, (str, Path)):
        kv_transform = constants_of(kv_transform)
    if isinstance(kv_transform, CacheConstants):
        return (kv_transform.scales or None) if scales is None else scales, kv_transform.transforms
    if isinstance(kv_transform, Sequence):
        for layer, transform in enumerate(kv_transform):
            check_transform(f"kv_transform[{layer}]", transform)
    else:
        check_transform("kv_transform", kv_transform)
    return scales, cast("CacheTransform | Sequence[CacheTransform | None] | None", kv_transform)


def check_formats(kv_format: object, scales: Scales | None, transforms: object = None) -> None:
    """Raises TypeError or ValueError unless every format is known and has the scales that it needs.

    Also raises ValueError for transforms together with a format of latents.
    """
    if isinstance(kv_format, str) and kv_format in LATENT_FORMATS:
        if transforms is not None:
            raise ValueError(f"kv_transform: got one for {kv_format!r}, a cache of latents, want None")
        return
    kv.check_layers(kv_format)
    for one in kv_format.values() if isinstance(kv_format, Mapping) else (kv_format,):
        for name in format_pair(one):
            form = format_of(name)
            if form.in_blocks or form.by_token:
                raise ValueError(
                    f"kv_format: got {name!r}, whose newest keys lie beside the cache, want a format of rows; KVCache "
                    "serves it"
                )
            if form.given_scale is not None and scales is None:
                wanted = ", ".join(name for name, form in FORMATS.items() if not form.given_scale)
                raise ValueError(
                    f"kv_format: got {name!r}, which wants scales beside the cache, want scales, or one of {wanted}"
                )
