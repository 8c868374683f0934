"""Scales of a model's cache, for formats whose scale lies beside it, from sample inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, DynamicLayer

from cute_kernels.integrations.transformers.cache import formats_of_layer
from cute_kernels.kv_cache import Calibrator
from cute_kernels.kv_formats import format_of


class _SampledLayer(DynamicLayer):
    """transformers' own layer, which shows the calibrators of its K and V what is cached."""

    def __init__(self, samples: _Samples, index: int) -> None:
        super().__init__()
        self.calibrators = samples.of_layer(index)
        self.samples = samples

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for calibrator, states in zip(self.calibrators, (key_states, value_states), strict=True):
            if calibrator is not None:
                tokens, mask = states.transpose(1, 2), self.samples.mask
                calibrator.update(tokens.flatten(0, 1) if mask is None else tokens[mask])
        return super().update(key_states, value_states, *args, **kwargs)


class _Samples:
    """The calibrators of all layers, and which columns of the batch under way are tokens."""

    def __init__(self, kv_format: Any, method: Any, percentile: float) -> None:
        self.kv_format, self.method, self.percentile = kv_format, method, percentile
        self.mask: torch.Tensor | None = None
        self.layers: list[tuple[Calibrator | None, Calibrator | None]] = []

    def of_layer(self, index: int) -> tuple[Calibrator | None, Calibrator | None]:
        while len(self.layers) <= index:
            k, v = (
                Calibrator(name, self.method, self.percentile) if format_of(name).given_scale else None
                for name in formats_of_layer(self.kv_format, len(self.layers))
            )
            self.layers.append((k, v))
        return self.layers[index]


@torch.no_grad()
def calibrate(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    kv_format: Any,
    *,
    method: Literal["absmax", "percentile"] = "absmax",
    percentile: float = 99.9,
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Scales for `accelerate` and `DecodeCache`, found by running a model over samples of what it will read.

    Args:
        model: a transformers model that generates.
        batches: inputs of the model, each at least ``input_ids`` [batch, columns]; padding that ``attention_mask``
            [batch, columns] names does not count.
        kv_format: as `DecodeCache` takes it.
        method, percentile: as `cute_kernels.kv_cache.Calibrator` takes them.

    Returns:
        Each layer's (K's, V's), fp32 on the layer's device; None for a format that has none beside the cache.

    Raises:
        ValueError: there are no batches, or a format is unknown.
    """
    samples = _Samples(kv_format, method, percentile)
    for batch in batches:
        mask = batch.get("attention_mask")
        samples.mask = None if mask is None or bool(mask.all()) else mask.bool()
        layers: list[Any] = []
        cache = Cache(layer_class_to_replicate=partial(_next_layer, samples, layers))  # type: ignore[arg-type]
        cache.layers = layers
        model(**batch, past_key_values=cache, use_cache=True)
    if not samples.layers:
        raise ValueError("batches: got none, want at least one")
    return [(_scale(k), _scale(v)) for k, v in samples.layers]


def _scale(calibrator: Calibrator | None) -> torch.Tensor | None:
    return None if calibrator is None else calibrator.scale()


def _next_layer(samples: _Samples, layers: list[Any]) -> _SampledLayer:
    return _SampledLayer(samples, len(layers))
