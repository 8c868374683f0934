"""A model's rotary embedding as a `Rope`, which kernels apply. It is used only if its frequencies equal the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cute_kernels.kv_cache import LinearScaling, Llama3Scaling, Rope, YarnScaling
from cute_kernels.kv_cache.rope import Scaling

TOLERANCE = 1e-5
"""Largest relative difference of frequencies. The model's are computed in fp32."""


def _yarn(given: Mapping[str, Any]) -> Scaling:
    names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    own = {name: given[name] for name in names if given.get(name) is not None}
    return YarnScaling(given["factor"], given["original_max_position_embeddings"], **own)


def _llama3(given: Mapping[str, Any]) -> Scaling:
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    return Llama3Scaling(given["factor"], low, high, given["original_max_position_embeddings"])


_SCALINGS: dict[str, Callable[[Mapping[str, Any]], Scaling | None]] = {
    "default": lambda given: None,
    "linear": lambda given: LinearScaling(given["factor"]),
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Functions from transformers' settings to a `Scaling`, by transformers' names. Scalings with other names have no such
function: some change with the sequence length ("dynamic", "longrope"), others are no rotations by theta."""


@dataclass(frozen=True)
class ModelRope:
    """A model's rotary embedding as it was recognised.

    Attributes:
        rope: the same rotation as a `Rope`, in the half-split form.
        rotary: the model's module.
        name: the name of the module's buffer of frequencies.
        frequencies, version: that buffer and its version, by which `is_current` detects changes.
    """

    rope: Rope
    rotary: nn.Module
    name: str
    frequencies: torch.Tensor
    version: int | None

    @property
    def is_current(self) -> bool:
        """Whether the module still has the frequencies that it was recognised with."""
        found = self.rotary._buffers.get(self.name)
        return found is self.frequencies and version_of(self.frequencies) == self.version


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns a counter that increases when a tensor is written; None for inference-mode tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def rope_of(rotary: nn.Module, layer_type: str | None = None) -> ModelRope | None:
    """Returns a rotary embedding of transformers as a `Rope`; None if a `Rope` cannot express it.

    layer_type: for models with one embedding per layer type, such as Gemma 3.
    """
    parameters = getattr(getattr(rotary, "config", None), "rope_parameters", None)
    prefix = "" if layer_type is None else f"{layer_type}_"
    if isinstance(parameters, Mapping) and layer_type is not None:
        parameters = parameters.get(layer_type)
    frequencies = rotary._buffers.get(f"{prefix}inv_freq")
    factor = getattr(rotary, f"{prefix}attention_scaling", None)
    if not isinstance(parameters, Mapping) or not isinstance(frequencies, torch.Tensor) or factor is None:
        return None
    scaling = _SCALINGS.get(str(parameters.get("rope_type")))
    if scaling is None:
        return None
    try:
        rope = Rope(2 * frequencies.numel(), parameters["rope_theta"], scaling=scaling(parameters))
    except (KeyError, TypeError, ValueError):
        return None
    ours = torch.tensor(rope.frequencies(), dtype=torch.float64, device="cpu")
    theirs = frequencies.detach().cpu().double()
    same = bool(((ours - theirs).abs() <= TOLERANCE * theirs.abs()).all())
    if not same or abs(rope.attention_factor - factor) > TOLERANCE * abs(factor):
        return None
    return ModelRope(rope, rotary, f"{prefix}inv_freq", frequencies, version_of(frequencies))
