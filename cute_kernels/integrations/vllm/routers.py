"""Routers of vLLM's layers of experts: one launch from hidden states to each token's experts.

A runner of vLLM's multiplies by its gate, and hands the logits to its router. Where `cute_kernels.gemm.experts.route`
computes what both do, hidden states take the place of logits up to there. What vLLM does with a token's experts
afterwards stays as it is: it records them, maps them to places, and leaves padding out. Where a model's own code
multiplies by the gate, its compiled graph calls `route` (`fused_routers`), and the router hands out what that chose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
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
IN_GRAPHS = "fused_routers"  # the seam of gates in a model's own code
PADDING = "_get_padding_mask"
"""vLLM's function of a number of tokens, beside routers that leave padding out: which rows are padding, or None."""
ANY_K = 8  # stands for the width of hidden states, which decides no kernel


@dataclass(frozen=True)
class Router:
    """A gate and a router of vLLM's in one. gate: None where the model's own code multiplies by it. routing: what the
    router computes."""

    gate: Foreign | None
    router: Foreign
    routing: Routing

    def call(self, hidden: torch.Tensor) -> RouteCall:
        """The call for hidden states [T, K]."""
        if self.gate is None:  # whichever it is: the graph knows it
            return RouteCall(hidden, hidden.new_empty((self.router.global_num_experts, hidden.shape[1])), self.routing)
        extra = self.gate.bias, getattr(self.router, "e_score_correction_bias", None)
        return RouteCall(hidden, self.gate.weight.data, self.routing, *(None if x is None else x.data for x in extra))

    def defer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Stands for the gate: gives few tokens' hidden states back. With more, two launches are needed in any case,
        and vLLM's are as good."""
        return (hidden, None) if len(hidden) <= MAX_TOKENS or self.gate is None else self.gate.__call__(hidden)

    def choose(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stands for the router's choice. Returns (weights fp32, ids int32), each [T, top_k]; ids of padding are -1.

        router_logits: what the gate gave: hidden states, or logits, which go to vLLM; or a graph's choice, the weights,
        with the ids as input_ids [T, top_k].
        """
        if self.gate is None and input_ids is not None and input_ids.dim() == 2:
            ids, weights = input_ids, router_logits
        elif self.gate is None or router_logits.shape[-1] == len(self.gate.weight):
            own, logits = type(self.router)._compute_routing, (hidden_states, router_logits, indices_type)
            return own(self.router, *logits, input_ids=input_ids)
        else:
            ids, weights = route(self.call(router_logits))
        if len(ids) > 1 and (padding := self._padding(len(ids))) is not None:  # no step pads a single token
            ids = ids.masked_fill(padding[:, None], -1)
        return weights, ids

    def _padding(self, tokens: int) -> torch.Tensor | None:
        return getattr(sys.modules[type(self.router).__module__], PADDING, lambda tokens: None)(tokens)


def connect(layer: Foreign) -> None:
    """Lets the gate and the router of a layer with experts of this package run here, and writes a line to the log; or
    leaves both to vLLM, and the line says why. Where the layer was connected before, it decides anew."""
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


def routings_in_code(layers: Iterable[object]) -> dict[int, Routing]:
    """Returns what the routers of layers compute whose gate is in a model's own code, by their number of experts. It
    leaves out numbers whose routers are not alike, or one of whose cannot be given its choice. layers: an engine's."""
    found: dict[int, set[Routing | None]] = {}
    for router in (each.router for each in layers if hasattr(each, "router") and getattr(each, "gate", 0) is None):
        choose = vars(router).get("_compute_routing")
        routing = None if choose is None else choose.__self__.routing
        found.setdefault(router.global_num_experts, set()).add(routing)
    alike = {experts: routings.pop() for experts, routings in found.items() if len(routings) == 1}
    return {experts: routing for experts, routing in alike.items() if routing is not None}


def reason_against(runner: Foreign, device: torch.device) -> str | None:
    """Returns why a layer keeps vLLM's router; None if it need not."""
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
            f"{where}: {prepare.why_left(IN_GRAPHS)}": prepare.why_left(IN_GRAPHS) is not None,
            f"{where} without fusion": not wanted().sums,
            f"{where} with a correction": getattr(router, "e_score_correction_bias", None) is not None,
            f"{where} with --enable-eplb": router.eplb_state is not None,
        }
    return {
        "a quantised gate": not _is_vllms(gate.quant_method, ("UnquantizedLinearMethod",)),
        "a gate whose bias is added elsewhere": gate.bias is not None and gate.skip_bias_add,
        "hooks of a gate": bool(gate._forward_hooks or gate._forward_pre_hooks or "forward" in vars(gate)),
        "a gate with a shared expert's": getattr(runner, "shared_expert_gate", None) is not None,
    }


def _reason_against_call(runner: Foreign, device: torch.device) -> str | None:
    """Returns why `route` does not compute what a gate and a router do, or not in a launch."""
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
    """A runner's gate and router in one.

    Raises:
        TypeError, ValueError: the router does what no `Routing` says.
    """
    router = runner.router
    groups = getattr(router, "num_expert_group", 1), getattr(router, "topk_group", 1)
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    groups = groups if groups[0] != groups[1] else (1, 1)  # all are kept: it is as if there were none
    routing = Routing(router.top_k, router.scoring_func, bool(router.renormalize), scale, *groups)
    return Router(runner.gate, router, routing)


def _calls(router: Router, dtype: torch.dtype, device: torch.device) -> list[RouteCall]:
    """A call for each kernel that steps need. dtype: of hidden states."""
    counts = (1, MAX_TOKENS, MAX_TOKENS + 1)  # graphs are for any number of tokens
    k, counts = (ANY_K, counts) if (gate := router.gate) is None else (gate.weight.shape[1], counts[:2])
    return [router.call(torch.empty(count, k, dtype=dtype, device=device)) for count in counts]


def specs(calls: Iterable[RouteCall]) -> list[RouterSpec]:
    """The kernels of calls."""
    return [RouterSpec(config_of(call, len(call.hidden) <= MAX_TOKENS)) for call in calls]


def _is_vllms(thing: object, names: tuple[str, ...]) -> bool:
    """Whether a thing is of one of vLLM's classes with these names, and not of a class made of it."""
    return type(thing).__name__ in names and type(thing).__module__.startswith("vllm.")
