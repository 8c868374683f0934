"""Where a checkpoint's layers belong in a model: names as they are, or as transformers renames and merges them.

Checkpoints of mixtures of experts have each expert's projections by themselves, models of transformers 5 have them
stacked. The library's own table of conversions says which names go where; nothing of a checkpoint is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cute_kernels.gemm.experts.blocks import experts_refusal, is_experts, is_moe_block, refusal
from cute_kernels.model_layers import is_dense, routers_of
from cute_kernels.weight_readers import layers_read_by_code

GATE, UP, DOWN = "gate", "up", "down"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PROJECTION = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<own>\w+)")
_ROLES = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
_MERGES = {"MergeModulelist", "Concatenate"}  # transformers' operations that stack experts, and put ups behind gates


@dataclass(frozen=True)
class Place:
    """Where a layer belongs.

    Args:
        module: the qualified name of the nn.Linear that it stands for, or of the mixture of experts that it is part of;
            of a mixture that is not served as a whole, of its experts.
        role: of an expert `GATE`, `UP` or `DOWN`; "gate_up" or "down" of stacked experts; None of a Linear.
        expert: which expert, or None.
        packed: whether the layer stays packed. The weight of a router, or one that the model's code reads, is unpacked.
    """

    module: str
    role: str | None = None
    expert: int | None = None
    packed: bool = True


def place_layers(model: nn.Module, names: Iterable[str], stacked: Iterable[str] = ()) -> dict[str, Place]:
    """The place of each layer of a checkpoint by name.

    Args:
        model: with Linear layers and mixtures of experts, which may be on the meta device.
        names: of layers with one weight.
        stacked: of layers that are all experts' gates and ups, or downs, as state dicts of `QuantizedMoE` have them.

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
            place = replace(place, packed=is_dense(module) and module not in routers and module not in readers)
        places[name] = place
    for name in stacked:
        block, _, role = name.rpartition(".")
        if role not in ("gate_up", "down"):
            raise ValueError(f"{name}: got stacked experts of that name, want gate_up or down in a mixture of experts")
        places[name] = Place(
            block if block in modules else rename(f"{block}.experts.gate_up_proj")[0].rpartition(".experts.")[0], role
        )
    moves = {module: _narrowed(modules, module) for module in {place.module for place in places.values() if place.role}}
    places = {name: replace(place, module=moves.get(place.module, place.module)) for name, place in places.items()}
    _check_experts(modules, places)
    return places


def _narrowed(modules: Mapping[str, nn.Module], module: str) -> str:
    """The module of experts' places: the experts alone where their block does more than is served.

    Whether it does is tried out, so this is asked once for all experts of a block.
    """
    block, experts = modules.get(module), modules.get(f"{module}.experts")
    if not is_experts(experts) or (block is not None and is_moe_block(block) and refusal(block) is None):
        return module
    return f"{module}.experts"


Renamer = Callable[[str], tuple[str, Any, Any]]
"""What `_renamer` describes."""


def _place(modules: Mapping[str, nn.Module], rename: Renamer, name: str) -> Place:
    if name in modules:
        return Place(name)
    renamed, converter, source = rename(f"{name}.weight")
    if converter is None:
        target = renamed.removesuffix(".weight")
        own = _PROJECTION.fullmatch(target)  # where transformers knows of stacked experts alone: Qwen3-VL-MoE
        if target in modules or own is None or own["own"] not in _ROLES:
            return Place(target)
        _check_gated(modules, own["block"], name)
        return Place(own["block"], _ROLES[own["own"]], int(own["expert"]))
    block, _, parameter = renamed.rpartition(".experts.")
    if block:
        _check_gated(modules, block, name)
    expert = _EXPERT.search(name)
    merged = {type(operation).__name__ for operation in converter.operations} <= _MERGES
    if not block or expert is None or not merged or parameter not in ("gate_up_proj", "down_proj"):
        raise ValueError(
            f"{name}: got a layer that becomes part of {renamed}, want an nn.Linear, or an expert's projection"
        )
    sources = list(converter.source_patterns)
    role = DOWN if parameter == "down_proj" else (GATE, UP)[sources.index(source)]
    return Place(block, role, int(expert[1]))


def _check_gated(modules: Mapping[str, nn.Module], block: str, name: str) -> None:
    """ValueError for a projection of experts that are no gated ones, such as Nemotron-H's."""
    experts = modules.get(f"{block}.experts")
    if experts is not None and not hasattr(experts, "gate_up_proj"):
        found = ", ".join(key for key, _ in experts.named_parameters()) or "no weights"
        raise ValueError(
            f"{name}: got an expert of {type(experts).__name__} with {found}, want one with a gate (gate_up_proj): no "
            "kernel serves others"
        )


def _renamer(model: Any) -> Renamer:
    """(key of a checkpoint) -> (key of the model, the conversion that merges it or None, which of its sources)."""

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
    """Raises ValueError unless each block of experts is one that is served, with each expert's projections once."""
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
        block: Any = modules.get(name)
        first = next(iter(found.values()))
        alone = is_experts(block)
        if not alone and not is_moe_block(block):
            raise ValueError(
                f"{first}: got experts for {name}, a {type(block).__name__} of the model, want one that "
                "QuantizedMoE.from_block takes"
            )
        reason = experts_refusal(block) if alone else refusal(block)
        if reason is not None:
            raise ValueError(f"{first}: got experts for {name}, a {type(block).__name__} that is not served: {reason}")
        wanted: list[tuple[Any, Any]] = [(None, "gate_up"), (None, "down")]
        if any(expert is not None for expert, _ in found):
            count = (block if alone else block.experts).down_proj.shape[0]
            wanted = [(expert, role) for expert in range(count) for role in (GATE, UP, DOWN)]
        for key in wanted:
            if key not in found:
                raise ValueError(f"{name}.experts: got no {key[1]} of expert {key[0]}, want it: {first} is packed")
        for key in found.keys() - {*wanted}:
            raise ValueError(f"{found[key]}: got expert {key[0]}, want those that {name} has")
