"""Whole checkpoints in safetensors files, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_kernels.integrations.checkpoints.configuration import Config, checked, config_of, read_config
from cute_kernels.integrations.checkpoints.headers import Entry, read_headers
from cute_kernels.integrations.checkpoints.layer_formats import LayerFormat, find_layers, join, said_of
from cute_kernels.linear.module import ModelProgress, QuantizedLinear
from cute_kernels.linear.weight import PackedWeight


def load_safetensors(
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantised layers of a checkpoint, one after the other, each read when it is asked for.

    Formats are AWQ, GPTQ, compressed-tensors, HQQ and state dicts of `QuantizedLinear`. Before the first layer is read,
    every file is checked to be whole and every layer to have its tensors.

    Args:
        path: a safetensors file, or a directory of them with the model's config.json or quantize_config.json.
        config: the quantisation configuration (`quantization_config`), default that of the directory. Of it are used
            quant_method, bits, group_size, checkpoint_format, version and GPTQModel's dynamic, and of
            compressed-tensors what all config_groups say of weights; quant_method tells AWQ from GPTQ, which without
            it the shapes do. sym, desc_act, zero_point, symmetric and actorder are compared with the tensors.
        dtype: of scales and activations, default the checkpoint's, bf16 for fp32.
        device: where the layers are put; packing is done on the CPU.

    Yields:
        (name, layer) in the order of names, with the bias if there is one.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: a file is cut off, or a tensor is missing, does not fit or is not as the configuration
            says; the message names the tensor.
    """
    path = _path_of(path)
    entries = read_headers(path)
    config = read_config(path) if config is None else checked("config", config)
    layers = find_layers(entries, config)
    return _read_layers(entries, layers, config, {"dtype": dtype, "device": device})


def load_quantized_linears(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: ModelProgress | None = None,
) -> nn.Module:
    """Swaps the Linear layers that a checkpoint has quantised for `QuantizedLinear`, in place, all or none of them.

    The model's Linear layers may be on the meta device. What the checkpoint does not quantise is not loaded. A layer
    that stands in several places of the model is swapped in all of them, whichever the checkpoint names.

    Args:
        model: has an nn.Linear under each name and of each shape that `load_safetensors` yields.
        path, config, dtype, device: as for `load_safetensors`.
        progress: called after each layer with its name, the number of layers done and that of all.

    Returns:
        ``model``.

    Raises:
        As `load_safetensors`, and ValueError for a layer that the model has not, or in another shape, or with a bias
        that the checkpoint lacks. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want an nn.Module")
    path = _path_of(path)
    entries = read_headers(path)
    config = read_config(path) if config is None else checked("config", config)
    found = find_layers(entries, config)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in found:
        dense = modules.get(name)
        if dense is model:
            raise TypeError(f"model: got the layer itself, {type(model).__name__}, want a module around it")
        if not isinstance(dense, nn.Linear):
            raise ValueError(f"{name}: got {type(dense).__name__} in the model, want an nn.Linear")
        if dense.bias is not None and join(name, "bias") not in entries:
            raise ValueError(f"{join(name, 'bias')}: got no such tensor, want it: the model's layer has a bias")
    layers: dict[str, QuantizedLinear] = {}
    for name, layer in _read_layers(entries, found, config, {"dtype": dtype, "device": device}):
        dense = modules[name]
        if layer.shape != (dense.out_features, dense.in_features):
            wanted = [dense.out_features, dense.in_features]
            raise ValueError(f"{name}: got a weight {list(layer.shape)}, want {wanted}, that of the model's layer")
        layers[name] = layer
        if progress is not None:
            progress(name, len(layers), len(found))
    swapped = {modules[name]: layer for name, layer in layers.items()}
    for place, module in modules.items():
        layer = layers.get(place, swapped.get(module))
        if layer is not None:
            parent, _, own = place.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
    return model


def _path_of(path: Any) -> Path:
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, want the path of a file or directory")
    return Path(path)


def _read_layers(
    entries: Mapping[str, Entry], layers: Mapping[str, LayerFormat], config: Config, options: dict[str, Any]
) -> Iterator[tuple[str, QuantizedLinear]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "path: reading safetensors files wants the safetensors package: pip install safetensors"
        ) from error

    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def read(key: str) -> torch.Tensor:
            file = entries[key].file
            try:
                if file not in handles:
                    handles[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                return handles[file].get_tensor(key)
            except SafetensorError as error:
                raise ValueError(f"{key}: got {file.name}, which is damaged ({error}), want a whole file") from error

        for name, form in layers.items():
            own = (*form.required, *form.optional)
            tensors = {each: read(join(name, each)) for each in own if join(name, each) in entries}
            bias = read(join(name, "bias")) if join(name, "bias") in entries else None
            try:
                converted = form.convert(tensors, config_of(config, name) | said_of(entries, name), **options)
                weight, shifts = (converted, None) if isinstance(converted, PackedWeight) else converted
                layer = QuantizedLinear(weight, bias, shifts)
            except (TypeError, ValueError) as error:
                raise type(error)(join(name, str(error))) from error
            del tensors, bias  # what was read is not kept while the caller works
            yield name, layer
