"""Linear layers of vLLM whose weights are FP8, MXFP4 or NVFP4: a seam that is asked for by name alone.

A method of vLLM's hands loaded weights to the kernel that it has chosen. Here they are packed instead, with the scale
of each part of a fused layer, of which vLLM keeps the largest; then the method's kernel is this one.

Activations stay in 16 bits. Where vLLM rounds them to FP8, as the checkpoint declares, the environment has to say so.
Activations that are declared in FP4 vLLM leaves in 16 bits on Hopper, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import FP4_DTYPE

from cute_kernels.formats.weights import FP8, FP8_BLOCK, MXFP4, NVFP4
from cute_kernels.formats.weights.base import spelling
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.integrations.checkpoints.float_codes import Names, format_of_codes, from_float_codes
from cute_kernels.integrations.engine_linear import Form, LayerTensors
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, prepare
from cute_kernels.integrations.vllm.linear import Products, problem_of
from cute_kernels.integrations.vllm.plugin import note_served
from cute_kernels.integrations.vllm.seams import packs_here, replace_once
from cute_kernels.integrations.vllm.versions import Interface

FORMATS = (FP8, FP8_BLOCK, MXFP4, NVFP4)


@dataclass(frozen=True)
class Method:
    """A method of vLLM's. kernel: its attribute that multiplies. key: (method) to vLLM's word for what activations are
    rounded to, None for nothing."""

    kernel: str
    key: Callable[[Any], Any]


METHODS = {
    "Fp8LinearMethod": Method("fp8_linear", lambda method: method.activation_quant_key),
    "CompressedTensorsW8A8Fp8": Method("fp8_linear", lambda method: method.activation_quant_key),
    "CompressedTensorsW8A16Fp8": Method("linear_kernel", lambda method: None),
    "CompressedTensorsW4A4Fp4": Method("kernel", lambda method: None),
    "CompressedTensorsW4A4Mxfp4": Method("kernel", lambda method: method.kernel.config.activation_quant_key),
    "ModelOptLinearMethod": Method("kernel", lambda method: method.spec.activation),
}
"""By the name of the method's class."""


class FloatProducts(Products):
    """In the place of a kernel of vLLM's, whose ``config`` it keeps. names: of the layer's codes and scales."""

    def __init__(self, form: Form, names: Names, config: object) -> None:
        self.names, self.config = names, config
        self.note(form)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = (getattr(layer, name) for name in (self.names.codes, self.names.scales))
        return self.multiply(x, LayerTensors(codes, scales, None, None), bias)


def serve(kind: Method, method: Foreign, layer: Foreign) -> str | None:
    """Packs a loaded layer and gives its method these products; or leaves all as it is, and says why.

    Raises:
        ValueError: the layer was served, and is loaded again with what cannot be.
    """
    before = getattr(method, kind.kernel)
    reason = _reason_of_engine(kind, method, layer)
    if reason is None:
        names, tensors = _tensors(layer)
        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        try:
            form = _form(names, tensors, dtype)
            reason = _missing_kernels(form, tensors[names.codes].device)
            if reason is None:
                _put(kind, method, layer, FloatProducts(form, names, before.config), tensors)
        except (TypeError, ValueError) as error:
            reason = str(error)
            note_served(f"linear left {getattr(layer, 'prefix', '')}")  # by values, which graphs do not show
    if reason is not None and isinstance(before, FloatProducts):
        raise ValueError(f"{getattr(layer, 'prefix', 'layer')}: got weights loaded again that do not fit: {reason}")
    return reason


def _reason_of_engine(kind: Method, method: Foreign, layer: Foreign) -> str | None:
    if (left := prepare.why_left("float_linear")) is not None:
        return left
    key = kind.key(method)
    rounded = key is not None and key.dtype != FP4_DTYPE
    dequantised = envs.VLLM_BATCH_INVARIANT and hasattr(method, "block_quant") and not method.block_quant
    wrong = {
        "--linear-backend": _names_backend(),
        f"activations in FP8 (in 16 bits with {environment.ACTIVATIONS}={environment.IN_16_BITS})": rounded
        and not environment.keeps_activations(),
        "VLLM_BATCH_INVARIANT, under which vLLM dequantises such layers": dequantised,
        "weights that the model's own kernels read": bool(getattr(layer, "is_bmm", False)),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    return f"{', '.join(found)} not supported" if found else None


def _names_backend() -> bool:
    """Whether the command line names kernels of linear layers."""
    config = getattr(get_current_vllm_config_or_none(), "kernel_config", None)
    by_scheme = getattr(config, "linear_backend_per_quant", None) or {}
    return {getattr(config, "linear_backend", "auto"), *by_scheme.values()} != {"auto"}


def _tensors(layer: Foreign) -> tuple[Names, dict[str, torch.Tensor]]:
    """A loaded layer's tensors as importers take them. Scales of the parts of a fused layer become those of rows."""
    there = {name: each.data for name, each in layer.named_parameters(recurse=False)}
    names = Names(
        next(name for name in ("weight_packed", "weight") if name in there),
        next(name for name in ("weight_scale_inv", "weight_scale") if name in there),
        next((name for name in ("weight_global_scale", "weight_scale_2") if name in there), ""),
        divides="weight_global_scale" in there,
    )
    for name in (names.scales, names.second):
        if name and there[name].dim() == 1 and len(there[name]) == len(layer.logical_widths):
            there[name] = there[name].repeat_interleave(torch.tensor(layer.logical_widths, device=there[name].device))
        elif name and there[name].dim() == 4:  # ModelOpt's blocks
            there[name] = there[name].flatten(2).flatten(0, 1)
    return names, there


def _form(names: Names, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Form:
    codes = tensors[names.codes]
    found = format_of_codes(names, codes, tensors[names.scales])
    if found not in FORMATS or DTYPES.get(dtype) not in found.dtypes:
        wanted = ", ".join(map(spelling, FORMATS))
        raise ValueError(f"{spelling(found)} weights for activations in {dtype}; supported: {wanted}, FP4 with bf16")
    return Form(found, codes.shape[0], codes.shape[1] * 8 // found.bits, dtype)


def _missing_kernels(form: Form, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return prepare.linear_reason(problem_of(form), prepare.engine_rows(), prepare.index_of(device))


def _put(
    kind: Method, method: Foreign, layer: Foreign, products: FloatProducts, tensors: dict[str, torch.Tensor]
) -> None:
    names = products.names
    weight = products.settled(layer, from_float_codes(tensors, names, dtype=products.form.dtype))
    for name, tensor in ((names.codes, weight.codes), (names.scales, weight.scales)):
        replace_parameter(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    if weight.codes.is_cuda:
        prepare.load_noted(weight.device)
    vars(layer).pop("_input_quant_key", None)  # nobody quantises activations for it beforehand
    setattr(method, kind.kernel, products)
    if hasattr(method, "use_marlin"):
        method.use_marlin = True  # who wants the weight as it was (MLA) multiplies with the identity then


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Makes vLLM's methods for such layers use these products; returns what was done."""
    for module, name in interface.float_linear:
        made = functools.partial(packs_here, "FP8, MXFP4 or NVFP4 layers", functools.partial(serve, METHODS[name]))
        replace_once(module, f"{name}.process_weights_after_loading", made)
    return "linear layers in FP8, MXFP4 and NVFP4 run here, with activations in 16 bits"
