"""The call of a router, and its registered operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels.arguments import needs_dispatch
from cute_kernels.gemm.experts.router.call import RouteCall, check_route
from cute_kernels.gemm.experts.router.plan import by_torch, route_plan, unfilled
from cute_kernels.gemm.experts.router.routing import Routing
from cute_kernels.runtime.operator import Operator, is_direct, launcher
from cute_kernels.runtime.plans import key_function

FIELDS = 6  # of a `Routing`


def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `cute_kernels.gemm.experts.route`."""
    if is_direct(call.hidden, call.weight, (call.bias, call.correction, call.padding)):
        return launch(call)
    check_route(call)
    if is_compiling() or needs_dispatch(**{name: _plain(tensor) for name, tensor in call.tensors.items()}):
        return _operator(call.hidden, call.weight, call.bias, call.correction, *call.routing.fields, call.padding)
    return by_torch(call)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the data of a parameter, or a tensor that is no parameter unchanged."""
    return tensor.data if type(tensor) is torch.nn.Parameter else tensor


launch = launcher(key_function(RouteCall), check_route, route_plan, unfilled)


def _call_of(hidden, weight, bias, correction, *others) -> RouteCall:
    """Returns the operator's arguments as a call. others: the fields of a `Routing`, and padding if it is given."""
    fields, padding = others[:FIELDS], others[FIELDS:]
    return RouteCall(hidden, weight, Routing(*fields), bias, correction, *padding)


def _on_cpu(*fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return by_torch(_call_of(*fields))


def _on_cuda(*fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(_call_of(*fields))


_operator = Operator(
    "route(Tensor hidden, Tensor weight, Tensor? bias, Tensor? correction, int top_k, str scoring, bool renormalize, "
    "float scale, int groups, int kept_groups, Tensor? padding=None) -> (Tensor, Tensor)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    meta=lambda *fields: unfilled(_call_of(*fields)),
)
