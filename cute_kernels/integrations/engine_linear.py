"""Quantised linear layers of engines: the supported forms, the packing of their tensors, and the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_kernels.formats.weights import FP8, FP8_BLOCK, MXFP4, NVFP4, SHIPPED_GROUP_SIZES, WeightFormat, integers
from cute_kernels.formats.weights.base import spelling
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.weight import padded_shape, symmetric_zero
from cute_kernels.integrations.checkpoints.float_codes import Names, format_of_codes
from cute_kernels.integrations.objects import Foreign

FLOATS = (FP8, FP8_BLOCK, MXFP4, NVFP4)
"""Formats of layers whose codes are floats."""


@dataclass(frozen=True)
class Form:
    """A layer's weight [n, k] as the operator takes it, for activations in ``dtype``."""

    format: WeightFormat
    n: int
    k: int
    dtype: torch.dtype
    act_order: bool = False

    def problem(self, num_sms: int, batch_invariant: bool = False) -> LinearProblem:
        """Returns the layer's problem for one row, as schedules take it."""
        return LinearProblem(
            m=1,
            n=self.n,
            k=self.k,
            k_pad=padded_shape((self.n, self.k), self.format.group_size or None)[1],
            format=self.format,
            dtype=DTYPES[self.dtype],
            num_sms=num_sms,
            batch_invariant=batch_invariant,
        )


def checked_form(c: Foreign, bits: int) -> Form:
    """Returns the form of the layer that an engine's configuration ``c`` describes. vLLM's and SGLang's configurations
    are alike.

    c: partition_weight_shape and full_weight_shape [inputs, outputs], act_type, group_size, zero_points, has_g_idx.

    Raises:
        ValueError: the layer is not supported; the message says why.
    """
    if c.act_type not in DTYPES:
        raise ValueError(f"activations in {c.act_type}; supported: {', '.join(map(str, DTYPES))}")
    k, n = c.partition_weight_shape
    whole = k == c.full_weight_shape[0]
    act_order = bool(getattr(c, "has_g_idx", False))  # vLLM refuses it from 0.30 on
    if act_order and not whole:
        raise ValueError("act-order with the inputs shared out among GPUs")
    group_size = 0 if c.group_size == -1 or (whole and c.group_size == k) else c.group_size
    if group_size and (group_size not in SHIPPED_GROUP_SIZES or k % group_size):
        raise ValueError(f"groups of {c.group_size} of {k} inputs; supported: {SHIPPED_GROUP_SIZES}, and -1")
    return Form(integers(bits, group_size, c.zero_points), n, k, c.act_type, act_order)


def rows_first(parameter: Foreign) -> torch.Tensor:
    """Returns a view of a parameter's tensor with a row for each output. The parameter stays as it is, since engines
    may load it again."""
    return parameter.data if parameter.output_dim == 0 else parameter.data.t()


def packed(form: Form, codes: Foreign, scales: Foreign, zeros: Foreign, group_of: Foreign) -> PackedWeight:
    """Packs an engine's parameters into a weight. Reads zero points and groups of inputs only if the form has them."""
    return PackedWeight.from_compressed_tensors(
        rows_first(codes),
        rows_first(scales),
        weight_zero_point=rows_first(zeros) if form.format.has_zeros else None,
        weight_shape=torch.tensor([form.n, form.k]),
        weight_g_idx=group_of.data if form.act_order else None,
        bits=form.format.bits,
        group_size=form.format.group_size or -1,
        dtype=form.dtype,
    )


def float_tensors(layer: Foreign) -> tuple[Names, dict[str, torch.Tensor]]:
    """Returns the names and tensors of a loaded layer as importers take them.

    A fused layer has one scale per part; the result has one per row.
    """
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


def float_form(names: Names, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Form:
    """Returns the form of a layer with floating codes, for activations in ``dtype``. Raises TypeError or ValueError,
    with the reason, for a layer that is not supported."""
    codes, scales = tensors[names.codes], tensors[names.scales]
    found = format_of_codes(names, codes, scales).fitting(scales)
    if found not in FLOATS or DTYPES.get(dtype) not in found.dtypes:
        wanted = ", ".join(map(spelling, FLOATS))
        raise ValueError(f"{spelling(found)} weights for activations in {dtype}; supported: {wanted}, FP4 with bf16")
    return Form(found, codes.shape[0], codes.shape[1] * 8 // found.bits, dtype)


class LayerTensors(NamedTuple):
    """The tensors of a layer's weight. zeros and perm are None if the weight's form has none."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None


def tensors_of(form: Form, weight: PackedWeight) -> LayerTensors:
    """Returns a weight's tensors as `product` reads them.

    Which tensors are None depends on the form alone, since traced code must not depend on a weight's values. If the
    form has zero points or act-order and the weight does not, the weight gets symmetric zeros or the identity.
    """
    zeros, perm = weight.zeros, weight.perm
    if form.format.has_zeros and zeros is None:
        zeros = torch.full_like(weight.scales, symmetric_zero(form.format.bits), dtype=torch.uint8)
    if form.act_order and perm is None:
        perm = torch.arange(form.k, dtype=torch.int32, device=weight.device)
    return LayerTensors(weight.codes, weight.scales, zeros, perm)


def product(
    form: Form, x: torch.Tensor, tensors: LayerTensors, bias: torch.Tensor | None, batch_invariant: bool
) -> torch.Tensor:
    """Computes the layer's result [rows, n] of x [..., k]. It is one registered operator, into which torch.compile does
    not trace.

    Raises:
        TypeError: x or bias does not have the form's dtype.
    """
    if x.dtype != form.dtype or (bias is not None and bias.dtype != form.dtype):
        raise TypeError(f"x, bias: got {x.dtype}, {bias.dtype if bias is not None else None}, want {form.dtype}")
    rows = x.reshape(-1, form.k)
    if form.act_order:
        assert tensors.perm is not None
        rows = rows.index_select(1, tensors.perm)
    return torch.ops.cute_kernels.weight_only_linear(
        rows.contiguous(),
        tensors.codes,
        tensors.scales,
        tensors.zeros if form.format.has_zeros else None,
        bias,
        None,
        form.format.key,
        form.n,
        form.k,
        None,
        form.dtype,
        batch_invariant,
    )
