"""Whole checkpoints in safetensors files, one layer in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_kernels.gemm.experts.module import OfExperts, QuantizedExperts, layer_for
from cute_kernels.gemm.experts.stored import NAMES, Known, known_experts
from cute_kernels.gemm.module import ModelProgress, QuantizedLinear, is_conv1d
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.integrations.checkpoints.activations import Rounding, common, declared_activations
from cute_kernels.integrations.checkpoints.configuration import Config, checked, config_of, read_config
from cute_kernels.integrations.checkpoints.experts import Experts
from cute_kernels.integrations.checkpoints.gpt_oss import with_common_names
from cute_kernels.integrations.checkpoints.headers import Entry, Headers, read_headers
from cute_kernels.integrations.checkpoints.layer_formats import LayerFormat, find_layers, is_stacked, join, said_of
from cute_kernels.integrations.checkpoints.placement import place_layers
from cute_kernels.model_config import keep_vocabulary, record_layers
from cute_kernels.model_layers import compiled_from, survey, swap, weight_bytes
from cute_kernels.model_report import QuantizationReport, ReportedLayer
from cute_kernels.models import reported
from cute_kernels.names import ModelActivations


def load_safetensors(
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    activations: ModelActivations | None = None,
) -> Iterator[tuple[str, QuantizedLinear | QuantizedExperts]]:
    """Loads the quantised layers of a checkpoint, one after the other. A layer is read when it is requested.

    Formats are AWQ, GPTQ, AutoRound, compressed-tensors, ModelOpt, FP8, HQQ, torchao and state dicts of
    `QuantizedLinear` and `QuantizedMoE`. Before it reads the first layer, it checks that every file is complete and
    every layer has its tensors. A layer in another quantisation is an error.

    Args:
        path: a safetensors file, or a directory of them with the model's config.json or quantize_config.json.
        config: the quantisation configuration (`quantization_config`), default that of the directory. It is read for
            quant_method, bits, group_size, checkpoint_format, version, GPTQModel's dynamic, AutoRound's packing_format
            and extra_config, and compressed-tensors' config_groups. quant_method says whether the format is AWQ or
            GPTQ; if it is missing, shapes decide. sym, desc_act, zero_point, symmetric and actorder are compared with
            the tensors.
        dtype: dtype of scales and activations; default the checkpoint's, or bf16 if that is fp32.
        device: where the layers are put; packing is done on the CPU.
        activations: sets `QuantizedLinear.activations` of each layer. None: "fp8" if the checkpoint declares FP8,
            unless its scales are finer than those of FP8 products; a declared static scale is kept. "fp8": for each
            layer whose format allows it. "16bit": for none.

    Yields:
        (name, layer) in the order of names: a `QuantizedLinear`, with the bias if there is one, or `QuantizedExperts`
        from a state dict of this package.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: a file is cut off, or a tensor is missing, does not fit or is not as the configuration
            says; the message names the tensor and its file.
    """
    entries, config, layers = look_into(path_of(path), config, activations)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "activations": activations}
    return ((name, layer) for name, layer, _ in read_layers(entries, layers, config, options))


def load_quantized_linears(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: ModelProgress | None = None,
    activations: ModelActivations | None = None,
) -> nn.Module:
    """Swaps a checkpoint's quantised layers for `QuantizedLinear` and `QuantizedRoutedExperts`, all or none of them.

    The model's layers may be on the meta device. Tensors that the checkpoint does not quantise are not loaded. A layer
    that the model uses under several names is swapped under all of them; the checkpoint may have any of these names.
    Experts that a checkpoint stores one by one are stacked; all experts of a layer must be quantised in one format.

    Forward hooks of layers are kept. A layer with other hooks, or with a forward of its own, stays dense and gets
    unpacked weights, since a swap would lose the hooks or the forward. Experts with other hooks or a forward of their
    own are refused.

    Args:
        model: a module with an nn.Linear of each name and shape that `load_safetensors` yields. A transformers model
            may have other names, to which transformers maps those of the checkpoint.
        path, config, dtype, device, activations: as for `load_safetensors`.
        progress: called after each layer with its name, the number of layers done and the number of all layers.

    Returns:
        ``model``. Its ``quantization_report`` (`cute_kernels.model_report.QuantizationReport`) has each layer's format,
        whether its products are in 16 bits or FP8 and why, and the declared activations. It also lists layers with
        weights in 16 bits. Experts have no static scales. `save_pretrained` of a transformers model saves the layers as
        after `quantize_model`, if its configuration has no quantization_config of another method.

    Raises:
        As `load_safetensors`, and ValueError for a layer that the model lacks, has in another shape, or has with a bias
        that the checkpoint lacks. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want an nn.Module")
    entries, config, found = look_into(path_of(path), config, activations)
    given, model = model, compiled_from(model)
    options = {"dtype": dtype, "device": device, "activations": activations}
    Filling(model, entries, found).fill(model, config, options, progress)
    record_layers(model)
    return given


class Filling:
    """A model whose layers are being read.

    Args:
        model: as for `load_quantized_linears`. `fill` changes it, once all layers are read.
        entries: the checkpoint's tensors.
        found: the checkpoint's quantised layers.

    Attributes:
        found: the layers that the model has a place for.
        is_unused: a function from a tensor's name to whether the model ignores the tensor.
    """

    def __init__(self, model: nn.Module, entries: Mapping[str, Entry], found: Mapping[str, LayerFormat]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._entries = entries
        self.is_unused = _unused(model, entries)
        self.found = found = {name: form for name, form in found.items() if not self.is_unused(join(name, form.mark))}
        stacked = [name for name, form in found.items() if is_stacked(entries, name, form)]
        self.places = place_layers(model, [name for name in found if name not in stacked], stacked)
        self._known: dict[str, tuple[Known, tuple[int, int, int]]] = {}  # of experts, and their sizes
        for name, place in self.places.items():
            has_bias = join(name, "bias") in entries
            dense: Any = self._modules[place.module]
            wants_bias, why = getattr(dense, "bias", None) is not None, "layer has a bias"
            if (known := None if place.role is None else known_experts(dense)) is not None:
                self._known[place.module] = known, known[0].sizes(dense)
                wants_bias, why = known[0].biased, "experts have one"
            if wants_bias and not has_bias:
                raise ValueError(f"{join(name, 'bias')}: got no such tensor, want it: the model's {why}")
            if has_bias and not wants_bias and not (place.role is None and place.packed):
                whose = "a layer that stays in 16 bits" if place.role is None else "an expert"
                raise ValueError(f"{join(name, 'bias')}: got a bias of {whose}, want none: the model's has none")
        self._made: dict[nn.Module, QuantizedLinear | OfExperts] = {}
        self._roundings: dict[nn.Module, set[Rounding]] = {}  # by a layer's experts
        self._notes: dict[nn.Module, str] = {}  # of layers, what they compute with
        self._unpacked: dict[nn.Module, dict[str, torch.Tensor | None]] = {}  # weights of layers that are not swapped
        self._experts: dict[str, Experts | dict[str, QuantizedExperts]] = {}

    def fill(self, model: nn.Module, config: Config, options: dict[str, Any], progress: ModelProgress | None) -> None:
        """Reads the layers and puts them into the model. options: as `read_layers` takes them."""
        experts = {name for name, place in self.places.items() if place.role is not None}
        layers = read_layers(self._entries, self.found, config, options, experts)
        for done, (name, layer, rounding) in enumerate(layers, start=1):
            self._take(name, layer, rounding)
            if progress is not None:
                progress(name, done, len(self.found))
        self._swap(model)

    def _take(self, name: str, layer: QuantizedLinear | QuantizedExperts, rounding: Rounding) -> None:
        """Keeps a layer after it was read; `_swap` puts it into the model later. Raises TypeError or ValueError, naming
        the layer, if it does not fit into the model."""
        place = self.places[name]
        module: Any = self._modules[place.module]
        if place.role is None:
            assert isinstance(layer, QuantizedLinear)
            shape = tuple(module.weight.shape)
            self._check_shape(name, layer.shape, shape[::-1] if is_conv1d(module) else shape)
            if place.packed:
                self._made[module] = layer.train(module.training)
                self._notes[module] = rounding.set(layer)
            else:
                w = layer.dequantize()
                own = w.T.contiguous() if is_conv1d(module) else w
                self._unpacked[module] = {"weight": own, "bias": layer.bias}
            return
        known, (count, hidden, inner) = self._known[place.module]
        kind, target = known[0], self._swapped(name)
        self._roundings.setdefault(target, set()).add(rounding)
        if isinstance(layer, QuantizedExperts):
            experts: Any = self._experts.setdefault(place.module, {})
            wanted = (count, hidden, inner) if place.role == "down" else (count, kind.rows(inner), hidden)
            self._check_shape(name, (len(layer.codes), *layer.shape), wanted)
            experts[place.role] = layer
            full = experts.keys() == {"gate_up", "down"}
        else:
            self._check_shape(name, layer.shape, (hidden, inner) if place.role == "down" else (inner, hidden))
            experts = self._experts.setdefault(place.module, Experts(count, kind.gated))
            try:
                experts.put(place.role, place.expert, layer.weight)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from error
            full = experts.is_full
        if full:
            parts: Any = experts if isinstance(experts, dict) else experts.finish()
            del self._experts[place.module]
            biases = (parts["gate_up"].bias, parts["down"].bias) if kind.biased else None
            pair: dict[str, PackedExperts] = {role: part.weight for role, part in parts.items()}
            made = self._made[target] = layer_for(target, known, **pair, biases=biases)
            self._notes[target] = common(self._roundings[target]).set(made)

    def _swapped(self, name: str) -> Any:
        """Returns the module that the checkpoint's layer ``name`` replaces; all experts of a block replace one module.
        If the router's weights scale the experts' inputs, that module is the block around the experts.
        """
        place = self.places[name].module
        known = self._known.get(place)
        return self._modules[place.rpartition(".")[0] if known is not None and known[0][0].scales_inputs else place]

    def _swap(self, model: nn.Module) -> None:
        """Puts the new layers into the model, everywhere where the modules that they replace occur."""
        for place, module in self._modules.items():
            layer = self._made.get(module)
            if layer is not None:
                swap(model, place, module, layer)
        for dense, tensors in self._unpacked.items():
            for name, tensor in tensors.items():
                if tensor is not None:
                    setattr(dense, name, nn.Parameter(tensor, requires_grad=getattr(dense, name).requires_grad))
        keep_vocabulary(model)
        unpacked = {name for name, module in self._modules.items() if module in self._unpacked}
        vars(model)["quantization_report"] = QuantizationReport(tuple(self._reported()), left_in(model, unpacked))

    def _reported(self) -> Iterator[ReportedLayer]:
        names: dict[nn.Module, str] = {}
        for name, module in self._modules.items():
            names.setdefault(module, name)
        for module, layer in self._made.items():
            own = getattr(module, "experts", module)
            before = sum(getattr(own, name).nbytes for name in ("weight", *NAMES) if hasattr(own, name))
            yield reported(names[module], module, layer, before, self._notes[module])

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ValueError(f"{name}: got a weight {list(found)}, want {list(wanted)}, that of the model's layer")


def left_in(model: nn.Module, unpacked: Container[str] = ()) -> tuple[ReportedLayer, ...]:
    """Returns the layers whose weights are in 16 bits: the checkpoint stores them so, or they were unpacked."""
    found, left = survey(model, ()), []
    for layer in found.left:
        if layer.kind not in (QuantizedLinear.__name__, QuantizedExperts.__name__):
            reason = f"unpacked to 16 bits: {layer.reason}" if layer.name in unpacked else layer.reason
            left.append(replace(layer, reason=reason, counts=False))
    for module, (name, *_) in found.places.items():
        nbytes = sum(weight_bytes(part) for part in module.modules())
        left.append(ReportedLayer(name, type(module).__name__, nbytes, 0, "of 16 bits in the checkpoint", False))
    return tuple(left)


def _unused(model: torch.nn.Module, keys: Iterable[str]) -> Callable[[str], bool]:
    """Returns a function from a tensor's name to whether the model ignores the tensor.

    A model ignores tensors that its class names, such as DeepSeek-V3's layers for multi-token prediction. A model
    without a head ignores the head's tensors.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    prefix = f"{model.base_model_prefix}." if getattr(model, "base_model", None) is model else "."
    own = prefix if any(key.startswith(prefix) for key in keys) else ""
    return lambda key: not key.startswith(own) or any(pattern.search(key) for pattern in patterns)


def path_of(path: object) -> Path:
    """Returns ``path`` as a Path. Raises TypeError if it is no path."""
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, want the path of a file or directory")
    return Path(path)


def look_into(
    path: Path, config: Config | None, activations: ModelActivations | None
) -> tuple[Headers, Config, dict[str, LayerFormat]]:
    """Reads a checkpoint's headers and configuration, and finds its quantised layers. Arguments are those of
    `load_safetensors`."""
    entries = with_common_names(read_headers(path))
    config = read_config(path) if config is None else checked("config", config)
    if activations not in (None, "fp8", "16bit"):
        raise ValueError(f"activations: got {activations!r}, want None (as the checkpoint declares), 'fp8' or '16bit'")
    return entries, config, find_layers(entries, config)


def read_layers(
    entries: Mapping[str, Entry],
    layers: Mapping[str, LayerFormat],
    config: Config,
    options: dict[str, Any],
    experts: Container[str] = (),
) -> Iterator[tuple[str, QuantizedLinear | QuantizedExperts, Rounding]]:
    """Yields (name, layer, rounding) of layers that were found, each read when it is requested.

    options: dtype, device and activations of `load_safetensors`. experts: names of layers that become parts of stacked
    experts; their activations are set later, for the whole stack.
    """
    own_options = {name: options[name] for name in ("dtype", "device")}
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
                return handles[file].get_tensor(entries[key].key)
            except SafetensorError as error:
                raise ValueError(f"{key}: got {file.name}, which is damaged ({error}), want a whole file") from error

        for name, form in layers.items():
            own = (*form.required, *form.optional)
            tensors = {each: read(join(name, each)) for each in own if join(name, each) in entries}
            bias = read(join(name, "bias")) if join(name, "bias") in entries else None
            try:
                own_config = config_of(config, name) | said_of(entries, name)
                converted = form.convert(tensors, own_config, **own_options)
                stacked = isinstance(converted, PackedExperts)
                layer = QuantizedExperts(converted, bias) if stacked else QuantizedLinear(converted, bias)
                rounding = Rounding(options["activations"], declared_activations(own_config, name))
                if isinstance(layer, QuantizedLinear) and name not in experts:
                    rounding.set(layer)
                    if layer.activations is not None:
                        layer.activation_scale = rounding.scale(name, entries, read, layer.codes.device)
            except (TypeError, ValueError) as error:
                own = join(name, str(error).partition(":")[0])
                file = entries.get(own, entries[join(name, form.mark)]).file.name
                raise type(error)(f"{join(name, str(error))} (in {file})") from error
            del tensors, bias  # what was read is not kept while the caller works
            yield name, layer, rounding
