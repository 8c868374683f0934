"""Keeps plans for later calls with the same key, and makes the parts of keys that describe tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

ALIGNMENT = 16  # bytes, of the widest access, of bulk copies and of tensor maps
MAX_PLANS = 4096  # a cache that grows by a token a step makes a plan a step

KeyT = TypeVar("KeyT", bound=Hashable)
PlanT = TypeVar("PlanT")


def identity(tensor: Any) -> tuple[Hashable, ...]:
    """Returns the properties of a tensor that a plan's key needs if the compiled function takes only the tensor's
    address.

    For a contiguous tensor they have True in place of its strides. That takes less time, and ignores the strides of
    dimensions of size 1, which say nothing.
    """
    layout = tensor.is_contiguous() or tensor.stride()
    return tensor.shape, layout, tensor.dtype, tensor.get_device(), tensor.data_ptr() % ALIGNMENT


def keep(plans: dict[KeyT, PlanT], key: KeyT, plan: PlanT) -> PlanT:
    """Keeps a plan and returns it; drops all others first if there are `MAX_PLANS`."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
