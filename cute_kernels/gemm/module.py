"""`QuantizedLinear`, the quantised linear layer as an nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from cute_kernels.arguments import check_kind, check_tensors
from cute_kernels.formats.weights import IntegerFormat, WeightFormat
from cute_kernels.gemm import fp8, ops
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.gradient import dense_weight, differentiable
from cute_kernels.gemm.operands.fp8 import check_scale
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.packed import OfFormat, Packed
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import quantize_weight, with_shifts
from cute_kernels.gemm.weight import TENSOR_NAMES, PackedWeight, WeightTensors, fitted, has_values
from cute_kernels.names import Activations
from cute_kernels.runtime.operator import new_call

EXTRA_NAMES = ("bias", "activation_scale")  # tensors of a layer that its weight has not

ModelProgress = Callable[[str, int, int], None]
"""Called with a layer's name, how many layers are done and how many there are."""


class OfWeight(OfFormat, nn.Module):
    """The base of modules that hold a packed weight. The state dict has the weight's tensors, "format", and entries of
    the subclass.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    shape: tuple[int, int]
    weight_format: WeightFormat
    tensor_names: ClassVar[tuple[str, ...]]  # buffers that a state dict may hold

    @property
    def _form(self) -> WeightFormat:
        return self.weight_format

    @property
    def weight(self) -> PackedWeight | PackedExperts:
        """The weight; its tensors are the module's."""
        raise NotImplementedError

    def _loaded(self, own: dict[str, torch.Tensor]) -> tuple[WeightFormat, dict[str, torch.Tensor | None]]:
        """Returns the format and buffers for a state dict's tensors. Raises TypeError or ValueError if they do not
        fit."""
        raise NotImplementedError

    def _needed(self) -> list[str]:
        """Returns the names that a state dict must hold besides the weight's tensors. A missing name is reported, and
        the module keeps its own tensor."""
        return [] if self.bias is None else ["bias"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (scales := self._buffers.get("scales")) is not None:  # perhaps pickled when MXFP4 was one format
            self.weight_format = fitted(self.weight_format, scales)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}format"] = self.weight.state_dict()["format"]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        unexpected_keys.extend(prefix + name for name in sorted(own.keys() - {*self.tensor_names, "format"}))
        missing = [name for name in ("codes", "scales", "format") if name not in own]
        missing_keys.extend(prefix + name for name in [*missing, *(name for name in self._needed() if name not in own)])
        if missing:
            return
        try:
            form, tensors = self._loaded(own)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix}{error}")
            return
        self._take(form, tensors, copy=not local_metadata.get("assign_to_params_buffers", False))

    def _take(self, form: WeightFormat, tensors: dict[str, torch.Tensor | None], copy: bool) -> None:
        """Replaces the module's tensors by loaded tensors. With ``copy``, loaded values are copied to the module's
        device. If format, shape and dtype fit, the values go into the existing tensors, so that captured CUDA graphs
        read the new values."""
        codes = tensors["codes"]
        assert codes is not None
        device = codes.device if self.codes.is_meta else self.codes.device
        fits = self.weight_format.includes(form)
        for name, new in tensors.items():
            here = self._buffers[name]
            if new is None or new is here or not copy:
                setattr(self, name, new)
            elif fits and here is not None and not here.is_meta and (here.shape, here.dtype) == (new.shape, new.dtype):
                here.copy_(new)
            else:
                setattr(self, name, new.to(device, copy=True))
        self.weight_format = form


class OfProducts(nn.Module):
    """The base of layers whose products may round x to FP8."""

    batch_invariant: bool = False
    _activations: Activations | None = None

    @property
    def parts(self) -> tuple[OfWeight, ...]:
        """The modules that hold the layer's weights, in the order of its products."""
        raise NotImplementedError

    @property
    def activations(self) -> Activations | None:
        """The format that x is rounded to, as in `cute_kernels.quantized_linear`: None or "fp8". It may be set, and is
        not part of a state dict."""
        return self._activations

    @activations.setter
    def activations(self, value: Activations | None) -> None:
        for part in self.parts:
            check_activations(value, None, part.weight_format, part.shape[1])
        self._activations = value

    @property
    def products(self) -> str:
        """The number format in which the layer multiplies, as reports name it."""
        return "16-bit products" if self._activations is None else "FP8 products"


def is_conv1d(module: object) -> bool:
    """Whether a module is a Conv1D of transformers: y = x W + bias with W [in_features, out_features]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class QuantizedLinear(OfWeight, OfProducts):
    """An nn.Linear with a `PackedWeight`: y = (x * input_scale) W^T + bias. The weight is fixed; x has a gradient.

    The state dict has the tensors of `PackedWeight.state_dict`, including "format", and "bias" and "activation_scale".
    A loaded weight may have another format, but N and K must be the layer's. Loaded tensors are copied, into existing
    tensors if they fit. If a weight lacks a tensor or does not fit, `load_state_dict` reports it and the layer does not
    change. Saved "shifts" become floating zero points.

    Args:
        weight: [out_features, in_features].
        bias: [out_features], or None; kept in the weight's ``dtype``, that of x.
        shifts: floating [out_features, groups of in_features], added to each group of W, or None. The layer's weight
            then has floating zero points in the dtype of its scales: `cute_kernels.formats.weights.shifted`.

    Attributes:
        batch_invariant: as in `cute_kernels.quantized_linear`. False by default; may be set. A state dict does not have
            it.
        activations: as in `cute_kernels.quantized_linear`. None by default; may be set to "fp8". A state dict does not
            have it. With one scale per row of FP8 codes, a layer on a GPU keeps a second copy of the codes. The first
            call that torch's product computes makes the copy, if enough memory is free.
        activation_scale: with "fp8", the scale of all of x, fp32 of one element; None: x has scales of its own.

    Raises:
        TypeError, ValueError: weight or bias is not as above; the message names it.
    """

    perm: torch.Tensor | None
    input_scale: torch.Tensor | None
    activation_scale: torch.Tensor | None
    tensor_names = (*TENSOR_NAMES, *EXTRA_NAMES, "shifts")

    def __init__(
        self, weight: PackedWeight, bias: torch.Tensor | None = None, shifts: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        check_kind("weight", weight, PackedWeight, "a PackedWeight")
        self.shape = weight.shape
        for name in (*TENSOR_NAMES, *EXTRA_NAMES):
            self.register_buffer(name, None)
        self._set(weight, checked_bias(bias, weight, weight.out_features))
        self.fold(shifts)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        bits: int = 4,
        group_size: int | None = 128,
        zero_point: bool = False,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | None = None,
        format: WeightFormat | str | None = None,
    ) -> QuantizedLinear:
        """Makes the layer of ``linear`` and quantises its weight. Other arguments and errors are those of
        `quantize_weight`.

        ``linear`` is an nn.Linear, or a transformers.pytorch_utils.Conv1D: a linear layer of GPT-2, whose weight is
        transposed.
        """
        if not (isinstance(linear, nn.Linear) or is_conv1d(linear)):
            raise TypeError(f"linear: got {type(linear).__name__}, want an nn.Linear")
        own: Any = linear
        w = own.weight.detach()
        options: dict[str, Any] = {"device": device, "format": format}
        weight = quantize_weight(w.T if is_conv1d(linear) else w, bits, group_size, zero_point, dtype, **options)
        layer = cls(weight, None if own.bias is None else own.bias.detach())
        return layer.train(linear.training)

    @property
    def weight(self) -> PackedWeight:
        """The weight; it shares the layer's tensors."""
        tensors: dict[str, Any] = {name: getattr(self, name) for name in TENSOR_NAMES}
        return PackedWeight(**tensors, format=self.weight_format, shape=self.shape, check_values=False)

    @property
    def parts(self) -> tuple[QuantizedLinear]:
        """The layer itself, as the only module that holds a weight."""
        return (self,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes [..., out_features] of x [..., in_features], in x's dtype, which must be the weight's."""
        if x.requires_grad and torch.is_grad_enabled():
            return differentiable(lambda x: QuantizedLinear.forward(self, x), self._gradients, x)
        tensors = self._buffers  # nn.Module takes a detour to them as attributes
        codes, scales = tensors["codes"], tensors["scales"]
        assert codes is not None and scales is not None
        inputs = tensors["perm"], tensors["input_scale"]
        weight = new_call(WeightTensors, (codes, scales, tensors["zeros"], self.weight_format, self.shape, *inputs))
        activations = self._activations
        scale = None if activations is None else tensors["activation_scale"]
        options = None, None, None, self.batch_invariant, None, None, 1e-6, 0.0, activations, scale
        return ops.linear(new_call(LinearCall, (x, weight, tensors["bias"], *options)))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the W [N, K] of y = x W^T + bias, with input scales multiplied in. dtype: that of W; default: the
        dtype of x."""
        tensors = self.codes, self.scales, self.zeros, self.perm
        dtype = dtype or self.weight_format.activation_dtype(self.scales.dtype)
        w = dense_weight(*tensors, self.weight_format.key, list(self.shape), dtype)
        return (w if self.input_scale is None else w * self.input_scale).to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        scale = self.activation_scale
        super()._apply(fn, recurse)
        moved = self.activation_scale
        if scale is not None and moved is not None and moved.dtype != scale.dtype:  # fp32, whatever it is cast to
            self.activation_scale = scale.to(moved.device)
        return self

    def _take(self, form: WeightFormat, tensors: dict[str, torch.Tensor | None], copy: bool) -> None:
        super()._take(form, tensors, copy)
        fp8.forget_row_codes(self.codes)

    def _gradients(self, of_y: torch.Tensor) -> tuple[torch.Tensor]:
        """Computes the gradient of x from the gradient of y. Each call dequantises the weight to y's dtype."""
        return (of_y @ self.dequantize(of_y.dtype),)

    def extra_repr(self) -> str:
        has = [name for name in ("zeros", "perm", "input_scale") if getattr(self, name) is not None]
        has += ["batch_invariant"] if self.batch_invariant else []
        has += [f"{self.activations} activations"] if self.activations is not None else []
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{describe(self.weight_format)}, {self.scales.dtype}"
            f"{', with ' if has else ''}{', '.join(has)}"
        )

    def fold(self, shifts: torch.Tensor | None) -> None:
        """Turns ``shifts``, which some state dicts hold as a separate tensor, into floating zero points of the layer's
        weight. Does nothing if it is None."""
        if shifts is not None:
            self._set(with_shifts(self.weight, checked_shifts(shifts, self.weight)), self.bias)

    def _set(self, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        for name in TENSOR_NAMES:
            setattr(self, name, getattr(weight, name))
        self.bias, self.weight_format = bias, weight.format

    # -- state dicts -------------------------------------------------------------------------------------------------

    def _loaded(self, own: dict[str, torch.Tensor]) -> tuple[WeightFormat, dict[str, torch.Tensor | None]]:
        weight = PackedWeight.from_state_dict({name: own[name] for name in (*TENSOR_NAMES, "format") if name in own})
        if weight.shape != self.shape:
            raise ValueError(f"format: got a weight {list(weight.shape)}, want {list(self.shape)}")
        bias = self.bias if "bias" not in own else own["bias"]
        if "shifts" in own:
            weight = with_shifts(weight, checked_shifts(own["shifts"], weight))
        extra = {"bias": checked_bias(bias, weight, self.out_features), "activation_scale": own.get("activation_scale")}
        if extra["activation_scale"] is not None:
            check_scale(extra["activation_scale"], weight.device)
        check_activations(self.activations, None, weight.format, weight.shape[1])
        return weight.format, {name: getattr(weight, name) for name in TENSOR_NAMES} | extra


def describe(form: WeightFormat) -> str:
    """Returns a weight's format as modules print it."""
    return ", ".join(f"{name}={value}" for name, value in form.options.items())


def checked_bias(bias: torch.Tensor | None, weight: Packed, *sizes: int) -> torch.Tensor | None:
    """Returns a bias of ``sizes`` on the weight's device, in the dtype of the activations. Raises TypeError or
    ValueError for a bias that does not fit."""
    if bias is None:
        return None
    check_tensors(bias=bias)
    if tuple(bias.shape) != sizes or not bias.is_floating_point():
        raise ValueError(f"bias: got {bias.dtype} {list(bias.shape)}, want a floating {list(sizes)}")
    if bias.is_meta and weight.device.type != "meta":
        raise ValueError(f"bias: got a tensor without data (meta), want one on a CPU or on {weight.device}")
    kept = bias.to(weight.device, weight.dtype).contiguous()
    if kept.dtype != bias.dtype and has_values(kept) and (kept.isinf() & bias.to(kept.device).isfinite()).any():
        raise ValueError(f"bias: got values beyond {kept.dtype}, that of the weight's scales, want smaller ones")
    return kept


def checked_shifts(shifts: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Returns ``shifts`` if they fit a weight of integers, else raises TypeError or ValueError."""
    check_tensors(shifts=shifts)
    n, k = weight.shape
    wanted = [n, -(-k // (weight.group_size or k))]
    if list(shifts.shape) != wanted or not shifts.is_floating_point():
        raise ValueError(f"shifts: got {shifts.dtype} {list(shifts.shape)}, want a floating {wanted}")
    if not isinstance(weight.format, IntegerFormat):
        raise ValueError(f"shifts: got some beside a weight in the format {weight.format.key}, want one of integers")
    if shifts.is_meta:
        raise ValueError(f"shifts: got a tensor without data (meta), want one on a CPU or on {weight.device}")
    if has_values(shifts) and not bool(shifts.isfinite().all()):
        raise ValueError("shifts: got values that are not finite, want finite ones")
    return shifts
