"""RMS norms of transformers models in one launch each.

A model file of transformers defines its norm itself, as seven or eight operators. Which norm it is says its code: only
a ``forward`` that is, instruction for instruction, one of those known here is replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from cute_kernels import rms_norm

# Module, class, the attribute that holds epsilon, what is added to the weight.
_KNOWN = (
    ("llama", "LlamaRMSNorm", "variance_epsilon", 0.0),
    ("gpt_oss", "GptOssRMSNorm", "variance_epsilon", 0.0),
    ("gemma2", "Gemma2RMSNorm", "eps", 1.0),
)
MAX_COLUMNS = 16384


def replace_norms(model: nn.Module) -> int:
    """Gives every norm that is known, in bf16 or fp16, the kernel's ``forward``; returns how many there are now."""
    count = 0
    for module in model.modules():
        count += _is_replaced(module)
        found = _norm_of(module)
        if found is not None:
            eps, offset = found
            module.forward = partial(_forward, module, getattr(module, eps), offset)
            count += 1
    return count


def restore_norms(model: nn.Module) -> None:
    """Takes them away again."""
    for module in model.modules():
        if _is_replaced(module):
            del module.forward


def _is_replaced(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is _forward


def _forward(module: Any, eps: float, offset: float, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states.contiguous(), module.weight, eps=eps, weight_offset=offset)


def _norm_of(module: nn.Module) -> tuple[str, float] | None:
    """(epsilon's attribute, what is added to the weight) of a norm that the kernel computes; None for all else."""
    weight = getattr(module, "weight", None)
    if "forward" in vars(module) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float16) or weight.shape[0] % 8 or weight.shape[0] > MAX_COLUMNS:
        return None
    return _known_codes().get(_code_of(type(module)))


@cache
def _known_codes() -> dict[Any, tuple[str, float]]:
    found: dict[Any, tuple[str, float]] = {}
    for name, kind, eps, offset in _KNOWN:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:  # an older release
            continue
        found[_code_of(getattr(module, kind))] = (eps, offset)
    return found


def _code_of(kind: type) -> Any:
    """What a norm's methods do, whatever they are called and wherever they stand."""
    return tuple(_instructions(function.__code__) for function in _methods(kind))


def _methods(kind: type) -> Iterator[Callable[..., Any]]:
    for name in ("forward", "_norm"):
        function = getattr(kind, name, None)
        if hasattr(function, "__code__"):
            yield function  # type: ignore[misc]


def _instructions(code: CodeType) -> Any:
    constants = tuple(value for value in code.co_consts if not isinstance(value, str))
    return code.co_code, constants, code.co_names
