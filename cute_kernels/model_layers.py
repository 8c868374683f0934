"""Finds the layers of a model that `quantize_model` swaps, and the reasons to leave the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from cute_kernels.gemm.experts.blocks import is_moe_block, refusal
from cute_kernels.gemm.experts.module import QuantizedExperts
from cute_kernels.gemm.experts.stored import WANTED, is_experts
from cute_kernels.gemm.module import QuantizedLinear, is_conv1d
from cute_kernels.model_report import ReportedLayer
from cute_kernels.weight_readers import layers_read_by_code

_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
FORWARD_HOOKS = tuple(name for name in _HOOKS if "forward" in name)
_OTHER_HOOKS = tuple(name for name in _HOOKS if "forward" not in name)
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


@dataclass(frozen=True)
class Survey:
    """The modules to swap, each with all its names, and the layers that are left."""

    places: dict[nn.Module, list[str]]
    left: tuple[ReportedLayer, ...]


def survey(model: nn.Module, skip: Sequence[str]) -> Survey:
    """Decides for every module that has weights of its own whether it is to be swapped."""
    routers, readers = routers_of(model), layers_read_by_code(model)
    places: dict[nn.Module, list[str]] = {}
    left: dict[nn.Module, ReportedLayer] = {}
    served: set[nn.Module] = set()  # experts of blocks that are swapped, then of those that skip names
    skipped: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if module in places:
            if not _is_skipped(name, skip):
                places[module].append(name)
            continue
        if is_moe_block(module):
            experts = module.get_submodule("experts")
            if _is_skipped(name, skip):
                skipped.add(experts)
            elif refusal(module) is None and hooks_reason(module, experts) is None:
                places[module] = [name]
                served.add(experts)
            continue
        if module in served:
            continue
        if is_experts(module):  # of a block that is not served as a whole
            if module in skipped or _is_skipped(name, skip):
                left[module] = _left(name, module, "skip names it", False)
            elif (reason := refusal(module) or hooks_reason(module)) is not None:
                left[module] = _left(name, module, reason, True)
            else:
                places[module] = [name]
            continue
        if not is_dense(module):
            if module not in left and (entry := _other(name, module, routers, skip)) is not None:
                left[module] = entry
            continue
        found = _reason_of(module, name, routers, skip)
        if found is None and module in readers:
            found = f"{readers[module]} reads its weight", True
        if found is None:
            places[module] = [name]
            left.pop(module, None)
        else:
            left.setdefault(module, _left(name, module, *found))
    return Survey(places, tuple(left.values()))


def compiled_from(model: nn.Module) -> nn.Module:
    """Returns the module that torch.compile has wrapped, or the model itself if it is not wrapped."""
    return getattr(model, "_orig_mod", model)


def is_dense(module: nn.Module) -> bool:
    """Returns whether a module is a plain nn.Linear, or transformers' Conv1D (GPT-2) or FalconLinear. Other subclasses
    of nn.Linear are not dense layers in this sense.
    """
    kind = type(module)
    is_falcon = (kind.__module__, kind.__name__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear")
    return kind is nn.Linear or is_conv1d(module) or is_falcon


def swap(model: nn.Module, name: str, swapped: nn.Module, layer: nn.Module) -> None:
    """Puts a layer into a model in place of the module ``swapped``, which has the qualified name ``name``. The layer
    takes over the module's forward hooks; the hooks' handles still remove the hooks."""
    for hooks in FORWARD_HOOKS:
        setattr(layer, hooks, getattr(swapped, hooks))
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def weight_bytes(module: nn.Module) -> int:
    """Returns the bytes of a module's own parameters and buffers with two or more dimensions."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.numel() * tensor.element_size() for tensor in own if tensor.dim() >= 2)


def _reason_of(module: nn.Module, name: str, routers: set[nn.Module], skip: Sequence[str]) -> tuple[str, bool] | None:
    """Returns (why a dense layer is not swapped, whether the report lists it as missed); None if it is to be
    swapped.
    """
    if _is_skipped(name, skip):
        return "skip names it", False
    if module in routers:
        return "the router of a mixture of experts, which stays in 16 bits", False
    reason = _tensors_reason(module) or hooks_reason(module)
    return None if reason is None else (reason, True)


def _tensors_reason(module: nn.Module) -> str | None:
    """Returns why the tensors of a Linear are not a plain weight and bias; None if they are."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    others = sorted(own.keys() - {"weight", "bias"})
    if others or "weight" not in own:
        return f"it has {', '.join(others) or 'no weight'}: quantised by another library, or a weight made by hooks"
    weight = own["weight"]
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}: quantised or distributed by another library"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"its weight is of {weight.dtype}, want a floating one of 16 bits or more"
    return None


def hooks_reason(module: nn.Module, inner: nn.Module | None = None) -> str | None:
    """Returns why a module's hooks cannot be kept; None if they can. inner: a submodule that a swap of the module
    drops, hooks included."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance (accelerate's hooks do so)"
    lost = [name for name in _OTHER_HOOKS if getattr(module, name, None)]
    if inner is not None:
        lost += [f"{name} of its experts" for name in _HOOKS if getattr(inner, name, None)]
        lost += ["a forward of its experts' instance"] if "forward" in vars(inner) else []
    return f"it has {lost[0].lstrip('_')}, which a quantised layer cannot keep" if lost else None


def _other(name: str, module: nn.Module, routers: set[nn.Module], skip: Sequence[str]) -> ReportedLayer | None:
    """Returns the report's entry for a module that is no dense layer but has weights of its own, or None."""
    if isinstance(module, (QuantizedLinear, QuantizedExperts)):
        return ReportedLayer(name, type(module).__name__, weight_bytes(module), 0, "it is quantised already", False)
    if isinstance(module, nn.Linear) and module not in routers and not _is_skipped(name, skip):
        return _left(name, module, "a subclass of nn.Linear, whose forward is its own", True)
    if not any(tensor.dim() >= 2 for tensor in module.parameters(recurse=False)):
        packed = [b for b in module.buffers(recurse=False) if b.dim() >= 2 and not b.is_floating_point()]
        known = [key for key, _ in module.named_buffers(recurse=False) if key in ("qweight", "weight_packed", "W_q")]
        if packed and known:
            return _left(name, module, f"it has {known[0]}: quantised by another library", True)
        return None
    if _is_skipped(name, skip):
        return _left(name, module, "skip names it", False)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _left(name, module, "an embedding", False)
    if isinstance(module, _CONVOLUTIONS):
        return _left(name, module, "a convolution", False)
    if module in routers:
        return _left(name, module, "the router of a mixture of experts, which stays in 16 bits", False)
    is_named = "expert" in name.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    if is_named and any(tensor.dim() == 3 for tensor in module.parameters(recurse=False)):
        names = ", ".join(key for key, _ in module.named_parameters(recurse=False))
        return _left(name, module, f"experts with {names}, of a kind that is not served: want {WANTED}", True)
    return _left(name, module, "not an nn.Linear", True)


def routers_of(model: nn.Module) -> set[nn.Module]:
    """Returns a model's routers.

    A router's weight has one row for each expert. The router is a submodule with "gate" or "router" in its name, or a
    part of such a submodule. The experts are a submodule of the same parent.
    """
    found: set[nn.Module] = set()
    for parent in model.modules():
        children = dict(parent.named_children())
        counts = {count for name, child in children.items() if (count := _num_experts(name, child)) is not None}
        for name, child in children.items():
            if not counts or not any(part in name for part in ("gate", "router")):
                continue
            for module in child.modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] in counts:
                    found.add(module)
    return found


def _num_experts(name: str, module: nn.Module) -> int | None:
    """Returns how many experts a module has, in stacked weights or a list; None if it has none."""
    if isinstance(module, nn.ModuleList):
        return len(module) if "expert" in name and len(module) > 1 else None
    sizes = {tensor.shape[0] for tensor in module.parameters(recurse=False) if tensor.dim() == 3}
    return sizes.pop() if len(sizes) == 1 else None


def _left(name: str, module: nn.Module, reason: str, counts: bool) -> ReportedLayer:
    return ReportedLayer(name, type(module).__name__, weight_bytes(module), 0, reason, counts)


def check_skip(model: nn.Module, skip: object) -> None:
    """Raises TypeError or ValueError unless ``skip`` is a sequence of patterns, each of which matches a module of the
    model.

    The default pattern "lm_head" need not match.
    """
    if isinstance(skip, str) or not isinstance(skip, Sequence) or not all(isinstance(name, str) for name in skip):
        raise TypeError(f"skip: got {skip!r}, want a sequence of names")
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names = {"lm_head", *paths, *(path.rpartition(".")[2] for path in paths)}
    for pattern in skip:
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(get_close_matches(pattern, names) or sorted(names)[-3:])
            raise ValueError(
                f"skip: got {pattern!r}, which names no layer of {type(model).__name__}, want such as {near}"
            )


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    return any(fnmatchcase(candidate, pattern) for pattern in skip for candidate in (name, name.rpartition(".")[2]))
