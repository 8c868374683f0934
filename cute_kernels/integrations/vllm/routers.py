"""Routers of vLLM's expert layers: one launch from hidden states to each token's experts.

A runner of vLLM multiplies by its gate, and passes the logits to its router. If `cute_kernels.gemm.experts.route`
computes both, the runner passes hidden states instead of logits. If a model's own code multiplies by the gate, its
compiled graph passes the gate's weight instead (`fused_routers`). vLLM still records the chosen experts and maps them
to physical experts (EPLB).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional
from vllm import envs

from cute_kernels.gemm.experts.router.call import RouteCall, check_route
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import MAX_TOKENS
from cute_kernels.gemm.experts.router.ops import route
from cute_kernels.gemm.experts.router.plan import config_of, is_served, takes_product
from cute_kernels.gemm.experts.router.routing import Routing
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import plugin, prepare
from cute_kernels.integrations.vllm.fused_layers import wanted
from cute_kernels.integrations.vllm.seams import refusal, say_once

RUNNERS, GATES = ("MoERunner",), ("GateLinear", "ReplicatedLinear")
ROUTERS = ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter")
PADDING = "_get_padding_mask"
"""vLLM's function in the modules of routers that mask padding: number of tokens -> which rows are padding, or None."""


@dataclass(frozen=True)
class Router:
    """A gate and a router of vLLM combined.

    Attributes:
        gate: the gate; None if the model's own code multiplies by it.
        routing: the routing that the router computes.
    """

    gate: Foreign | None
    router: Foreign
    routing: Routing

    def call(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> RouteCall:
        """Returns the call of `route` for hidden states [T, K].

        weight, bias: the gate's weight and bias. They are needed only if the model's own code multiplies by the gate.
        """
        gate = (weight, bias) if self.gate is None else (self.gate.weight, self.gate.bias)
        added = gate[1], getattr(self.router, "e_score_correction_bias", None)
        bias, correction = (None if each is None else each.data for each in added)
        return RouteCall(hidden, gate[0].data, self.routing, bias, correction, self._padding(len(hidden)))

    def defer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Replaces the gate. For few tokens, returns the hidden states unchanged. For many tokens, returns the gate's
        logits.

        Many tokens need two launches in any case, and vLLM's launches are as fast.
        """
        return (hidden, None) if len(hidden) <= MAX_TOKENS or self.gate is None else self.gate.__call__(hidden)

    def choose(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces the router's choice. Returns (weights fp32, ids int32), each [T, top_k]; ids of padding are -1.

        router_logits: one of three tensors: the hidden states, from `defer`; the gate's weight, if the model's own code
        multiplies by the gate (input_ids is then the gate's bias); or logits, for which vLLM's own router is called.
        """
        if router_logits.shape[-1] != self.experts:
            if len(hidden_states) <= MAX_TOKENS:
                ids, weights = route(self.call(hidden_states, router_logits, input_ids))
                return weights, ids
            router_logits, input_ids = functional.linear(hidden_states, router_logits, input_ids), None
        own, logits = type(self.router)._compute_routing, (hidden_states, router_logits, indices_type)
        return own(self.router, *logits, input_ids=input_ids)

    @property
    def experts(self) -> int:
        """The number of experts among which the gate chooses."""
        return self.router.global_num_experts if self.gate is None else len(self.gate.weight)

    def _padding(self, tokens: int) -> torch.Tensor | None:
        """Returns which rows are padding; None if vLLM does not say it, or has the mask of a step with another number
        of rows."""
        mask = getattr(sys.modules[type(self.router).__module__], PADDING, lambda tokens: None)(tokens)
        return mask if mask is not None and len(mask) == tokens else None


def connect(layer: Foreign) -> None:
    """Decides, for a layer with this package's experts, whether this package or vLLM computes the gate and the router.

    A log line has the decision and its reason. If the layer was connected before, the decision is made again.
    """
    runner = prepare.layer_named(getattr(layer, "layer_name", None))
    if runner is None:
        return
    device = next(layer.parameters()).device
    try:
        if vars(runner).get("gate") is not None:  # what stands for a submodule; None says that there is no gate
            del vars(runner)["gate"]
        vars(runner.router).pop("_compute_routing", None)
        reason = reason_against(runner, device)
    except AttributeError as error:  # a version that calls something otherwise
        reason = str(error)
    if reason is None:
        made = router_of(runner)
        reason = prepare.make_ready(device, lambda: specs(_calls(made, runner.moe_config.in_dtype, device)))
        if reason is None:
            runner.router._compute_routing = made.choose
            if made.gate is not None:  # a submodule of the runner as before: so its parameters are loaded and named
                vars(runner)["gate"] = made.defer
            plugin.note_served(f"router of {runner.router.global_num_experts} experts {made.routing}")
    say_once("routers of experts run here" if reason is None else f"routers of experts are left to vLLM: {reason}")


def routers_in_code(layers: Iterable[object]) -> set[int]:
    """Returns the numbers of experts for which this package computes every router whose gate is in the model's own
    code.

    layers: an engine's layers.
    """
    found: dict[int, bool] = {}
    for router in (each.router for each in layers if hasattr(each, "router") and getattr(each, "gate", 0) is None):
        experts = router.global_num_experts
        found[experts] = found.get(experts, True) and "_compute_routing" in vars(router)
    return {experts for experts, all_run_here in found.items() if all_run_here}


def reason_against(runner: Foreign, device: torch.device) -> str | None:
    """Returns why a layer keeps vLLM's router; None if `route` can replace it."""
    gate, router = runner.gate, runner.router
    if not (_is_vllms(runner, RUNNERS) and _is_vllms(router, ROUTERS) and (gate is None or _is_vllms(gate, GATES))):
        return refusal({f"{type(runner).__name__}, {type(router).__name__} and {type(gate).__name__}": True})
    parallel = runner.moe_config.moe_parallel_config
    alone = parallel.dp_size == parallel.pcp_size == 1 and not parallel.is_sequence_parallel
    wrong = {
        "tokens of several GPUs": not alone,
        "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
        "experts by token": getattr(router, "_hash_indices_table", None) is not None,
        "a bias for images": getattr(router, "bias_vl", None) is not None,
        "shared experts among the others": bool(getattr(router, "num_fused_shared_experts", 0)),
        "padding left out of groups": bool(getattr(router, "skip_padding", False)),
    }
    return refusal(wrong | _wrong_with_gate(runner)) or _reason_against_call(runner, device)


def _wrong_with_gate(runner: Foreign) -> dict[str, object]:
    gate, router = runner.gate, runner.router
    if gate is None:
        where = "a gate in the model's own code"
        return {
            f"{where} without fusion": not wanted().sums,
            f"{where} with --enable-eplb": router.eplb_state is not None,
        }
    return {
        "a quantised gate": not _is_vllms(gate.quant_method, ("UnquantizedLinearMethod",)),
        "a gate whose bias is added elsewhere": gate.bias is not None and gate.skip_bias_add,
        "hooks of a gate": bool(gate._forward_hooks or gate._forward_pre_hooks or "forward" in vars(gate)),
        "a gate with a shared expert's": getattr(runner, "shared_expert_gate", None) is not None,
    }


def _reason_against_call(runner: Foreign, device: torch.device) -> str | None:
    """Returns why `route` cannot compute a gate and a router in one launch; None if it can."""
    try:
        made = router_of(runner)
        calls = [check_route(call) for call in _calls(made, runner.moe_config.in_dtype, device)]
    except (TypeError, ValueError) as error:
        return str(error)
    experts, k = calls[0].weight.shape
    groups = getattr(runner.router, "num_expert_group", 1)
    wrong = {
        "groups ranked by their best expert": made.routing.groups > 1 and calls[0].correction is None,
        f"{groups} groups of {experts} experts": experts % groups != 0 or experts <= groups,
        f"{experts} experts of {k} features": made.gate is not None
        and (k == experts or not all(map(takes_product, calls))),
        f"{experts} experts, {made.routing.top_k} of a token, in {calls[0].hidden.dtype}": not all(
            map(is_served, calls)
        ),
    }
    return refusal(wrong)


def router_of(runner: Foreign) -> Router:
    """Returns a runner's gate and router combined.

    Raises:
        TypeError, ValueError: no `Routing` expresses what the router computes.
    """
    router = runner.router
    groups = getattr(router, "num_expert_group", 1), getattr(router, "topk_group", 1)
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    groups = groups if groups[0] != groups[1] else (1, 1)  # all are kept: it is as if there were none
    routing = Routing(router.top_k, router.scoring_func, bool(router.renormalize), scale, *groups)
    return Router(runner.gate, router, routing)


def _calls(router: Router, dtype: torch.dtype, device: torch.device) -> list[RouteCall]:
    """Returns a call for each kernel that steps need. dtype: the hidden states' dtype."""
    k = 8 if router.gate is None else router.gate.weight.shape[1]  # only the graph knows it, and it decides no kernel
    weight = torch.empty(router.experts, k, dtype=dtype, device=device)
    return [router.call(torch.empty(count, k, dtype=dtype, device=device), weight, None) for count in (1, MAX_TOKENS)]


def specs(calls: Iterable[RouteCall]) -> list[RouterSpec]:
    """Returns the kernels that calls of `route` need, if `route` also multiplies by the gate."""
    return [RouterSpec(config_of(call, multiplies=True)) for call in calls]


def _is_vllms(thing: object, names: tuple[str, ...]) -> bool:
    """Returns whether an object's class is one of vLLM's with these names, and not a subclass."""
    return type(thing).__name__ in names and type(thing).__module__.startswith("vllm.")
