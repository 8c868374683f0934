"""RMS norms of transformers models in one launch each.

Each model file of transformers defines its own norm, as seven or eight operators. A norm is replaced only if its
``forward`` equals, instruction for instruction, one of those known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _HOOKS_OF_ALL
from torch.nn.modules.module import _global_forward_pre_hooks as _PRE_HOOKS_OF_ALL

from cute_kernels import NormedRows, PackedWeight, rms_norm
from cute_kernels.gemm.normed import DeferredParts, left_to_next
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.known_code import method_code, model_class
from cute_kernels.integrations.transformers.ropes import version_of

# Model file, class, the attribute that holds epsilon, what is added to the weight.
_KNOWN = (
    ("llama", "LlamaRMSNorm", "variance_epsilon", 0.0),
    ("gpt_oss", "GptOssRMSNorm", "variance_epsilon", 0.0),
    ("gemma2", "Gemma2RMSNorm", "eps", 1.0),
)
_METHODS = ("forward", "_norm")
MAX_COLUMNS = 16384


def replace_norms(model: nn.Module) -> int:
    """Replaces the ``forward`` of every known norm in bf16 or fp16 by the kernel. Returns how many of the model's norms
    the kernel now computes."""
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
    """Gives the norms their own ``forward`` back."""
    for module in model.modules():
        if _is_replaced(module):
            del module.forward


def _is_replaced(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is _forward


def _forward(module: Foreign, eps: float, offset: float, hidden_states: torch.Tensor) -> torch.Tensor:
    if isinstance(made := _made_of(hidden_states, module), torch.Tensor):
        return made
    if torch.is_grad_enabled() and (hidden_states.requires_grad or module.weight.requires_grad):
        return cast("Foreign", type(module)).forward(module, hidden_states)  # the kernel has no gradient
    return rms_norm(hidden_states.contiguous(), module.weight, eps=eps, weight_offset=offset)


# -- with the residual sum before it -----------------------------------------------------------------------------------

_NOTE = "_cute_kernels_norm"


class _Product(NamedTuple):
    """The product of a norm by a weight. version: the version of the result, from `version_of`."""

    weight: PackedWeight
    result: torch.Tensor
    version: int | None


class Projected(NamedTuple):
    """Rows whose norm is already multiplied by a weight.

    Attributes:
        weight: the product's weight.
        result: the product.
    """

    rows: NormedRows
    weight: PackedWeight
    result: torch.Tensor


class _Left(NamedTuple):
    """A deferred norm, which the next product applies. parts: the parts of the norm that the sum's launch has computed,
    or None.
    """

    parts: DeferredParts | None


_Noted: TypeAlias = "torch.Tensor | _Left | _Product"


@dataclass(frozen=True)
class _Made:
    """A note on the tensor of a sum: a further result that is already computed.

    Attributes:
        result: the sum's norm by ``module``, the parts of a deferred norm, or a product of the norm.
        version: the sum's version, from `version_of`.
    """

    module: nn.Module
    result: _Noted
    version: int | None


def _made_of(total: torch.Tensor, module: Foreign) -> _Noted | None:
    """Returns the noted result for a sum's norm by ``module``; None without a note, or if the sum has been written
    since."""
    made = getattr(total, _NOTE, None)
    if made is None or made.module is not module or made.version != version_of(total):
        return None
    return made.result


def is_plain(module: nn.Module) -> bool:
    """Returns whether a norm is replaced by the kernel, and no hook sees its inputs or results."""
    return _is_replaced(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a hook sees or changes a module's inputs or results."""
    return bool(module._forward_hooks or module._forward_pre_hooks or _HOOKS_OF_ALL or _PRE_HOOKS_OF_ALL)


def terms_of(module: Foreign) -> tuple[torch.Tensor, float, float]:
    """Returns (weight, epsilon, offset of the weight) of a norm for which `is_plain` holds."""
    _, eps, offset = module.forward.args
    return module.weight, eps, offset


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, module: Foreign) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the sum's norm by ``module``, the sum). `is_plain` must hold for ``module``."""
    weight, eps, offset = terms_of(module)
    return rms_norm(x, weight, residual=residual, eps=eps, weight_offset=offset)


def add_with_next_norm(x: torch.Tensor, residual: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Returns the sum, and notes its norm on the tensor. If ``module`` is called with this sum, unchanged, it returns
    the noted norm.
    """
    result, total = add_and_norm(x, residual, module)
    setattr(total, _NOTE, _Made(module, result, version_of(total)))
    return total


def with_deferred_norm(rows: NormedRows, module: nn.Module) -> torch.Tensor:
    """Returns the tensor of ``rows``, with a note that its norm by ``module`` is deferred. `deferred_norm_of` reads the
    note."""
    setattr(rows.rows, _NOTE, _Made(module, _Left(rows.deferred), version_of(rows.rows)))
    return rows.rows


def with_product(rows: NormedRows, module: nn.Module, weight: PackedWeight, result: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of ``rows``, with a note that has ``result``: the product of ``weight`` and the norm of the
    rows by ``module``. `deferred_norm_of` reads the note."""
    setattr(rows.rows, _NOTE, _Made(module, _Product(weight, result, version_of(result)), version_of(rows.rows)))
    return rows.rows


def deferred_norm_of(total: torch.Tensor, module: Foreign) -> NormedRows | Projected | None:
    """Returns ``total`` with its deferred norm by ``module``, if a note on ``total`` says that this norm was deferred.
    If the note has the product of that norm and a weight, returns a `Projected`. Returns None without such a note, or
    if ``total`` was written after it was noted.

    `is_plain` must hold for ``module``.
    """
    made = _made_of(total, module)
    if made is None or isinstance(made, torch.Tensor):
        return None
    rows = left_to_next(total, *terms_of(module), made.parts if isinstance(made, _Left) else None)
    if not isinstance(made, _Product):
        return rows
    return Projected(rows, made.weight, made.result) if version_of(made.result) == made.version else rows


def _norm_of(module: nn.Module) -> tuple[str, float] | None:
    """Returns (epsilon's attribute, offset of the weight) of a norm that the kernel computes; None for other
    modules."""
    weight = getattr(module, "weight", None)
    if "forward" in vars(module) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float16) or weight.shape[0] % 8 or weight.shape[0] > MAX_COLUMNS:
        return None
    return _known_codes().get(method_code(type(module), _METHODS))


@cache
def _known_codes() -> dict[Any, tuple[str, float]]:
    found: dict[Any, tuple[str, float]] = {}
    for file, name, eps, offset in _KNOWN:
        if (kind := model_class(file, name)) is not None:  # not in an older release
            found[method_code(kind, _METHODS)] = (eps, offset)
    return found
