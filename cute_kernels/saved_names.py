"""The names under which `save_pretrained` writes quantised layers.

transformers writes some models in the form of their first checkpoints, for example with q, k and v as one tensor, or
with permuted rows. It cannot convert packed codes in this way. Such a model is written with its own modules' names.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from cute_kernels.gemm.module import QuantizedLinear


def keep_names(model: PreTrainedModel) -> None:
    """Makes transformers write a model's tensors unconverted, if a conversion would change a quantised layer's
    tensors."""
    targets = [
        re.compile(target)
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(conversion, WeightConverter)
        for target in conversion.target_patterns
    ]
    if any(target.search(name) for name in _tensors(model) for target in targets):
        vars(model)["_weight_conversions"] = []  # those that the model was loaded with; transformers reverts them


def _tensors(model: nn.Module) -> list[str]:
    """Returns the names of all quantised layers' tensors."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    return [f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict()]
