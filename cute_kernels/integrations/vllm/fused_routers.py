"""Rewriting of the traced step of a model whose own code multiplies by a router's gate. It needs only torch.

    logits = x W^T + b; experts(x, logits)  ->  experts(x, W, b)

The graph must show that nothing else reads the logits. The operator of experts passes W and b on to the layer's
router in place of logits and token ids, and the router computes its choice in one launch (`routers`).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import torch
from torch import fx

from cute_kernels.integrations.vllm.fused_graph import DTYPES

EXPERTS = ("vllm.moe_forward.default", "vllm.moe_forward_shared.default")
ARGUMENTS = ("hidden_states", "router_logits", "shared_experts_input", "input_ids")
"""The first arguments of the operators of experts, in order."""
MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
TURNS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)
VECTOR = 8  # elements: K is a multiple of it where a kernel reads hidden states


def fuse(graph: fx.Graph, experts: Container[int]) -> int:
    """Rewrites a graph in place. Returns the number of rewritten routers.

    experts: the result of `routers_in_code`: the numbers of experts for which a router can also multiply by the gate.
    """
    return sum(_fuse(node, experts) for node in [node for node in graph.nodes if _is_experts(node)])


def _is_experts(node: fx.Node) -> bool:
    """Returns whether a node is the operator of a layer of experts, as it is or wrapped to have no side effects."""
    return node.op == "call_function" and any(str(each) in EXPERTS for each in (node.target, *node.args[:1]))


def _fuse(node: fx.Node, experts: Container[int]) -> bool:
    logits = _argument(node, "router_logits")
    parts = _gate_of(logits) if isinstance(logits, fx.Node) and set(logits.users) == {node} else None
    if parts is None or _argument(node, "input_ids") is not None:
        return False
    x, weight, bias = parts
    if x is not _argument(node, "hidden_states") or weight.meta["val"].shape[0] not in experts:
        return False
    for name, given in (("router_logits", weight), ("input_ids", bias)):
        if str(node.target) in EXPERTS and name not in node.kwargs:
            node.update_arg(ARGUMENTS.index(name), given)
        else:
            node.update_kwarg(name, given)
    node.meta.pop("eager_input_vals", None)  # of the logits: Inductor would give the operator tensors like those
    return True


def _argument(node: fx.Node, name: str) -> Any:
    index = ARGUMENTS.index(name)
    return node.kwargs.get(name, node.args[index] if index < len(node.args) else None)


def _gate_of(logits: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Returns (hidden states [T, K], weight [E, K], bias [E] or None) from which logits are computed; None if no kernel
    supports them.
    """
    if logits.target not in (MM, ADDMM) or logits.kwargs:
        return None
    *biases, x, turned = logits.args
    weight = turned.args[0] if isinstance(turned, fx.Node) and turned.target in TURNS else None
    nodes = [x, turned, weight, *biases]
    values = [node.meta.get("val") for node in nodes if isinstance(node, fx.Node)]
    if len(values) < len(nodes) or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    hidden, transposed, matrix, *added = cast("list[torch.Tensor]", values)
    experts, k = matrix.shape
    fits = hidden.dtype in DTYPES and all(value.dtype == hidden.dtype for value in (matrix, *added))
    whole = matrix.is_contiguous() and transposed.shape == (k, experts) and not k % VECTOR
    if not fits or not whole or k == experts or any(value.shape != (experts,) for value in added):
        return None  # a weight with as many columns as experts would look like logits
    return cast("tuple[fx.Node, fx.Node, fx.Node | None]", (x, weight, *(biases or [None])))
