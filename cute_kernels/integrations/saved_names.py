"""The names under which `save_pretrained` writes quantised layers.

transformers writes some models as their first checkpoints were: q, k and v as one tensor, rows permuted. What makes
these of a 16-bit weight makes nothing of packed codes, so such a model is written by its own modules' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from cute_kernels.gemm.module import QuantizedLinear


def keep_names(model: PreTrainedModel) -> None:
    """Has a model's tensors written as they are, if a conversion on the way would change those of a quantised layer."""
    targets = [
        re.compile(target)
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(conversion, WeightConverter)
        for target in conversion.target_patterns
    ]
    if any(target.search(name) for name in _tensors(model) for target in targets):
        vars(model)["_weight_conversions"] = []  # those that the model was loaded with; transformers reverts them


def list_experts(model: Any, names: Iterable[str]) -> None:
    """Gives a skeleton transformers' lists of experts for Llama 4's stacked ones, if layers of these names are in them.

    The router scales what they take, not what they give, which no kernel of ours multiplies.
    """
    if not any(re.search(r"\.experts\.\d+\.", name) for name in names):
        return
    for name, module in list(model.named_modules()):
        if (kind := MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__)) is not None:
            with torch.device("meta"):
                made = kind["module_name"](model.config.get_text_config())
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)


def _tensors(model: nn.Module) -> list[str]:
    """Names of all quantised layers' tensors."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    return [f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict()]
