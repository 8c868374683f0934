"""Weight-only linear layers of SGLang: AWQ, GPTQ and compressed-tensors checkpoints, 4 and 8 bits.

Hooks stand around the two methods of the owners of such layers: one that brings loaded weights into Marlin's order, and
one that multiplies. A layer that is served here has its packed tensors under the names of its parameters, as Marlin's
are, and :data:`SERVED` says what they are. Any other goes on to SGLang's own methods.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cute_kernels.gemm import PackedWeight
from cute_kernels.integrations import engine_linear, ready
from cute_kernels.integrations.engine_linear import Form, LayerTensors
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.seams import (
    IN_PLACE,
    WANTED,
    Hook,
    hooks_of_layers,
    logger,
    reasons_against,
    say_once,
    share_workspaces,
)
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.gpu import GPU

SERVED = "cute_kernels_served"
"""Attribute of a layer that is served here."""
WHAT: str = "weight-only linear layers"


class Served(NamedTuple):
    """The form of a layer's tensors, and names of its parameters in the order of `LayerTensors`."""

    form: Form
    names: tuple[str, str, str, str]
    batch_invariant: bool


@dataclass(frozen=True)
class Kind:
    """Layers of a kind of checkpoint.

    Attributes:
        owner: the field of `versions.Interface` that names their owner.
        product: the owner's method that multiplies.
        names: parameters of codes, scales, zero points and groups of inputs.
        form: (owner, layer) to the layer's form; ValueError says why it has none.
        pack: (form, codes, scales, zeros, groups of inputs) to the weight.
    """

    owner: str
    product: str
    names: tuple[str, str, str, str]
    form: Callable[[Foreign, torch.nn.Module], Form]
    pack: Callable[..., PackedWeight] = engine_linear.packed


def _load(kind: Kind, original: Callable[..., None], owner: Foreign, layer: torch.nn.Module) -> None:
    """Packs a loaded layer, or leaves it to SGLang and logs why."""
    if getattr(layer, SERVED, None) is not None:
        return  # nothing was loaded since: parameters that are packed have no loader
    old: list[Any] = [getattr(layer, name, None) for name in kind.names]
    device = old[0].device
    batch_invariant = rows.is_deterministic()
    try:
        form = kind.form(owner, layer)
        reason = why_left(form, device, batch_invariant)
        tensors = None if reason else engine_linear.tensors_of(form, kind.pack(form, *old))
    except (AttributeError, TypeError, ValueError) as error:
        form, reason, tensors = None, str(error), None
    if form is None or tensors is None:
        say_once(f"linear layers are left to SGLang: {kind.owner}: {reason}", logging.WARNING)
        original(owner, layer)
        return
    if device.type == "cuda":
        share_workspaces()
        ready.note(form.problem(GPU.num_sms(ready.index_of(device)), batch_invariant), rows.engine_rows())
        ready.load_noted(device, functools.partial(ready.load, logger=logger))
    for name, before, tensor in zip(kind.names, old, tensors, strict=True):
        if before is not None:  # what has no meaning here is emptied: a GPTQ layer has zero points that are not read
            new = before.data.new_empty(0) if tensor is None else tensor
            setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
    setattr(layer, SERVED, Served(form, kind.names, batch_invariant))
    say_once("weight-only linear layers run here")


def why_left(form: Form, device: torch.device, batch_invariant: bool) -> str | None:
    """Returns why a layer is left to SGLang; None if it is served."""
    if WHAT not in IN_PLACE:
        return "its hooks were not seen to take effect"
    if reasons := reasons_against(device):
        return "; ".join(reasons)
    if device.type != "cuda":
        return None
    index = ready.index_of(device)
    return ready.linear_reason(form.problem(GPU.num_sms(index), batch_invariant), rows.engine_rows(), index, WANTED)


def _multiply(
    original: Callable[..., torch.Tensor],
    owner: Foreign,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    served = getattr(layer, SERVED, None)
    if served is None:
        return original(owner, layer, x, bias)
    tensors: list[Any] = [getattr(layer, name, None) for name in served.names]
    out = engine_linear.product(served.form, x, LayerTensors(*tensors), bias, served.batch_invariant)
    return out.reshape(*x.shape[:-1], served.form.n)


def _compressed_tensors_form(scheme: Foreign, layer: torch.nn.Module) -> Form:
    return engine_linear.checked_form(scheme.kernel_config, int(32 // scheme.pack_factor))


def _gptq_form(kernel: Foreign, layer: torch.nn.Module) -> Form:
    return engine_linear.checked_form(kernel.kernel_config, int(32 // kernel.quant_config.pack_factor))


def _awq_form(kernel: Foreign, layer: Foreign) -> Form:
    """The form of an AWQ layer from its parameters, as SGLang keeps no configuration of it."""
    config = kernel.quant_config
    if config.pack_factor != 8:
        raise ValueError(f"codes of {32 // config.pack_factor} bits; supported: 4")
    shape = layer.input_size_per_partition, layer.output_size_per_partition
    described = SimpleNamespace(
        partition_weight_shape=shape,
        full_weight_shape=shape,
        act_type=layer.scales.dtype,
        group_size=config.group_size,
        zero_points=True,
    )
    return engine_linear.checked_form(described, 4)


def _awq_pack(form: Form, codes: Foreign, scales: Foreign, zeros: Foreign, group_of: object) -> PackedWeight:
    group_size = form.format.group_size or -1
    return PackedWeight.from_awq(codes.data, zeros.data, scales.data, group_size=group_size, dtype=form.dtype)


KINDS = (
    Kind(
        "compressed_tensors",
        "apply_weights",
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        _compressed_tensors_form,
    ),
    Kind("gptq", "apply", ("qweight", "scales", "qzeros", "g_idx"), _gptq_form),
    Kind("awq", "apply", ("qweight", "scales", "qzeros", "g_idx"), _awq_form, _awq_pack),
)


def hooks(interface: Interface) -> dict[str, Hook]:
    """The hooks around methods of SGLang's, by their full names."""
    return hooks_of_layers(interface, KINDS, _load, _multiply, ("x", "bias"))
