"""The mixtures of experts of transformers that are known to compute what `QuantizedMoE` computes.

Most classes of experts in transformers have the declaration `use_experts_implementation`, which says that they compute
weighted sums of gated products. `known_models.json` lists the classes of all other supported experts, and of blocks
around experts. A subclass with its own code is not supported.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch import nn

from cute_kernels.gemm.activations import ClampedSwiglu
from cute_kernels.gemm.experts.stored import is_experts, known_experts

SHARED_NAMES = ("shared_experts", "shared_expert")  # an expert that takes all tokens
SHARED_GATE = "shared_expert_gate"  # what its result is multiplied with, after a sigmoid

_KNOWN = json.loads(Path(__file__).with_name("known_models.json").read_text())
EXPERTS: dict[str, bool] = _KNOWN["experts"]
"""Classes of experts without the declaration, or with a gate of their own. The value says whether their limits are
those of `ClampedSwiglu`."""

BLOCKS: frozenset[str] = frozenset(_KNOWN["blocks"])
"""Classes of blocks that add their experts' and their shared expert's results. Their router returns (logits, weights,
ids), or Llama 4's scores."""


def is_moe_block(module: object) -> bool:
    """Returns whether ``module`` has exactly the parts of which `QuantizedMoE.from_block` makes a layer."""
    if not isinstance(module, nn.Module):
        return False
    children = dict(module.named_children())
    known = known_experts(children.get("experts"))
    if known is None:
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = children.keys() - {known[0].router, "experts", *SHARED_NAMES, SHARED_GATE}
    return not own and not others and known[0].router in children and not children.keys() >= {*SHARED_NAMES}


def shared_of(block: nn.Module) -> dict[str, nn.Module]:
    """Returns the block's shared expert and the gate of the shared expert, by name. Parts that the block lacks are
    missing.
    """
    return {name: child for name, child in block.named_children() if name in (*SHARED_NAMES, SHARED_GATE)}


def with_shared(module: nn.Module, shared: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns y plus the shared expert's result for x."""
    z = module.get_submodule(shared)(x)
    if hasattr(module, SHARED_GATE):
        z = torch.sigmoid(module.get_submodule(SHARED_GATE)(x)) * z
    return y + z


def refusal(module: nn.Module) -> str | None:
    """Returns why ``module`` is not supported, or None if it is. ``module`` is a block with the right parts
    (`is_moe_block`), or a module of experts (`is_experts`).
    """
    if is_experts(module):
        return experts_refusal(module)
    experts = module.get_submodule("experts")
    known = known_experts(experts)
    assert known is not None
    reason = _router_refusal(module.get_submodule(known[0].router)) or experts_refusal(experts)
    # Blocks of older releases choose experts by a method of their own.
    if reason is None and (_home(module) not in BLOCKS or hasattr(module, "route_tokens_to_experts")):
        return f"{type(module).__name__} is not known to add up what its experts and its shared expert say, and no more"
    return reason


def experts_refusal(experts: nn.Module) -> str | None:
    """Returns why experts with known weights (`is_experts`) are not supported, or None if they are."""
    known = known_experts(experts)
    if known is None:
        return "its weights or its activation are not known"
    kind, activation = known
    clamps = EXPERTS.get(_home(experts))
    if clamps is None and (kind.scales_inputs or kind.biased or not _is_declared(type(experts))):
        return f"the code of its experts, {type(experts).__name__}, is not known"
    if isinstance(activation, ClampedSwiglu) and not clamps:
        return f"its experts, {type(experts).__name__}, have limits that are not known to be those of {activation.name}"
    return None


def _router_refusal(router: nn.Module) -> str | None:
    """Returns why the router needs more inputs than hidden states, or None."""
    asked = inspect.signature(router.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [each.name for each in asked if each.default is inspect.Parameter.empty and each.kind in kinds]
    if len(wanted) == 1:
        return None
    kind, names = type(router).__name__, ", ".join(wanted) or "nothing"
    return f"its router {kind} takes {names}, want one that takes hidden states alone"


def _home(module: nn.Module) -> str:
    """Returns "file.Class" for a module's class of transformers. Returns "" for any other class, and for a class whose
    code is not from that file.
    """
    kind, home = type(module), type(module).__module__
    file = home.rpartition("modeling_")[2]
    methods = [getattr(kind, name) for name in ("forward", "_apply_gate") if hasattr(kind, name)]
    own = home == f"transformers.models.{file}.modeling_{file}" and all(each.__module__ == home for each in methods)
    return f"{file}.{kind.__qualname__}" if own else ""


def _is_declared(kind: type) -> bool:
    """Returns whether transformers declares that a class of experts computes gated products, with the gate of
    transformers.integrations.moe."""
    gate, forward = getattr(kind, "_apply_gate", None), getattr(kind, "forward", None)
    return hasattr(forward, "__wrapped__") and getattr(gate, "__module__", "") == "transformers.integrations.moe"
