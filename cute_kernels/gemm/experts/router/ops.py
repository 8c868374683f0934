"""Calling a router, and its registered operator."""

from __future__ import annotations

import torch

from cute_kernels.arguments import needs_dispatch
from cute_kernels.gemm.experts.router.call import RouteCall, check_route
from cute_kernels.gemm.experts.router.reference import route_reference
from cute_kernels.gemm.experts.router.routing import Routing
from cute_kernels.runtime.operator import Operator

Routed = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def route(call: RouteCall) -> Routed:
    """`cute_kernels.gemm.experts.route`."""
    if needs_dispatch(**{name: _plain(tensor) for name, tensor in call.tensors.items()}):
        check_route(call)
        return _operator(call.hidden, call.weight, call.bias, call.correction, *call.routing.fields)
    return _by_torch(check_route(call))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's own tensor: what a router's weight is, which is as plain as any."""
    return tensor.data if type(tensor) is torch.nn.Parameter else tensor


def _by_torch(call: RouteCall) -> Routed:
    return route_reference(call.hidden, call.weight, call.routing, bias=call.bias, correction=call.correction)


@torch.no_grad()
def _fields_by_torch(hidden, weight, bias, correction, *numbers) -> Routed:
    return _by_torch(RouteCall(hidden, weight, Routing(*numbers), bias, correction))


def _fields_on_meta(hidden, weight, bias, correction, top_k, *_) -> Routed:
    shape = hidden.shape[0], top_k
    return hidden.new_empty(shape, dtype=torch.int32), hidden.new_empty(shape, dtype=torch.float32)


_operator = Operator(
    "route(Tensor hidden, Tensor weight, Tensor? bias, Tensor? correction, int top_k, str scoring, bool renormalize, "
    "float scale, int groups, int kept_groups) -> (Tensor, Tensor)",
    cpu=_fields_by_torch,
    cuda=_fields_by_torch,
    meta=_fields_on_meta,
)
