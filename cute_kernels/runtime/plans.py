"""Keeps plans for later calls with the same key, and makes the parts of keys that describe tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from torch import Tensor

from cute_kernels.arguments import check_optional_positive

ALIGNMENT = 16  # bytes, of the widest access, of bulk copies and of tensor maps
MAX_PLANS = 4096  # a cache that grows by a token a step makes a plan a step

# What a key has of a call's field, as source code.
COPIED = "{0}.shape, {0}.dtype, {0}.get_device()"  # of a tensor that is copied where it has gaps
TENSOR = f"{COPIED}, {{0}}.is_contiguous() or {{0}}.stride(), {{0}}.data_ptr() % {ALIGNMENT}"
FORM, VALUE = "{0}.form", "{0}"
FLAG = "{0} if {0}.__class__ is bool else no_flag({0})"  # a 1 would be found as True
SCALE = "check_optional_positive('softmax_scale', {0})"  # checked by every call, as no plan depends on its value
TENSORS = "tuple([None if each is None else identity(each) for each in {0}])"

KeyT = TypeVar("KeyT", bound=Hashable)
PlanT = TypeVar("PlanT")


identity: Callable[[Any], tuple[Hashable, ...]] = eval(f"lambda tensor: ({TENSOR.format('tensor')})")
"""Returns the properties of a tensor that a plan's key needs if the compiled function takes only the tensor's address.

For a contiguous tensor, True replaces the strides. That takes less time, and ignores the strides of dimensions of size
1, which mean nothing.
"""


def key_function(call: type[tuple[Any, ...]], **parts: str) -> Callable[[Any], tuple[Hashable, ...]]:
    """Makes the function that returns a call's key. ``call`` is the NamedTuple class of a call's arguments. A field's
    annotation decides what the key contains of that field. The function is made as source code, since every call of a
    decoding step waits for it.

    parts: source code, such as `COPIED`, for fields whose annotations do not decide; "" leaves a field out of the key.
    """

    def part_of(name: str, hint: Any) -> str:
        kinds = get_args(hint) or (hint,)
        own = FORM if any("form" in dir(kind) for kind in kinds) else FLAG if hint is bool else VALUE
        own = parts.get(name, TENSOR if Tensor in kinds else own)
        optional = NoneType in kinds and own not in (VALUE, "")
        return f"None if {name} is None else ({own})".format(name) if optional else own.format(name)

    hints = get_type_hints(call)
    shown = ", ".join(filter(None, (part_of(name, hint) for name, hint in hints.items())))
    scope: dict[str, Any] = {"__name__": call.__module__, "no_flag": _no_flag, "identity": identity}
    scope["check_optional_positive"] = check_optional_positive
    exec(f"def key_of(call):\n    {', '.join(hints)} = call\n    return {shown}", scope)
    return scope["key_of"]


def _no_flag(value: object) -> NoReturn:
    raise TypeError(f"got {value!r}, want True or False")


def keep(plans: dict[KeyT, PlanT], key: KeyT, plan: PlanT) -> PlanT:
    """Keeps a plan and returns it; drops all others first if there are `MAX_PLANS`."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
