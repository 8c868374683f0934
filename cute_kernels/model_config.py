"""The "quantization_config" in a saved model's config.json, which describes its quantised layers.

It lists the form of each layer, so that a loader can put fitting layers into an empty model before tensors are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from cute_kernels.gemm.experts.module import OfExperts, QuantizedExperts
from cute_kernels.gemm.module import EXTRA_NAMES, QuantizedLinear
from cute_kernels.gemm.weight import FORMAT_VERSION, SCALE_DTYPES, TENSOR_NAMES

METHOD = "cute_kernels"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SCALE_DTYPES}


def describe_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the "quantization_config" of a model, for its `QuantizedLinear` layers and its mixtures of experts.

    "linear" and "experts" are lists of forms, each with the names of its layers. A form of an integer format has the
    keys "bits" and "group_size"; a form of another format has "format". All forms have "dtype", "tensors" (the optional
    tensors that exist) and "batch_invariant". If a layer's activations are rounded, its form also has "activations".
    """
    linear: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    experts: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            linear.setdefault(_form(module, module, (*TENSOR_NAMES[2:], *EXTRA_NAMES)), []).append(name)
        elif isinstance(module, OfExperts):
            for own in ("gate_up", "down"):
                form = _form(getattr(module, own), module, ("zeros", "bias"))
                experts.setdefault(form, []).append(f"{name}.{own}")
    return {
        "quant_method": METHOD,
        "format_version": FORMAT_VERSION,
        "linear": [{**_listed(form), "names": names} for form, names in linear.items()],
        "experts": [{**_listed(form), "names": names} for form, names in experts.items()],
    }


def record_layers(model: Any) -> str | None:
    """Puts the result of `describe_layers` into a transformers model's configuration. Returns None, or the reason why
    it did not.

    A model without a transformers configuration is not changed, as its state dict is enough. A quantised output layer
    is no longer tied to the embedding. If nothing else is tied, `tie_word_embeddings` becomes False.
    """
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_dict") and hasattr(config, "save_pretrained")):
        return None
    there = getattr(config, "quantization_config", None)
    method = there.get("quant_method") if isinstance(there, Mapping) else getattr(there, "quant_method", None)
    if there is not None and method != METHOD:
        return (
            f"its configuration has a quantization_config of {str(method)!r}, which stays: save_pretrained would not "
            "say which layers are quantised here, keep the state dict instead"
        )
    config.quantization_config = describe_layers(model)
    if hasattr(model, "save_pretrained"):
        try:
            from cute_kernels.saved_names import keep_names  # wants transformers, which the model is of
        except ImportError:  # one before 5.0, which writes every model by its modules' names
            pass
        else:
            keep_names(model)
        describe_when_saved(model)
    keep_vocabulary(model)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    others_are_tied = bool(untie_quantised(model))
    if isinstance(output, QuantizedLinear) and not others_are_tied:
        for each in {id(each): each for each in (config, config.get_text_config())}.values():
            if getattr(each, "tie_word_embeddings", False):
                each.tie_word_embeddings = False
    return None


class OfModel:
    """A function of a model that takes the place of a method of the model. It does not keep the model alive, and a copy
    of the model gets one of its own."""

    def __init__(self, function: Callable[..., object], model: nn.Module) -> None:
        self._function, self._model = function, ref(model)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(self._model(), *args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return OfModel, (self._function, self._model())


def describe_when_saved(model: nn.Module) -> None:
    """Lets a transformers model's ``save_pretrained`` describe the layers as they are at that time: their formats and
    settings may have changed since they were recorded."""
    vars(model).setdefault("save_pretrained", OfModel(_save, model))


def _save(model: Any, *args: object, **kwargs: object) -> object:
    """Saves a model as its own ``save_pretrained`` does, after its layers were recorded again."""
    record_layers(model)
    return type(model).save_pretrained(model, *args, **kwargs)


def keep_vocabulary(model: Any) -> None:
    """Lets a transformers model with a quantised output layer resize its vocabulary. transformers' own code needs a
    dense output layer, and fails only after it has changed the embedding."""
    if hasattr(model, "get_output_embeddings") and isinstance(model.get_output_embeddings(), QuantizedLinear):
        model.resize_token_embeddings = OfModel(_resized, model)


def _resized(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Resizes a model's vocabulary, as its own ``resize_token_embeddings`` does. If the number of tokens changes, the
    output layer is dequantised to 16 bits."""
    output = model.get_output_embeddings()
    if isinstance(output, QuantizedLinear):
        if new_num_tokens in (None, output.out_features) and not any(args) and not kwargs.get("pad_to_multiple_of"):
            return model.get_input_embeddings()
        with torch.device("meta"):
            dense = nn.Linear(output.in_features, output.out_features, bias=output.bias is not None)
        dense.weight = nn.Parameter(output.dequantize())
        if output.bias is not None:
            dense.bias = nn.Parameter(output.bias)
        model.set_output_embeddings(dense)
        record_layers(model)
        text = "the output layer was quantised and is of 16 bits now: quantise it again (accelerate's output_layer)"
        warnings.warn(f"resize_token_embeddings, {type(model).__name__}: {text}", UserWarning, stacklevel=2)
    return type(model).resize_token_embeddings(model, new_num_tokens, *args, **kwargs)


def untie_quantised(model: nn.Module) -> Mapping[str, str]:
    """Makes a transformers model forget that quantised layers' weights were tied to others. Returns the weights that
    are still tied."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    dense = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for names in list(tied.items()):
        if not dense.issuperset(names):
            del tied[names[0]]
    return tied


def _form(
    layer: QuantizedLinear | QuantizedExperts,
    owner: QuantizedLinear | OfExperts,
    names: tuple[str, ...],
) -> tuple[tuple[str, Any], ...]:
    """Returns the form of a layer as pairs (key, value). owner: the module that multiplies with the layer's weight.
    names: names of optional tensors."""
    form, there = layer.weight_format, tuple(name for name in names if getattr(layer, name, None) is not None)
    dtype = str(form.activation_dtype(layer.scales.dtype)).removeprefix("torch.")
    found = {"dtype": dtype, "tensors": there, "batch_invariant": bool(owner.batch_invariant)}
    rounded = {} if owner.activations is None else {"activations": owner.activations}
    return tuple((form.options | found | rounded).items())


def _listed(form: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in form}


def forms_of(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, form) of each layer of a kind, "linear" or "experts"; a form's dtype is a torch.dtype.

    Raises:
        TypeError, ValueError: the configuration is not one that `describe_layers` makes; the message says where.
    """
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format_version: got {config.get('format_version')!r}, want {FORMAT_VERSION}")
    groups = config.get(kind)
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"{kind}: got {groups!r}, want a list of forms, each with names")
    for group in groups:
        codes = {"format"} if "format" in group else {"bits", "group_size"}
        wanted = codes | {"dtype", "tensors", "batch_invariant", "names"}
        if (
            group.keys() - {"activations"} != wanted
            or group["dtype"] not in _DTYPES
            or not isinstance(group["names"], list)
        ):
            raise ValueError(f"{kind}: got {dict(group)!r}, want {', '.join(sorted(wanted))}")
        form = {key: value for key, value in group.items() if key != "names"}
        for name in group["names"]:
            yield name, form | {"dtype": _DTYPES[group["dtype"]]}


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
