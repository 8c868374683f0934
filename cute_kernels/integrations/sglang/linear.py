"""Weight-only linear layers of SGLang: AWQ, GPTQ and compressed-tensors checkpoints, 4 and 8 bits.

Each kind of layer has an owner, an SGLang class with two hooked methods. SGLang's own methods bring loaded weights into
Marlin's order, and multiply. A layer that runs here keeps its packed tensors under the names of its parameters, as
Marlin does. Its attribute `seams.SERVED` describes the tensors. For any other layer, the hooks call SGLang's own
methods.
"""

from __future__ import annotations

import functools
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
    WANTED,
    Layers,
    Seam,
    logger,
    reasons_against,
    refuse,
    share_workspaces,
)
from cute_kernels.runtime.gpu import GPU


class Served(NamedTuple):
    """The form of a layer's tensors, the names of its parameters in the order of `LayerTensors`, and whether results
    are batch-invariant."""

    form: Form
    names: tuple[str, str, str, str]
    batch_invariant: bool


@dataclass(frozen=True)
class Kind:
    """The layers of one kind of checkpoint.

    Attributes:
        owner: the field of `versions.Interface` that names the layers' owner.
        product: the owner's method that multiplies.
        names: names of the parameters of codes, scales, zero points and groups of inputs.
        form: a function from (owner, layer) to the layer's form. It raises ValueError, with the reason, for an
            unsupported layer.
        pack: a function from (form, codes, scales, zeros, groups of inputs) to the weight.
    """

    owner: str
    product: str
    names: tuple[str, str, str, str]
    form: Callable[[Foreign, torch.nn.Module], Form]
    pack: Callable[..., PackedWeight] = engine_linear.packed


def _pack(kind: Kind, owner: Foreign, layer: torch.nn.Module) -> tuple[dict[str, torch.Tensor | None], Served]:
    """Packs a loaded layer, as `Layers.pack` describes."""
    old: list[Any] = [getattr(layer, name, None) for name in kind.names]
    device, batch_invariant = old[0].device, rows.is_deterministic()
    form = kind.form(owner, layer)
    refuse(make_ready(form, device, batch_invariant))
    tensors = engine_linear.tensors_of(form, kind.pack(form, *old))
    return dict(zip(kind.names, tensors, strict=True)), Served(form, kind.names, batch_invariant)


def make_ready(form: Form, device: torch.device, batch_invariant: bool) -> list[str]:
    """Loads or compiles the kernels of a layer's steps. Returns the reasons why the layer stays with SGLang; empty if
    the kernels are ready.
    """
    if (reasons := reasons_against(device)) or device.type != "cuda":
        return reasons
    index, counts = ready.index_of(device), rows.engine_rows()
    problem = form.problem(GPU.num_sms(index), batch_invariant)
    if (reason := ready.linear_reason(problem, counts, index, WANTED)) is not None:
        return [reason]
    share_workspaces(device)
    ready.note(problem, counts)
    ready.load_noted(device, functools.partial(ready.load, logger=logger))
    return []


def multiply(served: Served, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the layer's result [..., n] of x [..., k]."""
    tensors: list[Any] = [getattr(layer, name, None) for name in served.names]
    out = engine_linear.product(served.form, x, LayerTensors(*tensors), bias, served.batch_invariant)
    return out.reshape(*x.shape[:-1], served.form.n)


def _compressed_tensors_form(scheme: Foreign, layer: torch.nn.Module) -> Form:
    return engine_linear.checked_form(scheme.kernel_config, int(32 // scheme.pack_factor))


def _gptq_form(kernel: Foreign, layer: torch.nn.Module) -> Form:
    return engine_linear.checked_form(kernel.kernel_config, int(32 // kernel.quant_config.pack_factor))


def _awq_form(kernel: Foreign, layer: Foreign) -> Form:
    """Returns the form of an AWQ layer, found from its parameters: SGLang keeps no configuration of the layer."""
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


LAYERS = Layers("weight-only linear layers", KINDS, _pack, multiply, ("x", "bias"))
SEAM = Seam(LAYERS.what, LAYERS.hooks)
