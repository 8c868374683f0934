"""The activation format that a checkpoint declares for a layer, and whether the layer's products use it.

FP8 products support activations in E4M3 whose scales are no finer than the products' own scales. For other
declarations, products stay in 16 bits, and the model's report says why. A caller may ask for FP8 or 16 bits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch

from cute_kernels.gemm.experts.module import OfExperts
from cute_kernels.gemm.module import QuantizedLinear
from cute_kernels.gemm.operands.fp8 import check_scale
from cute_kernels.gemm.operands.fp8_config import X_GROUP, fp8_problem, x_group
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.integrations.checkpoints.configuration import FP8, Config, block_in
from cute_kernels.integrations.checkpoints.layer_formats import OWN, STATIC_SCALES, join
from cute_kernels.model_config import METHOD
from cute_kernels.names import ModelActivations

E4M3, STATIC, DYNAMIC = "FP8", "static", "dynamic"
Read = Callable[[str], torch.Tensor]
"""Reads a tensor of a checkpoint."""


class Declared(NamedTuple):
    """The format to which a checkpoint rounds a layer's inputs.

    Attributes:
        kind: `E4M3`, or another format's name.
        scales: `STATIC`, `DYNAMIC`, or "" if the checkpoint does not say which.
        group_size: the number of consecutive inputs that share a scale; 0: one scale per row, or one for all of x.
    """

    kind: str
    scales: str = ""
    group_size: int = 0

    def __str__(self) -> str:
        said = [*filter(None, (self.scales, f"in groups of {self.group_size}" if self.group_size else ""))]
        return f"{self.kind} ({', '.join(said)})" if said else self.kind


_OF_MODELOPT = {
    "FP8": Declared(E4M3, STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": Declared(E4M3, DYNAMIC),
    "NVFP4": Declared("FP4"),
    "W4A8_MXFP4_FP8": Declared(E4M3, DYNAMIC),
    "MXFP8": Declared(E4M3, DYNAMIC, 32),
}
# By words of what a tensor's attributes say of activations.
_OF_TORCHAO = {"nvfp4": "FP4", "float4": "FP4", "e5m2": "E5M2", "float8": E4M3, "int8": "INT8"}


def declared_activations(config: Config, name: str) -> Declared | None:
    """Returns the format to which a checkpoint rounds a layer's inputs; None if it declares no format known here.

    config: the layer's configuration from `config_of`; for torchao, the caller adds the entry "tensor" of `said_of` to
    it.
    """
    attributes = (config.get("tensor") or {}).get("_data")
    if isinstance(attributes, Mapping):
        texts = (attributes.get(key) for key in ("act_quant_kwargs", "activation_quantization", "activation_dtype"))
        rounding = " ".join(map(str, texts)).lower()
        kinds = [kind for word, kind in _OF_TORCHAO.items() if word in rounding]
        block = block_in(rounding.partition("block_size'")[2].partition("'")[0])
        return Declared(kinds[0], DYNAMIC, block[1]) if kinds else None
    said = (config.get("group") or {}).get("input_activations")
    if isinstance(said, Mapping):
        kind = "FP" if str(said.get("type")).lower() == "float" else "INT"  # which it is where nothing says so
        kind += f"{said.get('num_bits', 8)}{' with zero points' if said.get('symmetric') is False else ''}"
        block = block_in(said.get("block_structure") or said.get("group_size"))
        return Declared(kind, DYNAMIC if said.get("dynamic") else STATIC, block[1])
    if config.get("quant_method") in FP8:
        scales = str(config.get("activation_scheme") or DYNAMIC)
        return Declared(E4M3, scales, block_in(config.get("weight_block_size"))[1])
    if config.get("quant_method") == METHOD:
        for form in (*config.get("linear", ()), *config.get("experts", ())):
            if name in form["names"] and form.get("activations") == "fp8":
                return Declared(E4M3, STATIC if STATIC_SCALES[1] in form["tensors"] else DYNAMIC)
    return _OF_MODELOPT.get(str(config.get("quant_algo")))


class Rounding(NamedTuple):
    """How a layer's products round activations.

    Attributes:
        asked: the caller's choice, as `load_safetensors` takes it.
        declared: the checkpoint's format, or None.
    """

    asked: ModelActivations | None
    declared: Declared | None

    def reason(self, layer: QuantizedLinear | OfExperts) -> str | None:
        """Returns why a layer's products stay in 16 bits; None if they are in FP8.

        The reason is "" if neither the caller nor the checkpoint wants FP8.
        """
        declared = self.declared if self.asked is None else None
        if self.asked != "fp8" and declared is None:
            return ""
        if declared is not None and declared.kind != E4M3:
            return f"there are none in {declared.kind}"
        if declared is not None and declared.scales == STATIC and isinstance(layer, OfExperts):
            return "experts have no static scales"
        for part in layer.parts:
            form, k = part.weight_format, part.shape[1]
            if (wanted := fp8_problem(form)) is not None:
                return f"FP8 ones want {wanted}"
            if padded_shape(part.shape, form.group_size)[1] < X_GROUP:
                return f"FP8 ones want at least {X_GROUP} inputs"
            if declared is not None and 0 < declared.group_size < (x_group(form) or k):
                return f"FP8 ones have a scale for {f'{X_GROUP} inputs' if x_group(form) else 'a row'}"
        return None

    def set(self, layer: QuantizedLinear | OfExperts) -> str:
        """Sets how a layer rounds its activations. Returns a note: the weight format, the products' number format, and
        who chose them."""
        reason, declared = self.reason(layer), self.declared
        layer.activations = "fp8" if reason is None else None
        why = f" because {reason}" if reason else "" if self.asked is None else " as asked"
        said = " as declared" if reason is None and self.asked is None else "; declared"
        said = "" if declared is None else f"{said}: {declared}"
        return f"{layer.parts[-1].weight_format.title}, {layer.products}{why}{said}"

    def scale(self, name: str, entries: Container[str], read: Read, device: torch.device) -> torch.Tensor | None:
        """Returns a layer's static FP8 scale, or None if it has none.

        The scale is read if the checkpoint declares a static one, or if this package saved the layer with one.
        """
        is_static = self.declared is not None and self.declared[:2] == (E4M3, STATIC)
        ours = join(name, OWN.mark) in entries  # its input_scale is AWQ's
        own = next((own for own in STATIC_SCALES[ours:] if join(name, own) in entries), None)
        if not (is_static or (own and ours)):
            return None
        wanted = "static FP8 activations are declared: activations='16bit' does without"
        if own is None:
            raise ValueError(f"{STATIC_SCALES[ours]}: got no such tensor, want it: {wanted}")
        scale = read(join(name, own)).float()
        try:
            check_scale(scale, scale.device, own)
        except ValueError as error:
            raise ValueError(f"{error}: {wanted}") from error
        return scale.reshape(()).to(device)


def common(found: set[Rounding]) -> Rounding:
    """Returns one `Rounding` for all experts of a layer. If the experts' roundings differ, the result declares a kind
    of activations that no products support, so that products stay in 16 bits.
    """
    one, said = next(iter(found)), sorted(str(each.declared or "16 bits") for each in found)
    return one if len(found) == 1 else Rounding(one.asked, Declared(" and ".join(said)))
