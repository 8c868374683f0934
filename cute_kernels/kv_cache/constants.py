"""`CacheConstants`, the result of a calibration for a model's cache: transforms and scales of all layers, and their
safetensors file.

The file's tensors are called ``layers.3.k_center``, ``.k_factor``, ``.v_factor``, ``.k_scale``, ``.v_scale``; a layer
has only the tensors that it needs. The header has the number of layers, the widths of the rotations, and the origin of
the constants: model, KV formats, tokens of the samples, method.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch

from cute_kernels.arguments import check_all_positive, check_dtype, check_floating, check_kind
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform
from cute_kernels.runtime.device import device_of

FORMAT, VERSION = "cute_kernels.cache_constants", "1"
_NAME = re.compile(r"layers\.(\d+)\.(k_center|k_factor|v_factor|k_scale|v_scale)")

Scales: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""K's and V's scale of a layer. A scale is None for a format that keeps none beside the cache."""


class ConstantsError(ValueError):
    """An invalid file of constants; the message names the file and the fault."""


@dataclass(frozen=True)
class CacheConstants:
    """Constants of a model's cache, layer by layer.

    Args:
        transforms: the transform of each layer, or None.
        scales: (K's scale, V's scale) of each layer, fp32, as `append_kv` takes them; () if no layer has scales.
        about: the origin of the constants, as texts by name: "model", "kv_format", "tokens", "method" and so on.

    Raises:
        TypeError, ValueError: a layer's transform or scale is of a wrong type or value, or transforms and scales differ
            in number.
    """

    transforms: tuple[CacheTransform | None, ...]
    scales: tuple[Scales, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Sequence) or not self.transforms:
            raise ValueError(f"transforms: got {self.transforms!r}, want one for each layer, or None")
        for layer, transform in enumerate(self.transforms):
            check_transform(f"transforms[{layer}]", transform)
        if self.scales and len(self.scales) != len(self.transforms):
            raise ValueError(f"scales: got {len(self.scales)} layers', want {len(self.transforms)}, as of transforms")
        for layer, pair in enumerate(self.scales):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"scales[{layer}]: got {pair!r}, want (K's scale, V's scale), each a tensor or None")
            for name, scale in zip(("k_scale", "v_scale"), pair, strict=True):
                if scale is not None:
                    _check_scale(f"scales[{layer}]: {name}", scale)
        check_kind("about", self.about, Mapping, "a dict of texts")
        for key, value in self.about.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"about: got {key!r}: {value!r}, want text")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.transforms)

    def save(self, path: str | Path) -> None:
        """Writes the constants to a file at ``path``. Raises ImportError without safetensors (``pip install
        'cute-kernels[checkpoints]'``)."""
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        for layer, transform in enumerate(self.transforms):
            arrays = {} if transform is None else transform.arrays
            tensors |= {f"layers.{layer}.{name}": array for name, array in arrays.items()}
        for layer, pair in enumerate(self.scales):
            named = zip(("k_scale", "v_scale"), pair, strict=True)
            tensors |= {f"layers.{layer}.{name}": scale for name, scale in named if scale is not None}
        rotations = [[1, 1] if one is None else [one.k_rotation, one.v_rotation] for one in self.transforms]
        header = {
            "format": FORMAT,
            "version": VERSION,
            "rotations": json.dumps(rotations),
            "about": json.dumps(dict(self.about), sort_keys=True),
        }
        # Copies: safetensors refuses tensors that share memory, and a shared scale is none of its business.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, str(path), header)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> CacheConstants:
        """Reads the constants of a file to a device (default: the CPU).

        Raises:
            FileNotFoundError: there is no such file.
            ConstantsError: the file holds no constants, has a later version, or is damaged.
            ImportError: safetensors is missing.
        """
        header, tensors = _read(Path(path))
        rotations = _rotations(path, header)
        where = device_of(device) or torch.device("cpu")
        layers: list[dict[str, torch.Tensor]] = [{} for _ in rotations]
        for key, tensor in tensors.items():
            match = _NAME.fullmatch(key)
            if match is None or int(match[1]) >= len(layers):
                raise ConstantsError(f"{path}: got a tensor {key!r}, want constants of {len(layers)} layers alone")
            layers[int(match[1])][match[2]] = tensor.to(where)
        transforms: list[CacheTransform | None] = []
        scales: list[Scales] = []
        for layer, (found, (k_rotation, v_rotation)) in enumerate(zip(layers, rotations, strict=True)):
            scales.append((found.pop("k_scale", None), found.pop("v_scale", None)))
            try:
                made = replace(CacheTransform(k_rotation=k_rotation, v_rotation=v_rotation), **found)
            except (TypeError, ValueError) as error:
                raise ConstantsError(f"{path}: layer {layer}: {error}") from error
            transforms.append(None if made.identity else made)
        given = tuple(scales) if any(scale is not None for pair in scales for scale in pair) else ()
        try:
            return cls(tuple(transforms), given, json.loads(header.get("about", "{}")))
        except (TypeError, ValueError) as error:
            raise ConstantsError(f"{path}: {error}") from error


def constants_of(constants: CacheConstants | str | Path) -> CacheConstants:
    """Returns the given constants, or reads constants from the given path. Raises TypeError for anything else."""
    if isinstance(constants, (str, Path)):
        return CacheConstants.load(constants)
    check_kind("constants", constants, CacheConstants, "CacheConstants, or a file's path")
    return constants


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Returns a file's header and tensors."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `cute-kernels calibrate` writes one")
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except SafetensorError as error:
        raise ConstantsError(f"{path}: no whole safetensors file ({error})") from error
    if header.get("format") != FORMAT:
        raise ConstantsError(f"{path}: got a file of {header.get('format', 'something else')!r}, want {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ConstantsError(f"{path}: got version {header.get('version')!r}, want {VERSION!r}")
    return header, tensors


def _rotations(path: str | Path, header: Mapping[str, str]) -> list[tuple[int, int]]:
    """Returns the rotations' widths from a file's header, for each layer."""
    try:
        found = json.loads(header["rotations"])
        widths = [(k, v) for k, v in found]
        if not widths or not all(type(width) is int for pair in widths for width in pair):
            raise ValueError("not numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise ConstantsError(f"{path}: rotations: got {header.get('rotations')!r}, want pairs of widths") from error
    return widths


def _check_scale(name: str, scale: torch.Tensor) -> None:
    check_floating(**{name: scale})
    check_dtype(name, scale, torch.float32)
    check_all_positive(name, scale)
