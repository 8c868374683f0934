"""Plans: the part of a call that is kept for the next one like it, and the keys that tell calls apart."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

ALIGNMENT = 16  # bytes, of the widest access, of bulk copies and of tensor maps
MAX_PLANS = 4096  # a cache that grows by a token a step makes a plan a step

KeyT = TypeVar("KeyT", bound=Hashable)
PlanT = TypeVar("PlanT")


def identity(tensor: Any) -> tuple[Hashable, ...]:
    """Returns the properties of a tensor that a plan relies on if the function takes its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % ALIGNMENT


def keep(plans: dict[KeyT, PlanT], key: KeyT, plan: PlanT) -> PlanT:
    """Remembers a plan, and forgets all others when there are too many."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
