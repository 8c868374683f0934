"""Whole checkpoints in safetensors files, one layer in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_kernels.integrations.checkpoints.awq import from_awq
from cute_kernels.integrations.checkpoints.compressed_tensors import from_compressed_tensors
from cute_kernels.integrations.checkpoints.gptq import FORMATS, from_gptq
from cute_kernels.integrations.checkpoints.headers import Entry, read_headers, read_json
from cute_kernels.integrations.checkpoints.hqq import from_hqq
from cute_kernels.linear.module import ModelProgress, QuantizedLinear
from cute_kernels.linear.weight import TENSOR_NAMES, PackedWeight, symmetric_zero

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class LayerFormat:
    """How a checkpoint keeps a layer.

    Args:
        name: the configuration's `quant_method`.
        mark: the tensor whose name tells that a layer is of this format.
        required, optional: the tensors that are read, without "bias".
        convert: tensors by those names, the configuration, further options -> weight.
    """

    name: str
    mark: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[..., PackedWeight]


def _awq(tensors: Tensors, config: Config, **options: Any) -> PackedWeight:
    if config.get("bits", config.get("w_bit", 4)) != 4:
        raise ValueError(f"bits: got {config.get('bits', config.get('w_bit'))}, want 4 for AWQ")
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":  # AutoAWQ's first versions wrote "GEMM"
        raise ValueError(f"version: got {version!r}, want 'gemm', how AutoAWQ packs by default")
    weight = from_awq(**tensors, group_size=config.get("group_size", config.get("q_group_size")), **options)
    if config.get("zero_point") is False:
        _check_symmetric("qzeros", weight, "zero_point is false")
    return weight


def _gptq(tensors: Tensors, config: Config, **options: Any) -> PackedWeight:
    stored_as = config.get("checkpoint_format") or config.get("format") or FORMATS[0]
    bits, group_size = config.get("bits", 4), config.get("group_size")
    weight = from_gptq(**tensors, bits=bits, group_size=group_size, checkpoint_format=stored_as, **options)
    if config.get("sym") is True:
        _check_symmetric("qzeros", weight, "sym is true")
    desc_act = config.get("desc_act")
    if desc_act is True:
        _check_order_is_there("g_idx", tensors, weight, "desc_act is true")
    if desc_act is False and weight.perm is not None:
        raise ValueError(
            "g_idx: got inputs of a group that are not neighbours, want neighbours: the configuration says that "
            "desc_act is false"
        )
    return weight


def _compressed_tensors(tensors: Tensors, config: Config, **options: Any) -> PackedWeight:
    said = _said_of_weights(config)
    bits, group_size = said.get("num_bits"), said.get("group_size")
    weight = from_compressed_tensors(**tensors, bits=bits, group_size=group_size, **options)
    symmetric = said.get("symmetric")
    if symmetric is True:
        _check_symmetric("weight_zero_point", weight, "symmetric is true")
    if symmetric is False and "weight_zero_point" not in tensors:
        raise ValueError(
            "weight_zero_point: got no such tensor, want it: the configuration says that symmetric is false"
        )
    if said.get("actorder") in ("group", "dynamic"):  # two names of one order; others keep the inputs' own
        _check_order_is_there("weight_g_idx", tensors, weight, f"actorder is {said['actorder']!r}")
    return weight


def _said_of_weights(config: Config) -> Config:
    """What a compressed-tensors configuration says of all quantised weights: that in which its groups agree."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise TypeError(f"config_groups: got {groups!r}, want groups of layers by name, each a mapping")
    said = [group["weights"] for group in groups.values() if isinstance(group.get("weights"), Mapping)]
    first = said[0] if said else {}
    return {key: value for key, value in first.items() if all(value == each.get(key) for each in said)}


def _check_symmetric(name: str, weight: PackedWeight, said: str) -> None:
    """Raises ValueError if a weight has zero points of its own, against the configuration."""
    if weight.zeros is not None:
        middle = symmetric_zero(weight.bits)
        raise ValueError(
            f"{name}: got zero points other than {middle}, want {middle} everywhere: the configuration says that {said}"
        )


def _check_order_is_there(name: str, tensors: Tensors, weight: PackedWeight, said: str) -> None:
    """Raises ValueError if the groups of inputs are missing that the configuration promises."""
    if name not in tensors and weight.group_size is not None:
        raise ValueError(f"{name}: got no such tensor, want it: the configuration says that {said}")


def _hqq(tensors: Tensors, config: Config, **options: Any) -> PackedWeight:
    shape = tensors.pop("shape").tolist()
    found = {"nbits": 4, "axis": 1} | dict(config)
    found |= {name: _integer(name, tensors.pop(name)) for name in ("nbits", "axis") if name in tensors}
    return from_hqq(**tensors, shape=shape, bits=found["nbits"], axis=found["axis"], **options)


def _integer(name: str, tensor: torch.Tensor) -> int:
    if tensor.numel() != 1 or tensor.is_floating_point():
        raise ValueError(f"{name}: got {tensor.dtype} {list(tensor.shape)}, want one integer")
    return int(tensor)


def _own(tensors: Tensors, _: Config, *, dtype: torch.dtype | None, device: Any) -> PackedWeight:
    weight = PackedWeight.from_state_dict(tensors)
    if dtype not in (None, weight.dtype):
        raise TypeError(f"dtype: got {dtype}, want None or {weight.dtype}, that of the packed weight")
    return weight if device is None else weight.to(device)


LAYER_FORMATS = (
    LayerFormat("awq", "qweight", ("qweight", "qzeros", "scales"), (), _awq),
    LayerFormat("gptq", "qweight", ("qweight", "qzeros", "scales"), ("g_idx",), _gptq),
    LayerFormat(
        "compressed-tensors",
        "weight_packed",
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx"),
        _compressed_tensors,
    ),
    LayerFormat("hqq", "W_q", ("W_q", "scale", "zero", "shape"), ("nbits", "axis"), _hqq),
    LayerFormat("cute_kernels", "codes", ("codes", "scales", "format"), TENSOR_NAMES[2:], _own),
)


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
    config = _read_config(path) if config is None else _checked_config("config", config)
    layers = _find_layers(entries, config)
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
    config = _read_config(path) if config is None else _checked_config("config", config)
    found = _find_layers(entries, config)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in found:
        dense = modules.get(name)
        if dense is model:
            raise TypeError(f"model: got the layer itself, {type(model).__name__}, want a module around it")
        if not isinstance(dense, nn.Linear):
            raise ValueError(f"{name}: got {type(dense).__name__} in the model, want an nn.Linear")
        if dense.bias is not None and _join(name, "bias") not in entries:
            raise ValueError(f"{_join(name, 'bias')}: got no such tensor, want it: the model's layer has a bias")
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


def _checked_config(name: str, config: Any) -> Config:
    if not isinstance(config, Mapping):
        raise TypeError(f"{name}: got {type(config).__name__}, want the quantisation configuration, a mapping")
    return config


def _read_config(path: Path) -> Config:
    """The quantisation configuration beside the files, or an empty one."""
    directory = path if path.is_dir() else path.parent
    for file, key in (("config.json", "quantization_config"), ("quantize_config.json", None)):
        if (directory / file).exists():
            found = read_json(directory / file)
            found = found if key is None else found.get(key)
            if found:
                return _checked_config(file if key is None else f"{file}, {key}", found)
    return {}


def _find_layers(entries: Mapping[str, Entry], config: Config) -> dict[str, LayerFormat]:
    """The quantised layers by name; ValueError for one that lacks a tensor, and if there is none at all."""
    marks = {form.mark for form in LAYER_FORMATS}
    layers: dict[str, LayerFormat] = {}
    owned: dict[str, set[str]] = {}
    for key in sorted(entries):
        name, _, own = key.rpartition(".")
        owned.setdefault(name, set()).add(own)
        if own in marks:
            form = _format_of(entries, name, own, config)
            for wanted in form.required:
                if _join(name, wanted) not in entries:
                    raise ValueError(f"{_join(name, wanted)}: got no such tensor, want it beside {own} ({form.name})")
            layers[name] = form
    for name in sorted(owned.keys() - layers.keys()):
        _check_not_a_rest(name, owned[name])
    if not layers:
        raise ValueError(
            f"path: got no tensor named {', '.join(sorted(marks))}, want a checkpoint that has such layers"
        )
    return layers


def _check_not_a_rest(name: str, owned: set[str]) -> None:
    """Raises ValueError if a layer has lost the one tensor that it is known by, rather than pass it over."""
    if "weight" in owned:  # a whole layer, of formats that have scales beside it
        return
    for form in LAYER_FORMATS:
        rest = [each for each in form.required if each != form.mark]
        if owned.issuperset(rest):
            raise ValueError(f"{_join(name, form.mark)}: got no such tensor, want it beside {' and '.join(rest)}")


def _config_of(config: Config, name: str) -> Config:
    """The configuration of a layer: GPTQModel's "dynamic" has other values for layers whose names match a pattern."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
        raise TypeError(f"dynamic: got {dynamic!r}, want values for each pattern of names")
    for pattern, own in dynamic.items():
        try:
            matches = re.match(pattern.removeprefix("+:"), name)  # "-:" is for layers that are not quantised
        except re.error as error:
            raise ValueError(f"dynamic: got {pattern!r} ({error}), want a regular expression") from error
        if matches:
            return {**config, **own}
    return config


def _format_of(entries: Mapping[str, Entry], name: str, mark: str, config: Config) -> LayerFormat:
    fitting = [form for form in LAYER_FORMATS if form.mark == mark]
    method = config.get("quant_method")
    named = [form for form in fitting if form.name == method]
    if named or len(fitting) == 1:
        return (named or fitting)[0]
    if method is not None:
        names = ", ".join(form.name for form in fitting)
        raise ValueError(f"quant_method: got {method!r}, want one of {names} for layers with {mark}")
    # AWQ packs along N, GPTQ along K: only GPTQ's words have as many columns as the scales.
    scales = entries.get(_join(name, "scales"))
    along_k = scales is not None and entries[_join(name, mark)].shape[-1:] == scales.shape[-1:]
    return next(form for form in fitting if form.name == ("gptq" if along_k else "awq"))


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
            tensors = {each: read(_join(name, each)) for each in own if _join(name, each) in entries}
            bias = read(_join(name, "bias")) if _join(name, "bias") in entries else None
            try:
                layer = QuantizedLinear(form.convert(tensors, _config_of(config, name), **options), bias)
            except (TypeError, ValueError) as error:
                raise type(error)(_join(name, str(error))) from error
            del tensors, bias  # what was read is not kept while the caller works
            yield name, layer


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
