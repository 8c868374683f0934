"""Quantised models through transformers' own calls: `save_pretrained` and `from_pretrained`.

    import cute_kernels.integrations.hf_quantizer as quantizer

    quantizer.register()
    cute_kernels.quantize_model(model).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)  # the same layers, the same bytes

    config = quantizer.CuteKernelsConfig(bits=4, group_size=128)  # or quantised while it is loaded
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)

Without `register` transformers does not know the method: it only logs this, and goes on with random weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cute_kernels.arguments import check_matrix_shape
from cute_kernels.formats.weights import WeightFormat, integers, weight_format
from cute_kernels.gemm.experts.blocks import is_moe_block, refusal
from cute_kernels.gemm.experts.module import OfExperts, QuantizedExperts, layer_for
from cute_kernels.gemm.experts.stored import is_experts, known_experts
from cute_kernels.gemm.module import EXTRA_NAMES, QuantizedLinear, is_conv1d
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import check_options
from cute_kernels.gemm.weight import TILE_BYTES, TILE_N, PackedWeight, fitted, num_groups, padded_shape
from cute_kernels.model_config import (
    METHOD,
    describe_layers,
    describe_when_saved,
    forms_of,
    keep_vocabulary,
    meta_tensor,
    untie_quantised,
)
from cute_kernels.model_layers import is_dense, swap
from cute_kernels.models import quantize_model
from cute_kernels.saved_names import keep_names
from layouts.weights import hopper

FormT = TypeVar("FormT")
_OPTIONS = ("bits", "group_size", "zero_point", "skip", "batch_invariant")
_FORMAT = "format"
_KEPT_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "dtype_plan")
"""Attributes in which a model names modules that transformers loads in fp32. Release 5.0.0 reads the last attribute,
5.17 the other two."""


class CuteKernelsConfig(QuantizationConfigMixin):
    """How the layers of a model are quantised. For a saved model it has each layer's form, for a dense model it has the
    options of quantisation.

    Args:
        bits, group_size, zero_point, skip, batch_invariant: as for `cute_kernels.quantize_model`, for a dense model
            that is quantised while it is loaded.
        linear, experts: for a saved model, the fields that `cute_kernels.model_config.describe_layers` made. A saved
            model's configuration has no other arguments.
    """

    def __init__(self, quant_method: str = METHOD, **fields: Any) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method: got {quant_method!r}, want {METHOD!r}")
        vars(self)["quant_method"] = METHOD  # transformers declares it as one of its own methods
        self.layers: dict[str, Any] | None = None
        self.options: dict[str, Any] = {}
        if "linear" in fields or "experts" in fields:
            self.layers = {"quant_method": METHOD, **fields}
            for kind in ("linear", "experts"):
                list(forms_of(self.layers, kind))
            return
        unknown = sorted(fields.keys() - {*_OPTIONS})
        if unknown:
            found = f"{unknown[0]}: got an option of that name, want {', '.join(_OPTIONS)}"
            raise ValueError(f"{found}; quantize_model takes other formats")
        self.options = {"bits": 4, "group_size": 128, "zero_point": False} | fields
        check_options(self.options["bits"], self.options["group_size"], self.options["zero_point"], None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries of config.json."""
        return {"quant_method": METHOD, **self.options} if self.layers is None else dict(self.layers)

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def prepare(self, model: nn.Module) -> None:
        """Does nothing; a subclass may change the model's skeleton here, before its weights arrive."""

    def finish(self, model: nn.Module) -> None:
        """Quantises a model that was loaded dense."""
        quantize_model(model, **self.options)


class CuteKernelsQuantizer(HfQuantizer):
    """transformers' quantiser for the method "cute_kernels". It puts quantised layers into a saved model's skeleton and
    checks the loaded tensors, or it quantises a dense model."""

    requires_calibration = False

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError("device_map: got layers on the disk, want quantised layers on GPUs or a CPU")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns ``dtype``. Raises ValueError if a saved model's quantised layers were made for another dtype."""
        found = {form["dtype"] for kind in ("linear", "experts") for _, form in self._forms(kind)}
        if self.pre_quantized and len(found) == 1 and dtype not in (None, *found):
            (wanted,) = found
            raise ValueError(f"dtype: got {dtype}, want {wanted}, that of the quantised layers' activations")
        return dtype

    @property
    def _asked(self) -> CuteKernelsConfig:
        assert isinstance(self.quantization_config, CuteKernelsConfig)
        return self.quantization_config

    def _forms(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        layers = getattr(self.quantization_config, "layers", None)
        return [] if layers is None else list(forms_of(layers, kind))

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: object) -> nn.Module:
        if not self.pre_quantized:
            self._asked.prepare(model)
            return model
        if getattr(self.quantization_config, "layers", None) is None:
            raise ValueError(
                "quantization_config: got no forms of layers, want those that quantize_model puts into a saved "
                "model's config.json"
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        made: dict[nn.Module, nn.Module] = {}
        linear = dict(_placed(model, modules, self._forms("linear")))
        for name, form in linear.items():
            _swap(model, name, made, modules, lambda dense, form=form: _empty_linear(dense, form))
        pairs: dict[str, dict[str, dict[str, Any]]] = {}
        for name, form in self._forms("experts"):
            parent, _, own = name.rpartition(".")
            pairs.setdefault(parent, {})[own] = form
        experts = dict(_placed(model, modules, pairs.items()))
        for name, pair in experts.items():
            _swap(model, name, made, modules, lambda block, pair=pair: _empty_moe(block, pair))
        untie_quantised(model)
        parts = [f"{name}.{own}" for name, pair in experts.items() for own in pair]
        self._own_patterns = _load_as_saved(model, [*linear, *parts])
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        if self.pre_quantized:
            for name, module in model.named_modules():
                if isinstance(module, (QuantizedLinear, QuantizedExperts)):
                    _check_loaded(name, module)
            for attribute, patterns in self._own_patterns.items():
                setattr(model, attribute, patterns)
            keep_names(model)
            keep_vocabulary(model)
            describe_when_saved(model)
        else:
            self._asked.finish(model)
            self.pre_quantized = True
        self.quantization_config = CuteKernelsConfig(**describe_layers(model))  # an old model has other formats now
        model.config.quantization_config = self.quantization_config
        return model

    def is_serializable(self, *_: object, **__: object) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside the layers are

    @property
    def is_compileable(self) -> bool:
        return True


def register() -> None:
    """Makes `from_pretrained` know the quantisation method "cute_kernels". May be called again."""
    if AUTO_QUANTIZATION_CONFIG_MAPPING.get(METHOD) is not CuteKernelsConfig:
        register_quantization_config(METHOD)(CuteKernelsConfig)
    if AUTO_QUANTIZER_MAPPING.get(METHOD) is not CuteKernelsQuantizer:
        register_quantizer(METHOD)(CuteKernelsQuantizer)


# -- skeletons ---------------------------------------------------------------------------------------------------------


def _placed(model: Any, modules: Container[str], layers: Iterable[tuple[str, FormT]]) -> Iterator[tuple[str, FormT]]:
    """Yields (name in the model, form) of a saved model's layers.

    As transformers does it, a model without a head takes the layers of one with a head, and the reverse. A head's own
    layers are then left out.
    """
    layers, prefix = list(layers), f"{model.base_model_prefix}."
    has_head = model.base_model is model and any(name.startswith(prefix) for name, _ in layers)
    for name, form in layers:
        found = next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in modules), name)
        if found in modules or not has_head or name.startswith(prefix):
            yield found, form


def _swap(
    model: nn.Module,
    name: str,
    made: dict[nn.Module, nn.Module],
    modules: dict[str, nn.Module],
    make: Callable[[nn.Module], nn.Module],
) -> None:
    module = modules.get(name)
    if module is None:
        raise ValueError(f"{name}: got no such layer in {type(model).__name__}, want the model that was saved")
    if module not in made:
        try:
            made[module] = make(module).train(module.training)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    swap(model, name, module, made[module])


def _format_of(form: dict[str, Any]) -> WeightFormat:
    if "format" in form:
        return weight_format(form["format"])
    return integers(form["bits"], form["group_size"], "zeros" in form["tensors"])


def _empty_linear(dense: Any, form: dict[str, Any]) -> QuantizedLinear:
    if not is_dense(dense):
        raise TypeError(f"got {type(dense).__name__} in the model, want an nn.Linear")
    shape = tuple(dense.weight.shape)
    shape = (shape[1], shape[0]) if is_conv1d(dense) else shape
    tensors = _empty_tensors(shape, form)
    bias = torch.empty(shape[0], dtype=form["dtype"], device="meta") if "bias" in form["tensors"] else None
    weight = PackedWeight(**tensors, format=_format_of(form), shape=shape, check_values=False)
    layer = QuantizedLinear(weight, bias)
    if "shifts" in form["tensors"]:  # of a model saved before weights had floating zero points
        groups = -(-shape[1] // (form["group_size"] or shape[1]))
        layer.register_buffer("shifts", torch.empty(shape[0], groups, dtype=torch.float32, device="meta"))
    layer.batch_invariant, layer.activations = form["batch_invariant"], form.get("activations")
    if "activation_scale" in form["tensors"]:
        layer.activation_scale = torch.empty((), dtype=torch.float32, device="meta")
    _expect_format(layer, weight.state_dict()[_FORMAT])
    return layer


def _empty_moe(block: Any, pair: dict[str, dict[str, Any]]) -> OfExperts:
    """Makes a quantised layer with tensors on the meta device, for a mixture of experts or for a module of experts."""
    weights = getattr(block, "experts", block)
    known = known_experts(weights)
    if known is None or not (is_experts(block) or is_moe_block(block)):
        raise TypeError(f"got {type(block).__name__} in the model, want a mixture of experts that is served")
    if (reason := refusal(block)) is not None:
        raise TypeError(f"got a {type(block).__name__} in the model that is not served: {reason}")
    if pair.keys() != {"gate_up", "down"}:
        raise ValueError(f"got {', '.join(sorted(pair))}, want gate_up and down")
    experts = {}
    biases: dict[str, torch.Tensor] = {}
    kind = known[0]
    count, hidden, inner = kind.sizes(weights)
    for own, n, k in (("gate_up", kind.rows(inner), hidden), ("down", hidden, inner)):
        form = pair[own]
        if ("bias" in form["tensors"]) != kind.biased:
            raise ValueError(f"got experts {'without' if kind.biased else 'with'} biases, want the model's")
        tensors: dict[str, Any] = {
            name: None if tensor is None else tensor.new_empty((count, *tensor.shape))
            for name, tensor in _empty_tensors((n, k), form).items()
            if name in ("codes", "scales", "zeros")
        }
        experts[own] = PackedExperts(**tensors, format=_format_of(form), shape=(n, k), check_values=False)
        biases[own] = meta_tensor((count, n), form["dtype"])
    kept = (biases["gate_up"], biases["down"]) if kind.biased else None
    layer = layer_for(block, known, **experts, biases=kept)
    layer.batch_invariant, layer.activations = pair["down"]["batch_invariant"], pair["down"].get("activations")
    for own, weight in experts.items():
        _expect_format(getattr(layer, own), weight.state_dict()[_FORMAT])
    return layer


def _empty_tensors(shape: tuple[int, int], form: dict[str, Any]) -> dict[str, Any]:
    """Makes the tensors of a `PackedWeight` on the meta device."""
    found, dtype = _format_of(form), form["dtype"]
    check_matrix_shape("shape", shape)
    n_pad, k_pad = padded_shape(shape, found.group_size)
    groups = num_groups(shape, found.group_size)
    per_group, stored = ((n_pad // TILE_N, rows, TILE_N) for rows in (groups, groups + found.more_groups))

    def empty(size: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind, device="meta")

    optional = {
        "zeros": lambda: empty(per_group, torch.uint8),
        "perm": lambda: empty((shape[1],), torch.int32),
        "input_scale": lambda: empty((shape[1],), dtype),
    }
    tensors = {name: make() if name in form["tensors"] else None for name, make in optional.items()}
    codes = empty((n_pad // TILE_N, k_pad // hopper.tile_k(found.bits), TILE_BYTES), torch.uint8)
    return {"codes": codes, "scales": empty(stored, found.scale_dtype(dtype)), **tensors}


def _load_as_saved(model: nn.Module, names: list[str]) -> dict[str, Any]:
    """Makes transformers load these layers' tensors in the dtypes that they were saved in. Returns the model's changed
    attributes with their earlier values.

    Otherwise transformers would convert tensors whose names match the model's patterns for fp32, such as T5's ``wo``
    and HYV4's ``scale``. The patterns are changed so that they match no tensor of these layers. transformers reads "*"
    in a pattern as ".*", so the changed patterns use no "*" of their own.
    """
    ours = "|".join(map(re.escape, names))
    found = {name: value for name in _KEPT_IN_FP32 if (value := getattr(model, name, None))}
    if names:
        for name, patterns in found.items():
            others = {pattern: rf"^(?!(?:{ours})\.[^.]+$).{{0,}}(?:{pattern})" for pattern in patterns}
            is_plan = isinstance(patterns, Mapping)
            setattr(model, name, {others[k]: v for k, v in patterns.items()} if is_plan else set(others.values()))
    return found


# -- what was loaded ---------------------------------------------------------------------------------------------------


def _expect_format(layer: nn.Module, wanted: torch.Tensor) -> None:
    """Adds the buffer "format" to a layer, so that transformers loads it. `_check_loaded` removes the buffer again."""
    layer.register_buffer(_FORMAT, torch.empty_like(wanted, device="meta"))


def _check_loaded(name: str, layer: Any) -> None:
    """Raises ValueError unless all of a layer's tensors came from the files and match the configuration.

    transformers fills a missing tensor with random values and only reports it in a table.
    """
    for own, tensor in layer._buffers.items():
        if tensor is not None and (tensor.is_meta or not getattr(tensor, "_is_hf_initialized", False)):
            raise ValueError(f"{name}.{own}: got no such tensor in the files, want what config.json says")
    found, wanted = layer._buffers.pop(_FORMAT).tolist(), layer.weight.state_dict()[_FORMAT].tolist()
    if found != wanted:
        raise ValueError(f"{name}.{_FORMAT}: got {found}, want {wanted}, as config.json says")
    weight, shifts = layer.weight, layer._buffers.pop("shifts", None)
    tensors = {own: tensor for own, tensor in layer._buffers.items() if own not in EXTRA_NAMES}
    layer.weight_format = fitted(layer.weight_format, layer.scales)  # of a model saved before there were two of MXFP4
    try:  # once with a look at the values
        type(weight)(**tensors, format=layer.weight_format, shape=layer.shape)
        if shifts is not None:
            layer.fold(shifts)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}.{error}") from error
