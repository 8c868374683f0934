"""Swaps the layers of a model for quantised ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cute_kernels.arguments import check_flag, check_kind
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.experts.blocks import is_moe_block
from cute_kernels.gemm.experts.module import OfExperts, quantized_experts
from cute_kernels.gemm.module import ModelProgress, QuantizedLinear
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.quantize import DTYPES, chosen_format
from cute_kernels.model_config import record_layers
from cute_kernels.model_layers import check_skip, compiled_from, is_dense, survey, swap, weight_bytes
from cute_kernels.model_report import QuantizationReport, ReportedLayer
from cute_kernels.names import Activations, ModelActivations
from cute_kernels.runtime.device import device_of

_log = logging.getLogger(__name__)


def quantize_model(
    model: nn.Module,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    zero_point: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    skip: Sequence[str] = ("lm_head",),
    progress: ModelProgress | None = None,
    format: WeightFormat | str | None = None,
    activations: ModelActivations | None = None,
) -> nn.Module:
    """Swaps the nn.Linear layers of a model for `QuantizedLinear`, and its mixtures of experts for `QuantizedMoE`.

    It works in place, layer by layer. Each layer's weight is freed before the next layer is quantised, unless another
    object refers to it. A layer that is used several times is quantised once. GPT-2's Conv1D is a Linear, too. Forward
    hooks of a layer are kept. These layers are not changed: subclasses of nn.Linear, since they have their own forward;
    layers whose weight or hooks a quantised layer cannot take over; and experts with a different computation. If a
    mixture of experts does more than `QuantizedMoE`, only its experts are swapped, for `QuantizedRoutedExperts`.
    Routers are not changed. The Linear layers of shared experts are swapped like any other Linear layer.

    ``model.quantization_report`` lists which layers were quantised, and which were not and why
    (`cute_kernels.model_report.QuantizationReport`); print it for a table. There is a UserWarning if nothing was
    quantised, or less than half of the bytes that could be quantised. The configuration of a transformers model gets a
    "quantization_config", with which `from_pretrained` reads the saved model once
    `cute_kernels.integrations.hf_quantizer.register` was called.

    Args:
        bits, group_size, zero_point, dtype, device: as for `quantize_weight`.
        batch_invariant: the new layers' attribute. True: the result of a row (or token) does not depend on other rows.
        skip: layers that are not to be swapped: shell patterns for the qualified name or its last part. Each pattern
            must match a layer. The name of a mixture of experts does not skip the layers within it.
        progress: a function that is called after each layer. Its arguments are the layer's qualified name, the number
            of layers done and the number of all layers.
        format: as for `quantize_weight`.
        activations: "fp8": the new layers round x to E4M3 for products in FP8. None or "16bit": the new layers do not
            round x.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an argument is wrong, or a layer's weight has values that are not finite. The message
            names the argument or the layer. Layers before that layer have been swapped.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    given, model = model, compiled_from(model)
    if is_dense(model):
        raise TypeError("model: got an nn.Linear itself, want a module around it, or QuantizedLinear.from_linear")
    if is_moe_block(model):
        raise TypeError("model: got a mixture of experts itself, want a module around it, or QuantizedMoE.from_block")
    check_skip(model, skip)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: got {type(progress).__name__}, want None or a function")
    form = chosen_format(bits, group_size, zero_point, dtype, format)
    check_flag("batch_invariant", batch_invariant)
    rounded: Activations | None = None if activations == "16bit" else activations
    check_activations(rounded, None, form)
    device = device_of(device)
    found = survey(model, skip)
    if dtype is None:
        _check_activations(found.places, form)
    done: list[ReportedLayer] = []
    total = len(found.places)
    while found.places:
        module = next(iter(found.places))
        names = found.places.pop(module)
        make: Callable[..., Any] = QuantizedLinear.from_linear if is_dense(module) else quantized_experts
        try:
            layer = make(module, bits, group_size, zero_point, dtype, device=device, format=format)
            layer.activations = rounded
        except (TypeError, ValueError) as error:
            raise type(error)(f"{names[0]}: {error}") from error
        layer.batch_invariant = batch_invariant
        if isinstance(layer, QuantizedLinear) and layer.bias is not None:
            layer.bias = layer.bias.clone()  # BERT's output layer shares its own: only one of them would be saved
        for name in names:
            swap(model, name, module, layer)
        done.append(reported(names[0], module, layer, weight_bytes(getattr(module, "experts", module))))
        del module
        if progress is not None:
            progress(names[0], len(done), total)
    _tell(model, QuantizationReport(tuple(done), found.left))
    return given


def reported(
    name: str, swapped: nn.Module, layer: QuantizedLinear | OfExperts, before: int, note: str | None = None
) -> ReportedLayer:
    """Returns the report's entry for a layer that replaces ``swapped``, whose weights have ``before`` bytes.

    note: the entry's note; by default the names of the weight format and of the products.
    """
    parts = layer.parts
    asked = f"{layer.products}{'' if layer.activations is None else ' as asked'}"
    note = f"{parts[-1].weight_format.title}, {asked}" if note is None else note
    packed = sum(part.weight.nbytes for part in parts)
    return ReportedLayer(name, type(swapped).__name__, before, packed, note=note)


def _check_activations(places: dict[nn.Module, list[str]], form: WeightFormat) -> None:
    """Raises TypeError, naming a layer, if the dtype of a weight implies a dtype of x that the format does not
    support.
    """
    for module, names in places.items():
        for parameter in module.parameters():
            if DTYPES.get(parameter.dtype, form.dtypes[0]) not in form.dtypes:
                wanted = " or ".join(form.dtypes)
                raise TypeError(f"{names[0]}: got weights in {parameter.dtype}, want {wanted} for {form.title}")


def _tell(model: torch.nn.Module, report: QuantizationReport) -> None:
    """Keeps a report as an attribute of the model, logs it, records the layers in the model's configuration, and warns
    of problems."""
    vars(model)["quantization_report"] = report
    problem = record_layers(model) if report.quantized else None
    _log.info("%s: %s", type(model).__name__, report.summary)
    for text in (report.warning, problem):
        if text is not None:
            warnings.warn(f"quantize_model, {type(model).__name__}: {text}", UserWarning, stacklevel=3)
