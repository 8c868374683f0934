"""Quantised layers as SGLang makes them: its own schemes create the parameters, random checkpoints fill them."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.layers import CHECKPOINTS, Checkpoint, Drawn, draw, tensors_of

SCHEMES = "sglang.srt.layers.quantization"
__all__ = ["CHECKPOINTS", "Checkpoint", "Layer", "make"]


@dataclass(frozen=True)
class Layer:
    """A layer with a checkpoint's tensors. owner: what the plug-in hooks. scheme: what SGLang asks."""

    scheme: Any
    owner: Any
    layer: Any
    drawn: Drawn

    def process(self) -> None:
        self.scheme.process_weights_after_loading(self.layer)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.scheme.apply_weights(self.layer, x, bias)


def make(form: Checkpoint, full_k: int | None = None) -> Layer:
    """The layer of a checkpoint, not processed. full_k: inputs of all GPUs, if others have some."""
    layer, drawn = torch.nn.Module(), draw(form)
    scheme = _MADE[form.checkpoint](form)
    scheme.create_weights(
        layer=layer,
        output_size=form.n,
        input_size=full_k or form.k,
        output_partition_sizes=[form.n],
        input_size_per_partition=form.k,
        params_dtype=form.dtype,
        weight_loader=lambda *_, **__: None,
    )
    for name, tensor in tensors_of(form, drawn, has_g_idx=True).items():
        parameter = getattr(layer, name)
        if parameter.shape == tensor.shape:  # in act-order every GPU has the scales of all
            parameter.data.copy_(tensor)
    return Layer(scheme, getattr(scheme, "kernel", scheme), layer, drawn)


def _compressed_tensors(form: Checkpoint) -> Any:
    from compressed_tensors.quantization import ActivationOrdering
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
        CompressedTensorsWNA16,
    )

    return CompressedTensorsWNA16(
        strategy="group" if form.group_size else "channel",
        num_bits=form.bits,
        group_size=form.group_size or None,
        symmetric=not form.zero_point,
        actorder=ActivationOrdering.GROUP if form.act_order else None,
    )


def _config(form: Checkpoint) -> Any:
    return SimpleNamespace(
        quant_type="not looked at",
        weight_bits=form.bits,
        pack_factor=32 // form.bits,
        group_size=form.group_size or -1,
        desc_act=form.act_order,
    )


def _gptq(form: Checkpoint) -> Any:
    from sglang.srt.layers.quantization.gptq.schemes import gptq_marlin

    with mock.patch.object(gptq_marlin, "verify_marlin_supported"):
        return gptq_marlin.GPTQMarlinLinearScheme(_config(form))


def _awq(form: Checkpoint) -> Any:
    from sglang.srt.layers.quantization.awq.schemes.awq_marlin import AWQMarlinLinearScheme

    return AWQMarlinLinearScheme(_config(form))


_MADE = {"ct": _compressed_tensors, "gptq": _gptq, "awq": _awq}
