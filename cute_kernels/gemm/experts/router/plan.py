"""Makes the plans of calls of routers: a plan has a call's kernels and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from cute_kernels.gemm.experts.router import config as router
from cute_kernels.gemm.experts.router.call import DTYPES, RouteCall
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import RouterConfig
from cute_kernels.gemm.experts.router.reference import route_reference
from cute_kernels.gemm.experts.router.routing import SCORINGS
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.inputs.launch import contiguous
from cute_kernels.gemm.product import workspace
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import by_name
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan, as_kernels
from cute_kernels.runtime.plans import ALIGNMENT

VECTOR = 8  # elements: K is a multiple of it where a kernel reads hidden states
Routed = tuple[torch.Tensor, torch.Tensor]


def route_plan(call: RouteCall) -> Plan[[RouteCall], Routed] | None:
    """Returns the plan of a checked call; None for a call without tokens."""
    hidden, index = call.hidden, call.hidden.get_device()
    if not len(hidden):
        return None
    if not is_served(call):
        return Plan(index, by_torch)
    with GPU.guard(hidden.device):
        multiplies = len(hidden) <= router.MAX_TOKENS and takes_product(call)
        send = _bound(call, multiplies, index)
    size = len(hidden), call.routing.top_k
    new_ids, new_weights = blank(size, torch.int32), blank(size, torch.float32)

    def launch(call: RouteCall) -> Routed:
        hidden, ids, weights = call.hidden, GPU.empty(*new_ids), GPU.empty(*new_weights)
        given = {"bias": call.bias, "correction": call.correction, "padding": call.padding}
        if not multiplies:
            send(logits=product(hidden, call.weight), **given, ids=ids, weights=weights)
            return ids, weights
        hidden = contiguous(hidden.detach())
        hidden = hidden.clone() if hidden.data_ptr() % ALIGNMENT else hidden
        send(hidden=hidden, weight=call.weight, **given, ids=ids, weights=weights)
        return ids, weights

    return Plan(index, launch)


def unfilled(call: RouteCall) -> Routed:
    """Returns new tensors for the result of a call."""
    shape = call.hidden.shape[0], call.routing.top_k
    return call.hidden.new_empty(shape, dtype=torch.int32), call.hidden.new_empty(shape, dtype=torch.float32)


@as_kernels
def by_torch(call: RouteCall) -> Routed:
    """Returns the result of a checked call by torch's operators, on any device."""
    return route_reference(*call[:3], **dict(zip(RouteCall._fields[3:], call[3:], strict=True)))


@as_kernels
def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns fp32 logits [T, E] without the bias."""
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return functional.linear(hidden.float(), weight.float())


def is_served(call: RouteCall) -> bool:
    """Returns whether a kernel of this package can choose the call's experts. If not, torch chooses them."""
    routing, added = call.routing, (call.bias, call.correction)
    if call.hidden.dtype == torch.float32 or not is_supported(call.hidden.get_device()):
        return False
    known = (call.hidden.dtype, torch.float32)
    if any(tensor is not None and (tensor.dtype not in known or not tensor.is_contiguous()) for tensor in added):
        return False
    return len(call.weight) <= MAX_EXPERTS and max(routing.top_k, routing.groups) <= router.MAX_CHOICES


def takes_product(call: RouteCall) -> bool:
    """Returns whether a kernel of this package can multiply hidden states by the router's weight. If not, torch
    computes the product."""
    hidden, weight = call.hidden, call.weight
    is_known = weight.dtype in (hidden.dtype, torch.float32)
    return is_known and not hidden.shape[1] % VECTOR and not weight.data_ptr() % ALIGNMENT


def expert_shift_of(experts: int, num_sms: int) -> int:
    """Returns log2 of the number of experts that a CTA has. A CTA has as few experts as possible without more CTAs than
    SMs, and at most one expert for each warp."""
    most = router.WARPS.bit_length() - 1
    return next((shift for shift in range(most) if -(-experts >> shift) <= num_sms), most)


def config_of(call: RouteCall, multiplies: bool) -> RouterConfig:
    """Returns the configuration of the kernel for a checked call. multiplies: whether the kernel includes the
    product."""
    dtype, lanes = DTYPES[call.hidden.dtype], router.lane_experts_of(len(call.weight))
    if not multiplies:
        return RouterConfig(dtype, router.LOGITS, lanes)
    weight = "own" if call.weight.dtype == call.hidden.dtype else "fp32"
    return RouterConfig(dtype, weight, lanes, router.TILE_TOKENS[len(call.hidden) > 1])


def _bound(call: RouteCall, multiplies: bool, index: int) -> Callable[..., Any]:
    """Returns the kernel of a call, bound to all arguments that do not change from call to call. It takes tensors by
    name."""
    config, (tokens, _), experts = config_of(call, multiplies), call.hidden.shape, len(call.weight)
    routing = call.routing
    fixed: dict[str, object] = {
        "top_k": routing.top_k,
        "scoring": SCORINGS.index(routing.scoring),
        "ranks_logits": int(routing.ranks_logits(call.correction is not None)),
        "renormalize": int(routing.renormalize),
        "groups": routing.groups,
        "kept_groups": routing.kept_groups,
        "scale": float(routing.scale),
    }
    for name, tensor in (("bias", call.bias), ("correction", call.correction)):
        fixed[f"{name}_wide"] = int(tensor is None or tensor.dtype == torch.float32)
    function = load(RouterSpec(config), arch_of(index))
    tensors = by_name("bias", "correction", "padding", "ids", "weights")
    if not multiplies:
        return config.kernel().arguments.bound(function, fixed, tensors)
    fixed |= {"experts": experts, "expert_shift": expert_shift_of(experts, GPU.num_sms(index))}
    made = {"workspace": lambda: workspace(index, tokens * experts)}
    return config.kernel().arguments.bound(function, fixed, tensors | by_name("weight"), made=made)
