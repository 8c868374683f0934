"""A call of a router as one object, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import check_contiguous, check_dtype, check_kind, check_shape, check_together, shape_of
from cute_kernels.gemm.experts.router.routing import Routing

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class RouteCall(NamedTuple):
    """The arguments of `cute_kernels.gemm.experts.route`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    routing: Routing
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """All given tensors by name: hidden, weight, and the optional tensors that are not None."""
        optional = {"bias": self.bias, "correction": self.correction, "padding": self.padding}
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        return {"hidden": self.hidden, "weight": self.weight, **given}


def check_route(call: RouteCall) -> RouteCall:
    """Raises TypeError or ValueError, which name the argument, unless experts can be chosen."""
    check_together(**call.tensors)
    check_kind("routing", call.routing, Routing, "a Routing")
    for name, tensor in call.tensors.items():
        check_dtype(name, tensor, *((torch.bool,) if name == "padding" else DTYPES))
    hidden, weight = call.hidden, call.weight
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight: got shape {shape_of(weight)}, want [experts, K]")
    experts, k = weight.shape
    check_shape("hidden", hidden, "tokens", k)
    for name in ("bias", "correction"):
        if (tensor := getattr(call, name)) is not None:
            check_shape(name, tensor, experts, why=", one of each expert")
    check_contiguous("weight", weight)
    if call.padding is not None:
        check_shape("padding", call.padding, len(hidden), why=", one of each token")
        check_contiguous("padding", call.padding)
    call.routing.check_experts(experts)
    return call
