"""Finds constants of a model's cache from sample inputs: scales outside the rows, and transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from cute_kernels import __version__
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache_options import formats_of_layer
from cute_kernels.integrations.transformers.known_code import cache_argument
from cute_kernels.integrations.transformers.latents import caches_latents
from cute_kernels.integrations.transformers.masks import make_mask
from cute_kernels.kv_cache import Calibrator
from cute_kernels.kv_cache.constants import CacheConstants, Scales
from cute_kernels.kv_cache.moments import Moments, can_rotate, group_of
from cute_kernels.model_layers import compiled_from

Batch: TypeAlias = "Mapping[str, Any] | torch.Tensor"
Method: TypeAlias = Literal["absmax", "percentile"]
Values: TypeAlias = bool | Literal["factors"]
"""Whether V stays as it is (False), gets factors and a rotation (True), or factors alone ("factors")."""
_WATCHED = "cute_kernels_watched"  # the attention implementation while a model is calibrated


class Seen(NamedTuple):
    """The inputs of a layer's attention in one pass, after RoPE and without padding, as the layer's cache gets them.

    Attributes:
        q: [tokens, num_q_heads, head_dim].
        k, v: [tokens, num_kv_heads, head_dim].
        lengths: tokens of each request.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: list[int]
    softmax_scale: float | None


class _SeenCache(DynamicCache):
    """A model's cache as transformers makes it, which also keeps the new K and V of each layer, by the layer's
    index.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Any:
        self.given[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def watch(model: PreTrainedModel, batches: Iterable[Batch], see: Callable[[Seen], None]) -> int:
    """Runs a model over batches and passes every layer's attention inputs to ``see``. Returns the number of tokens.

    Args:
        model, batches: as `calibrate` takes them.
        see: called for each batch and each layer with a cache of its own, in the layers' order.

    Raises:
        ValueError: there are no batches, or the model offers no choice of attention, or it caches latents.
    """
    model, tokens = cast("PreTrainedModel", compiled_from(model)), 0
    if any(map(caches_latents, model.modules())):
        raise ValueError(f"model: got {type(model).__name__}, which caches latents, want a cache of keys and values")
    for batch in map(inputs_of, batches):
        mask = batch.get("attention_mask")
        mask = None if mask is None or bool(mask.all()) else mask.bool()
        cache = _SeenCache(model.config)
        with attending(model, _shown(cache, mask, see)):
            model(**batch, **{cache_argument(model.forward): cache}, use_cache=True)
        tokens += int(batch["input_ids"].numel() if mask is None else mask.sum())
    if not tokens:
        raise ValueError("batches: got none, want at least one")
    return tokens


def inputs_of(batch: Batch) -> Mapping[str, Any]:
    """Returns a batch as a model's arguments by name. Raises TypeError unless the batch is a mapping of such arguments
    that includes ``input_ids``, or is ``input_ids`` alone."""
    if isinstance(batch, torch.Tensor) and batch.dim() == 2:
        return {"input_ids": batch}
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise TypeError(
            f"batches: got one that is {type(batch).__name__}, want input_ids [batch, columns] or inputs by name"
        )
    return batch


def _num_layers(model: PreTrainedModel) -> int:
    return cast("int", model.config.get_text_config(decoder=True).num_hidden_layers)


def _shown(cache: _SeenCache, mask: torch.Tensor | None, see: Callable[[Seen], None]) -> Callable[..., Any]:
    """Makes an attention function that passes its inputs to ``see``, then computes attention as usual."""

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        layer = cast("int", getattr(module, "layer_idx", None))
        if layer in cache.given:  # others read a cache that is not theirs
            k, v = cache.given[layer]
            lengths = [query.shape[2]] * query.shape[0] if mask is None else mask.sum(1).tolist()
            tokens = (_tokens(query, mask), _tokens(k, mask), _tokens(v, mask))
            see(Seen(layer, *tokens, lengths=lengths, softmax_scale=options.get("scaling")))
        return attention(module, query, key, value, *args, **options)

    return attend


@contextmanager
def attending(model: PreTrainedModel, attend: Callable[..., Any]) -> Iterator[None]:
    """Replaces a model's attention within the context by the function ``attend``, which gets the arguments of
    transformers' attention functions."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register(_WATCHED, attend)
    AttentionMaskInterface.register(_WATCHED, make_mask)
    try:
        model.set_attn_implementation(_WATCHED)
        if config._attn_implementation != _WATCHED:
            raise ValueError(
                f"model: got {type(model).__name__}, which offers no choice of attention, want a model that calls "
                "transformers' AttentionInterface"
            )
        yield
    finally:
        if config._attn_implementation == _WATCHED:
            model.set_attn_implementation(cast("str", before))


def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    kv_format: object,
    *,
    method: Method = "absmax",
    percentile: float = 99.9,
) -> list[Scales]:
    """Finds scales for `accelerate` and `DecodeCache` by running a model over samples of its texts.

    Args:
        model: a transformers model that generates.
        batches: inputs of the model by name, with ``input_ids`` [batch, columns], or ``input_ids`` alone. Padding
            (``attention_mask`` [batch, columns] is 0) is ignored.
        kv_format: as `DecodeCache` takes it.
        method, percentile: as `cute_kernels.kv_cache.Calibrator` takes them.

    Returns:
        Each layer's (scales of K, scales of V), fp32 on the layer's device; None for a format without scales outside
        its rows.

    Raises:
        ValueError: there are no batches, a format is unknown, or the model offers no choice of attention.
    """
    return _scales(model, batches, kv_format, (), method, percentile)


@dataclass(frozen=True)
class CacheMoments:
    """The result of `gather_moments`: moments of each of the model's ``layers`` over ``tokens`` tokens.

    Moments of layers without a cache of their own are empty.
    """

    layers: tuple[Moments, ...]
    tokens: int


def gather_moments(model: PreTrainedModel, batches: Iterable[Batch]) -> CacheMoments:
    """Gathers statistics from which transforms for any format can be made, in one pass of a model over samples of its
    texts.

    Args:
        model, batches: as `calibrate` takes them.

    Raises:
        ValueError: as `calibrate`, or no layer of the model has a cache.
    """
    layers = [Moments() for _ in range(_num_layers(model))]

    def see(seen: Seen) -> None:
        for q, k, v in zip(*(x.split(seen.lengths) for x in seen[1:4]), strict=True):
            layers[seen.layer].update(q, k, v, seen.softmax_scale)

    tokens = watch(model, batches, see)
    if not any(layer.tokens for layer in layers):
        raise ValueError(f"model: got {type(model).__name__}, whose layers have no cache, want one that generates")
    return CacheMoments(tuple(layers), tokens)


def calibrate_cache(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    kv_format: object,
    *,
    center: bool = True,
    factors: bool = True,
    rotation: bool = True,
    values: Values = False,
    seed: int = 0,
    method: Method = "absmax",
    percentile: float = 99.9,
    about: Mapping[str, str] | None = None,
    moments: CacheMoments | None = None,
) -> CacheConstants:
    """Finds constants of a model's cache, transforms and scales, from samples of its texts.

    Transforms are those of `cute_kernels.kv_cache.Moments`, with rotations as wide as the columns that share a scale. K
    in a 16-bit format is not transformed, nor is V in a format to which a transform makes no difference.

    Args:
        model, kv_format, method, percentile: as `calibrate` takes them.
        batches: a sequence, such as a list, of batches as in `calibrate`. The sequence is read twice if a format needs
            scales.
        center: whether transforms may subtract K's mean.
        factors: whether transforms may multiply K by factors.
        rotation: whether transforms may rotate K (Hadamard).
        values: True: V gets factors and a rotation, which attention undoes in its output. "factors": factors alone.
            Factors help with any groups of columns, a rotation only with one scale per row.
        seed: seed of the rotations' random signs.
        about: further entries for `CacheConstants.about`.
        moments: the result of `gather_moments` on the batches; default: they are gathered here.

    Returns:
        One transform for each layer, on the layer's device, and scales if a format has any.

    Raises:
        TypeError: batches is not a sequence.
        ValueError: as `calibrate`.
    """
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches: got {type(batches).__name__}, want a list: they are gone through twice")
    if values not in (False, True, "factors"):
        raise ValueError(f"values: got {values!r}, want False, True or 'factors'")
    found_moments = gather_moments(model, batches) if moments is None else moments
    transforms = [
        _transform(one, formats_of_layer(kv_format, layer), center, factors, rotation, values, seed + layer)
        for layer, one in enumerate(found_moments.layers)
    ]
    scales: Sequence[Scales] = ()
    names = [name for layer in range(len(transforms)) for name in formats_of_layer(kv_format, layer)]
    if any(format_of(name).given_scale for name in names):
        scales = _scales(model, batches, kv_format, transforms, method, percentile)
    chosen = {"center": center, "factors": factors, "rotation": rotation, "values": values is True}
    chosen["value factors"] = values == "factors"
    found = {
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "kv_format": str(kv_format),
        "tokens": str(found_moments.tokens),
        "method": " ".join(name for name, wanted in chosen.items() if wanted) or "scales alone",
        "cute_kernels": __version__,
    }
    return CacheConstants(tuple(transforms), tuple(scales), found | dict(about or {}))


def _transform(
    moments: Moments,
    formats: tuple[str, str],
    center: bool,
    factors: bool,
    rotation: bool,
    values: Values,
    seed: int,
) -> CacheTransform | None:
    """Returns a layer's transform. The transform has only the parts that reduce the error of the layer's formats; None
    if there are no such parts.
    """
    if moments.sizes is None:
        return None
    k_group, v_group = (group_of(format_of(name), dim) for name, dim in zip(formats, moments.sizes[1:], strict=True))
    dense = not format_of(formats[0]).is_coded
    widths = [
        group if rotation and can_rotate(dim) else 1
        for group, dim in zip((k_group, v_group), moments.sizes[1:], strict=True)
    ]
    with torch.device("cpu"):  # where signs are drawn, whatever the default device is
        made = moments.transform(
            k_rotation=widths[0],
            v_rotation=widths[1] if values is True else 1,
            k_group=k_group if k_group > 1 else None,
            center=center and not dense,
            factors=factors and not dense,
            v_factors=bool(values) and v_group > 1,
            seed=seed,
        )
    return None if made.identity else made


def _scales(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    kv_format: object,
    transforms: Sequence[CacheTransform | None],
    method: Method,
    percentile: float,
) -> list[Scales]:
    """Finds the scales of each layer's transformed K and V."""
    layers: dict[int, list[Calibrator | None]] = {}

    def made(name: str) -> Calibrator | None:
        return Calibrator(name, method, percentile) if format_of(name).given_scale else None

    def see(seen: Seen) -> None:
        if seen.layer not in layers:
            layers[seen.layer] = [made(name) for name in formats_of_layer(kv_format, seen.layer)]
        transform = transforms[seen.layer] if transforms else None
        written = (seen.k, seen.v)
        if transform is not None:
            written = (transform.keys(seen.k), transform.values(seen.v))
        for calibrator, x in zip(layers[seen.layer], written, strict=True):
            if calibrator is not None:
                calibrator.update(x)

    watch(model, batches, see)
    found = (layers.get(layer, (None, None)) for layer in range(_num_layers(model)))
    return [(k and k.scale(), v and v.scale()) for k, v in found]


def _tokens(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns [batch, heads, columns, head_dim] as [tokens, heads, head_dim], without padding."""
    tokens = states.transpose(1, 2)
    return tokens.flatten(0, 1) if mask is None else tokens[mask.to(states.device)]
