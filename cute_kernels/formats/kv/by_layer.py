"""`LayerFormats`, the KV formats of a model layer by layer, and their JSON file, which `cute-kernels calibrate
--budget` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cute_kernels.formats.kv.registry import format_of, format_pair
from cute_kernels.names import KvFormatName

T = TypeVar("T")
FORMAT, VERSION = "cute_kernels.layer_formats", 1


@dataclass(frozen=True)
class LayerFormats(Mapping[int, tuple[KvFormatName, KvFormatName]]):
    """A mapping from every layer to K's and V's format. It is accepted wherever ``kv_format`` may differ by layer.

    Args:
        layers: (K's format, V's format) of each layer.
        report: how the formats were chosen, as values that JSON can hold.

    Raises:
        TypeError, ValueError: there are no layers, or a format is unknown.
    """

    layers: tuple[tuple[KvFormatName, KvFormatName], ...]
    report: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: got none, want K's and V's format of each")
        for pair in self.layers:
            for name in format_pair(pair):
                format_of(name)

    def __getitem__(self, layer: int) -> tuple[KvFormatName, KvFormatName]:
        if not 0 <= layer < len(self.layers):
            raise KeyError(layer)
        return self.layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.layers)))

    def __len__(self) -> int:
        return len(self.layers)

    def save(self, path: str | Path) -> None:
        """Writes the formats and the report to a JSON file."""
        data = {"format": FORMAT, "version": VERSION, "layers": self.layers, "report": dict(self.report)}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LayerFormats:
        """Reads the formats of a file that `save` wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file holds no formats, or has a later version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no such file; `cute-kernels calibrate --budget` writes one") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}: got no JSON ({error}), want what `cute-kernels calibrate --budget` writes"
            ) from None
        kind = (data.get("format"), data.get("version")) if isinstance(data, dict) else None
        if kind != (FORMAT, VERSION) or not isinstance(data.get("layers"), list):
            raise ValueError(f"{path}: got {kind}, want layers of {(FORMAT, VERSION)}")
        try:
            return cls(tuple(format_pair(pair) for pair in data["layers"]), data.get("report", {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def told_formats(kv_format: T, name: str = "kv_format") -> T | LayerFormats:
    """Returns the formats of a file if ``kv_format`` is a path (``*.json``), else ``kv_format`` itself.

    Raises OSError or ValueError if the file cannot be read; the message begins with ``name``.
    """
    if not isinstance(kv_format, Path) and not (isinstance(kv_format, str) and kv_format.endswith(".json")):
        return kv_format
    try:
        return LayerFormats.load(kv_format)
    except (OSError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def check_layers(kv_format: object, num_layers: int | None = None) -> None:
    """Raises ValueError if ``kv_format`` is a mapping with a key that is neither a layer nor -1. Without ``num_layers``
    the upper bound is not checked."""
    for layer in kv_format if isinstance(kv_format, Mapping) else ():
        if type(layer) is not int or layer < -1 or (num_layers is not None and layer >= num_layers):
            wanted = "a layer's number" if num_layers is None else f"0 to {num_layers - 1}"
            raise ValueError(f"kv_format: got a format for layer {layer!r}, want {wanted}, or -1: all others")


def formats_of_layer(kv_format: object, layer: int) -> tuple[KvFormatName, KvFormatName]:
    """Returns K's and V's formats in a layer. ``kv_format`` is a name, a pair, or a mapping from the layer's index; -1
    stands for all layers that are not in the mapping.

    Raises TypeError for anything else, ValueError if a mapping has no format for the layer.
    """
    if not isinstance(kv_format, Mapping):
        return format_pair(kv_format)
    found = kv_format.get(layer, kv_format.get(-1))
    if found is None:
        raise ValueError(f"kv_format: got none for layer {layer}, want one, or one for -1: all others")
    return format_pair(found)
