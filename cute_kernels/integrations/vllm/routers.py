"""Routers of vLLM's layers of experts: one launch from hidden states to each token's experts.

A runner of vLLM's multiplies by its gate, and hands the logits to its router. Where `cute_kernels.gemm.experts.route`
computes what both do, hidden states take the place of logits up to there. What vLLM does with a token's experts
afterwards stays as it is: it records them, maps them to places, and leaves padding out. Models whose own code
multiplies by the gate keep vLLM's router.
"""

from __future__ import annotations

import sys
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
from cute_kernels.integrations.vllm import prepare
from cute_kernels.integrations.vllm.seams import refusal, say_once

RUNNERS, GATES = ("MoERunner",), ("GateLinear", "ReplicatedLinear")
ROUTERS = ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter")
PADDING = "_get_padding_mask"
"""vLLM's function of a number of tokens, beside routers that leave padding out: which rows are padding, or None."""


@dataclass(frozen=True)
class Router:
    """A gate and a router of vLLM's in one. routing: what the router computes."""

    gate: Foreign
    router: Foreign
    routing: Routing

    def call(self, hidden: torch.Tensor) -> RouteCall:
        """The call for hidden states [T, K]."""
        extra = self.gate.bias, getattr(self.router, "e_score_correction_bias", None)
        return RouteCall(hidden, self.gate.weight.data, self.routing, *(None if x is None else x.data for x in extra))

    def defer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Stands for the gate: gives few tokens' hidden states back. With more, two launches are needed in any case,
        and vLLM's are as good."""
        return (hidden, None) if len(hidden) <= MAX_TOKENS else self.gate.__call__(hidden)

    def choose(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stands for the router's choice. Returns (weights fp32, ids int32), each [T, top_k]; ids of padding are -1.

        router_logits: what the gate gave: hidden states, or logits, which go to vLLM.
        """
        if router_logits.shape[-1] == len(self.gate.weight):
            own, logits = type(self.router)._compute_routing, (hidden_states, router_logits, indices_type)
            return own(self.router, *logits, input_ids=input_ids)
        ids, weights = route(self.call(router_logits))
        if len(ids) > 1 and (padding := self._padding(len(ids))) is not None:  # no step pads a single token
            ids.masked_fill_(padding[:, None], -1)
        return weights, ids

    def _padding(self, tokens: int) -> torch.Tensor | None:
        find = getattr(sys.modules[type(self.router).__module__], PADDING, None)
        return None if find is None else find(tokens)


def connect(name: str | None) -> None:
    """Lets the gate and the router of a layer with experts of this package run here, and writes a line to the log; or
    leaves both to vLLM, and the line says why. Where the layer was connected before, it decides anew.

    name: of the layer, by which vLLM finds its runner.
    """
    runner = prepare.layer_named(name)
    if runner is None:
        return
    vars(runner).pop("gate", None)
    vars(runner.router).pop("_compute_routing", None)
    reason = reason_against(runner)
    if reason is None:
        made = router_of(runner)
        reason = prepare.make_ready(made.gate.weight.device, lambda: specs(made, runner.moe_config.in_dtype))
        if reason is None:
            # The gate stays a submodule of the runner: its parameters are loaded, named and moved as before.
            vars(runner)["gate"], runner.router._compute_routing = made.defer, made.choose
    say_once("routers of experts run here" if reason is None else f"routers of experts are left to vLLM: {reason}")


def reason_against(runner: Foreign) -> str | None:
    """Returns why a layer keeps vLLM's router; None if it need not."""
    gate, router = runner.gate, runner.router
    if gate is None:
        return "the model's own code multiplies by the gate"
    if not (_is_vllms(runner, RUNNERS) and _is_vllms(gate, GATES) and _is_vllms(router, ROUTERS)):
        return refusal({f"{type(runner).__name__}, {type(gate).__name__} and {type(router).__name__}": True})
    parallel = runner.moe_config.moe_parallel_config
    alone = parallel.dp_size == parallel.pcp_size == 1 and not parallel.is_sequence_parallel
    wrong = {
        "a quantised gate": not _is_vllms(gate.quant_method, ("UnquantizedLinearMethod",)),
        "a gate whose bias is added elsewhere": gate.bias is not None and gate.skip_bias_add,
        "hooks of a gate": bool(gate._forward_hooks or gate._forward_pre_hooks or "forward" in vars(gate)),
        "a gate with a shared expert's": getattr(runner, "shared_expert_gate", None) is not None,
        "tokens of several GPUs": not alone,
        "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
        "experts by token": getattr(router, "_hash_indices_table", None) is not None,
        "a bias for images": getattr(router, "bias_vl", None) is not None,
        "shared experts among the others": bool(getattr(router, "num_fused_shared_experts", 0)),
        "padding left out of groups": bool(getattr(router, "skip_padding", False)),
    }
    return refusal(wrong) or _reason_against_call(runner)


def _reason_against_call(runner: Foreign) -> str | None:
    """Returns why `route` does not compute what a gate and a router do, or not in a launch."""
    try:
        made = router_of(runner)
        calls = [check_route(call) for call in _calls(made, runner.moe_config.in_dtype)]
    except (TypeError, ValueError) as error:
        return str(error)
    experts, k = made.gate.weight.shape
    groups = getattr(runner.router, "num_expert_group", 1)
    wrong = {
        "groups ranked by their best expert": made.routing.groups > 1 and calls[0].correction is None,
        f"{groups} groups of {experts} experts": experts % groups != 0 or experts <= groups,
        f"{experts} experts of {k} features": k == experts or not all(map(takes_product, calls)),
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
    kept = groups if groups[0] != groups[1] else (1, 1)  # all are kept: it is as if there were none
    return Router(
        runner.gate, router, Routing(router.top_k, router.scoring_func, bool(router.renormalize), scale, *kept)
    )


def specs(router: Router, dtype: torch.dtype) -> list[RouterSpec]:
    """The kernels of steps of up to `MAX_TOKENS` tokens. dtype: of hidden states."""
    return [RouterSpec(config_of(call, True)) for call in _calls(router, dtype)]


def _calls(router: Router, dtype: torch.dtype) -> list[RouteCall]:
    """A call for each kernel that steps need."""
    weight = router.gate.weight
    return [router.call(weight.new_empty((tokens, weight.shape[1]), dtype=dtype)) for tokens in (1, MAX_TOKENS)]


def _is_vllms(thing: object, names: tuple[str, ...]) -> bool:
    """Whether a thing is of one of vLLM's classes with these names, and not of a class made of it."""
    return type(thing).__name__ in names and type(thing).__module__.startswith("vllm.")
