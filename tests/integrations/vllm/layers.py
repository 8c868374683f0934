"""Quantised layers as vLLM makes them: its own methods create the parameters, random checkpoints fill them.

What is expected of a layer is worked out here from the codes, in fp64, by the formats' own definitions.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of an AWQ word holds, lowest first."""


@dataclass(frozen=True)
class Checkpoint:
    """A random quantised weight [n, k]; group_size 0 for one group.

    checkpoint: "ct" (compressed-tensors), "gptq" or "awq". act_order: inputs are shared out to groups at random.
    """

    checkpoint: str
    bits: int = 4
    group_size: int = 128
    zero_point: bool = False
    act_order: bool = False
    dtype: torch.dtype = torch.bfloat16
    n: int = 192
    k: int = 512

    def __str__(self) -> str:
        marks = ["zeros"] * self.zero_point + ["act_order"] * self.act_order
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join((self.checkpoint, f"w{self.bits}", f"g{self.group_size or 'channel'}", dtype, *marks))


CHECKPOINTS = (
    *(Checkpoint("ct", bits, group) for bits in (4, 8) for group in (32, 64, 128, 0)),
    *(Checkpoint("ct", bits, 128, zero_point=True) for bits in (4, 8)),
    Checkpoint("ct", 4, 128, act_order=True),
    Checkpoint("ct", 4, 64, zero_point=True, act_order=True, dtype=torch.float16),
    *(Checkpoint("gptq", bits, 128) for bits in (4, 8)),
    Checkpoint("gptq", 4, 32, act_order=True),
    Checkpoint("gptq", 4, 128, dtype=torch.float16),
    *(Checkpoint("awq", 4, group, zero_point=True) for group in (64, 128)),
    Checkpoint("awq", 4, 128, zero_point=True, dtype=torch.float16),
)


@dataclass(frozen=True)
class Layer:
    """A layer whose weights are processed. apply: x [..., k] to [..., n]. weight: fp64 [n, k]."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    kernel: Any
    weight: torch.Tensor


def make(form: Checkpoint, device: str, seed: int = 0) -> Layer:
    """The layer of a checkpoint, made and processed by vLLM's method for it."""
    generator = torch.Generator().manual_seed(seed)
    groups = form.k // (form.group_size or form.k)
    top = 1 << form.bits
    codes = torch.randint(0, top, (form.n, form.k), generator=generator)
    zeros = torch.randint(0, top, (form.n, groups), generator=generator)
    if not form.zero_point:
        zeros = torch.full_like(zeros, top // 2)
    scales = (torch.rand(form.n, groups, generator=generator) * 0.01 + 0.001).to(form.dtype)
    group_of = torch.arange(form.k) // (form.group_size or form.k)
    if form.act_order:
        group_of = group_of[torch.randperm(form.k, generator=generator)]
    weight = (codes - zeros[:, group_of]).double() * scales.double()[:, group_of]
    layer = torch.nn.Module()
    parameters = "vllm.model_executor.parameter.get_tensor_model_parallel"
    with mock.patch(f"{parameters}_rank", lambda: 0), mock.patch(f"{parameters}_world_size", lambda: 1):
        method = _METHODS[form.checkpoint](form, layer, device)
        tensors = _tensors(form, codes, zeros, scales, group_of)
        for name, tensor in tensors.items():
            getattr(layer, name).data.copy_(tensor)
        method.process_weights_after_loading(layer)
    apply = getattr(method, "apply_weights", None) or method.apply
    return Layer(lambda x: apply(layer, x, None), method.kernel, weight)


def _compressed_tensors(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from compressed_tensors.quantization import ActivationOrdering
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
        CompressedTensorsWNA16,
    )

    scheme = CompressedTensorsWNA16(
        strategy="group" if form.group_size else "channel",
        num_bits=form.bits,
        group_size=form.group_size or None,
        symmetric=not form.zero_point,
        actorder=ActivationOrdering.GROUP if form.act_order else None,
    )
    with torch.device(device):
        scheme.create_weights(layer, form.n, form.k, [form.n], form.k, form.dtype, _no_loader)
    return scheme


def _gptq(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from vllm.model_executor.layers.quantization import auto_gptq

    config = auto_gptq.AutoGPTQConfig(form.bits, form.group_size or -1, form.act_order, True, False, {}, {})
    with mock.patch.object(auto_gptq, "verify_marlin_supported"), torch.device(device):
        method = auto_gptq.AutoGPTQLinearMethod(config)
        method.create_weights(layer, form.k, [form.n], form.k, form.n, form.dtype, weight_loader=_no_loader)
    return method


def _awq(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from vllm.model_executor.layers.quantization import auto_awq

    config = auto_awq.AutoAWQConfig(form.bits, form.group_size or -1, form.zero_point, False)
    with mock.patch.object(auto_awq, "verify_marlin_supported"), torch.device(device):
        method = auto_awq.AutoAWQMarlinLinearMethod(config)
        method.create_weights(layer, form.k, [form.n], form.k, form.n, form.dtype, weight_loader=_no_loader)
    return method


_METHODS = {"ct": _compressed_tensors, "gptq": _gptq, "awq": _awq}


def _no_loader(*_: Any, **__: Any) -> None:
    """Parameters are filled by hand."""


def _tensors(
    form: Checkpoint, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by the names of the layer's parameters."""
    order = tuple(range(32 // form.bits))
    if form.checkpoint == "ct":
        tensors = {"weight_packed": words(codes, form.bits, order), "weight_scale": scales}
        if form.zero_point:
            tensors["weight_zero_point"] = words(zeros.T, form.bits, order).T
        if form.act_order:
            tensors["weight_g_idx"] = group_of
        return tensors
    if form.checkpoint == "gptq":
        return {"qweight": words(codes, form.bits, order).T, "scales": scales.T, "g_idx": group_of}
    return {
        "qweight": words(codes.T, form.bits, AWQ_ORDER),
        "qzeros": words(zeros.T, form.bits, AWQ_ORDER),
        "scales": scales.T,
    }


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """int32 words of codes along the last axis: nibble (or byte) i of a word, lowest first, is code order[i] of it."""
    parts = codes.long().unflatten(-1, (-1, len(order)))
    total = sum(parts[..., column] << (bits * place) for place, column in enumerate(order))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
