"""Finds where each layer of a checkpoint belongs in a model: under its own name, or under the name that transformers
gives it.

Checkpoints of mixtures of experts store each expert's projections apart; models of transformers 5 stack them.
Transformers' own table of conversions maps the names. No code of a checkpoint runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cute_kernels.gemm.experts.blocks import is_moe_block, refusal
from cute_kernels.gemm.experts.stored import WANTED, is_experts, known_experts, stored_as
from cute_kernels.model_layers import hooks_reason, is_dense, routers_of
from cute_kernels.weight_readers import layers_read_by_code

GATE, UP, DOWN = "gate", "up", "down"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PROJECTION = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<own>\w+)")
_ROLES = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
_MERGES = {"MergeModulelist", "Concatenate"}  # transformers' operations that stack experts, and put ups after gates


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint's layer in a model.

    Args:
        module: the qualified name of the nn.Linear that the layer replaces, or of the module of experts that it belongs
            to.
        role: `GATE`, `UP` or `DOWN` for an expert, "gate_up" or "down" for stacked experts, None for a Linear.
        expert: the index of the expert, or None.
        packed: whether the layer stays packed. Three kinds of layers are unpacked: routers, layers whose weight is read
            by model code, and layers whose forward or hooks a quantised layer cannot take over.
    """

    module: str
    role: str | None = None
    expert: int | None = None
    packed: bool = True


def place_layers(model: nn.Module, names: Iterable[str], stacked: Iterable[str] = ()) -> dict[str, Place]:
    """Returns the place of each layer of a checkpoint, by the layer's name.

    Args:
        model: a model with Linear layers and mixtures of experts. It may be on the meta device.
        names: names of the layers with one weight.
        stacked: names of the layers with gate_up or down of all experts, as in state dicts of `QuantizedMoE`.

    Raises:
        TypeError, ValueError: the model has no such layer, or one that cannot be swapped; or an expert is missing. The
            message names the checkpoint's layer.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    rename = _renamer(model)
    routers, readers = routers_of(model), layers_read_by_code(model)
    places: dict[str, Place] = {}
    for name in names:
        place = _place(modules, rename, name)
        module = modules.get(place.module)
        if module is model:
            raise TypeError(f"model: got the layer itself, {type(model).__name__}, want a module around it")
        if place.role is None:
            if module is None or not (isinstance(module, nn.Linear) or is_dense(module) or module in routers):
                raise ValueError(f"{name}: got {type(module).__name__} in the model, want an nn.Linear")
            read = module in routers or module in readers
            place = replace(place, packed=is_dense(module) and not read and hooks_reason(module) is None)
        places[name] = place
    for name in stacked:
        block, _, role = name.removesuffix("_proj").rpartition(".")
        if role not in ("gate_up", "down"):
            raise ValueError(f"{name}: got stacked experts of that name, want gate_up or down in a mixture of experts")
        if not is_experts(modules.get(block)):
            block = rename(f"{block}.experts.gate_up_proj")[0].rpartition(".")[0]
        places[name] = Place(block, role)
    _check_experts(modules, places)
    return places


Renamer = Callable[[str], tuple[str, Any, Any]]
"""A function as `_renamer` returns it."""


def _place(modules: Mapping[str, nn.Module], rename: Renamer, name: str) -> Place:
    if name in modules:
        return Place(name)
    renamed, converter, source = rename(f"{name}.weight")
    if converter is None:
        target = renamed.removesuffix(".weight")
        own = _PROJECTION.fullmatch(target)  # where transformers knows of stacked experts alone: Qwen3-VL-MoE
        if target in modules or own is None or own["own"] not in _ROLES:
            return Place(target)
        return _expert(modules, name, own["block"], _ROLES[own["own"]], int(own["expert"]))
    block, _, parameter = renamed.rpartition(".experts.")
    expert = _EXPERT.search(name)
    merged = {type(operation).__name__ for operation in converter.operations} <= _MERGES
    if not block or expert is None or not merged:
        raise ValueError(
            f"{name}: got a layer that becomes part of {renamed}, want an nn.Linear, or an expert's projection"
        )
    roles = {"down_proj": (DOWN,), "up_proj": (UP,)}.get(parameter, (GATE, UP))
    role = roles[list(converter.source_patterns).index(source)]
    return _expert(modules, name, block, role, int(expert[1]))


def _expert(modules: Mapping[str, nn.Module], name: str, block: str, role: str, expert: int) -> Place:
    """Returns the place of an expert's projection. Raises ValueError if the model has no such experts."""
    experts = modules.get(f"{block}.experts")
    if stored_as(experts) is None:
        found = "none" if experts is None else ", ".join(key for key, _ in experts.named_parameters())
        kind = type(modules.get(block)).__name__
        raise ValueError(f"{name}: got experts for {block}, a {kind} of the model with {found}, want {WANTED}")
    return Place(f"{block}.experts", role, expert)


def _renamer(model: Any) -> Renamer:
    """Returns a function from a checkpoint's key to (the model's key, conversion, source pattern).

    conversion: transformers' conversion that merges the tensor with others. If the tensor is not merged, conversion and
    pattern are None.
    """

    def unchanged(key: str) -> tuple[str, Any, Any]:
        return key, None, None

    if not hasattr(model, "base_model_prefix"):
        return unchanged
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return unchanged
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_source = {source: each for each in converters for source in each.source_patterns}
    state = model.state_dict()

    def rename(key: str) -> tuple[str, Any, Any]:
        renamed, source = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        return renamed, None if source is None else by_source[source], source

    return rename


def _check_experts(modules: Mapping[str, nn.Module], places: Mapping[str, Place]) -> None:
    """Raises ValueError unless each block of experts is supported and has each expert's projections exactly once."""
    blocks: dict[str, dict[tuple[Any, Any], str]] = {}
    for name, place in places.items():
        if place.role is None:
            continue
        found = blocks.setdefault(place.module, {})
        key = place.expert, place.role
        if key in found:
            raise ValueError(f"{name}: got it and {found[key]} for one place in {place.module}, want one of them")
        found[key] = name
    for name, found in blocks.items():
        experts: Any = modules.get(name)
        first = next(iter(found.values()))
        kind, known, block = type(experts).__name__, known_experts(experts), modules.get(name.rpartition(".")[0])
        swapped = experts if is_experts(experts) else block
        if known is None or swapped is None or not (swapped is experts or is_moe_block(swapped)):
            raise ValueError(f"{first}: got experts for {name}, a {kind} of the model, want {WANTED}")
        if (reason := refusal(swapped) or hooks_reason(swapped, None if swapped is experts else experts)) is not None:
            raise ValueError(f"{first}: got experts for {name}, a {kind} that is not served: {reason}")
        wanted: list[tuple[Any, Any]] = [(None, "gate_up"), (None, "down")]
        if any(expert is not None for expert, _ in found):
            roles, (count, _, _) = (GATE, UP, DOWN) if known[0].gated else (UP, DOWN), known[0].sizes(experts)
            wanted = [(expert, role) for expert in range(count) for role in roles]
        for key in wanted:
            if key not in found:
                raise ValueError(f"{name}: got no {key[1]} of expert {key[0]}, want it: {first} is packed")
        for key in found.keys() - {*wanted}:
            raise ValueError(f"{found[key]}: got expert {key[0]}, want those that {name} has")
