"""Keeps the constants of each layer of a `KVCache`: scales that are not stored in the rows, and a transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.transforms import CacheTransform, check_transforms
from cute_kernels.kv_cache.cache_checks import checked_scale
from cute_kernels.kv_cache.calibration import scale_shape
from cute_kernels.kv_cache.exported import layer_key

Scales = tuple[torch.Tensor | None, torch.Tensor | None]


class LayerConstants:
    """The scales and transforms of all layers. Scales are NaN until `set_scales`.

    Args:
        formats: (K's format, V's format) of each layer.
        shape: (num_layers, num_kv_heads, K's head_dim, V's head_dim).
        device: the device of scales and transforms.

    Attributes:
        transforms: the transform of each layer, on the device; None for a layer without a transform, or with one that
            changes nothing.
    """

    def __init__(
        self, formats: Sequence[tuple[KvFormat, KvFormat]], shape: tuple[int, int, int, int], device: torch.device
    ) -> None:
        self._formats, self._device = formats, device
        self._num_layers, self._num_kv_heads, *head_dims = shape
        self._head_dims = (head_dims[0], head_dims[1])
        self._scales: list[Scales] = [
            (self._unset(k, head_dims[0]), self._unset(v, head_dims[1])) for k, v in self._formats
        ]
        self._given: set[int] = set()
        self.transforms: tuple[CacheTransform | None, ...] = (None,) * self._num_layers

    def _unset(self, form: KvFormat, head_dim: int) -> torch.Tensor | None:
        """Returns a scale of NaNs for a format with a scale that is not stored in the rows; None for other formats."""
        if form.given_scale is None:
            return None
        shape = scale_shape(form.given_scale, self._num_kv_heads, head_dim)
        return torch.full(shape, torch.nan, dtype=torch.float32, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return sum(scale.nbytes for pair in self._scales for scale in pair if scale is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns a text for each layer that tells its format, scales and transform. Caches with equal texts can read
        each other's rows (`KVCache.keys`). Waits for the device."""
        return tuple(
            layer_key(formats, self._head_dims, self._num_kv_heads, scales, transform)
            for formats, scales, transform in zip(self._formats, self._scales, self.transforms, strict=True)
        )

    def scales(self, layer: int) -> Scales:
        """Returns K's and V's scale of a layer. A scale is None for a format without a scale outside the rows."""
        return self._scales[layer]

    def check_given(self, layer: int) -> None:
        """Raises ValueError if the layer needs scales that were never set."""
        if layer not in self._given and any(scale is not None for scale in self._scales[layer]):
            raise ValueError(f"layer: got {layer}, whose scales were never given; want set_scales({layer}, ...) before")

    def set_scales(self, given: Mapping[int, Scales]) -> None:
        """Checks the scales of all given layers, then copies them into place; see `KVCache.set_scales`. given: (K's
        scale, V's scale) by layer.
        """
        checked = {
            layer: [
                checked_scale(name, scale, form, held)
                for name, scale, form, held in zip(
                    ("k_scale", "v_scale"), scales, self._formats[layer], self._scales[layer], strict=True
                )
            ]
            for layer, scales in given.items()
        }
        for layer, scales in checked.items():
            for held, scale in zip(self._scales[layer], scales, strict=True):
                if held is not None and scale is not None:
                    held.copy_(scale.reshape(held.shape))
            self._given.add(layer)

    def checked_transforms(self, name: str, given: object) -> tuple[CacheTransform | None, ...]:
        """Checks transforms, and returns each layer's transform on the device. Raises ValueError if a transform has
        other sizes than its layer. The message names argument and layer."""
        transforms = check_transforms(name, given, self._num_layers)
        for layer, transform in enumerate(transforms):
            if transform is not None:
                try:
                    transform.validate(self._num_kv_heads, *self._head_dims)
                except ValueError as error:
                    raise ValueError(f"{name}[{layer}]: {error}") from error
        moved = {id(one): one.to(self._device) for one in transforms if one is not None and not one.identity}
        return tuple(moved.get(id(one)) for one in transforms)
