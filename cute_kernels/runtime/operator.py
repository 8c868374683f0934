"""The path of a call from a public function to its kernel, written once for all families.

    public function -> its family's launch (CUDA), reference (CPU) or registered operator (traced, or no plain tensors)
    launch: key -> kept plan -> the plan's launch on its device; checks if a plan is new or the launch is refused

A family has functions of a call's arguments (a plan's key, the checks, the plan) and a schema. For a call with a known
key, the host only computes the key, looks up the plan and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import check_together, needs_dispatch
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.plans import keep

P = ParamSpec("P")
CallT = TypeVar("CallT")
CallT_contra = TypeVar("CallT_contra", contravariant=True)
CheckedT = TypeVar("CheckedT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

_library = torch.library.Library("cute_kernels", "FRAGMENT")

new_call = tuple.__new__
"""Makes a call from its class and a tuple of its values. It takes a third of the constructor's time, which each layer
waits for."""


# -- launches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan(Generic[P, ResultT]):
    """A plan: the part of a launch that stays the same between calls with equal keys.

    Attributes:
        device_index: the index of the device that the plan was made for.
        launch: launches a call on the current stream of the plan's device, which must be the current device. It is a
            closure over compiled kernels, sizes and the form of results.
        products: the products or configurations that the plan launches, for tools that ask which kernels a call uses.
        holds: tensors that are kept alive because ``launch`` holds their addresses.
    """

    device_index: int
    launch: Callable[P, ResultT]
    products: tuple[Any, ...] = ()
    holds: tuple[torch.Tensor | None, ...] = ()


class Launcher(Protocol[CallT_contra, ResultT_co]):
    """A function that launches calls on CUDA tensors.

    Attributes:
        plans: the kept plans, by key.
    """

    plans: dict[Hashable, Any]
    __module__: str

    def __call__(self, call: CallT_contra, /) -> ResultT_co: ...


REFUSALS = (AttributeError, IndexError, TypeError, ValueError, RuntimeError)
"""The errors that a key or a compiled function may raise for arguments that the checks refuse."""


def launcher(
    key: Callable[[CallT], Hashable],
    check: Callable[[CallT], CheckedT],
    make: Callable[[CheckedT], Plan[[CallT], ResultT] | None],
    empty: Callable[[CheckedT], ResultT] | None = None,
    always: Callable[[CallT], bool] | None = None,
) -> Launcher[CallT, ResultT]:
    """Makes a function that launches calls on CUDA tensors, with a plan for each kind of call.

    A call with the key of an earlier call is not checked again. So a key contains everything that the checks read. Only
    shapes, strides, dtypes, alignment and device of tensors that the compiled function compares itself may be left out.
    If the compiled function refuses a call, the checks run and raise an error in the caller's terms.

    Args:
        key: maps a call, one value with all arguments, to the key of its plan. It may raise one of `REFUSALS` for an
            argument of a wrong kind, such as a tensor without strides. Then the checks raise an error that names the
            argument. If they find no fault, the first error is raised.
        check: checks a call, and returns the argument of ``make``. Checks that wait for the device run only with
            `cute_kernels.arguments.DEBUG`. Raises TypeError or ValueError.
        make: makes a checked call's plan; None for a call that needs no kernel.
        empty: makes the result of a checked call that needs no kernel.
        always: returns whether a call is checked even if there is a plan for it.
    """
    plans: dict[Hashable, Plan[[CallT], ResultT]] = {}
    forgotten(plans.clear)

    def launch(call: CallT) -> ResultT:
        try:
            plan = plans.get(found := key(call))
        except REFUSALS:
            check(call)
            raise
        if plan is None or arguments.DEBUG or (always is not None and always(call)):
            return check_and_launch(call, found, plan)
        try:
            if plan.device_index == GPU.current():
                return plan.launch(call)
            with GPU.guard(plan.device_index):
                return plan.launch(call)
        except REFUSALS:
            check(call)
            raise

    def check_and_launch(call: CallT, found: Hashable, plan: Plan[[CallT], ResultT] | None) -> ResultT:
        checked = check(call)
        if plan is None:
            plan = make(checked)
            if plan is None:
                assert empty is not None, "a call without a plan has a result"
                return empty(checked)
            keep(plans, found, plan)
        return on_device_of(plan, call)

    made = cast("Launcher[CallT, ResultT]", launch)
    made.plans, made.__module__ = plans, key.__module__
    return made


def on_device_of(plan: Plan[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """Launches a plan while its device is the current one. It is for calls that have no launcher."""
    if plan.device_index == GPU.current():
        return plan.launch(*args, **kwargs)
    with GPU.guard(plan.device_index):
        return plan.launch(*args, **kwargs)


def as_kernels(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Wraps a function so that it computes as kernels do: it records nothing for gradients, and autocast chooses no
    dtype."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


def written(out: Tensor, result: Tensor, ends: Tensor | None) -> Tensor:
    """Writes ``result`` into ``out`` and returns ``out``; does not wait for the device. ends: bounds of requests or
    experts. Rows from ends[-1] on are padding, and keep their values in ``out``. If ends is None, all rows are written.
    """
    if ends is None:
        return out.copy_(result)
    own = torch.arange(len(out), device=out.device) < ends[-1]
    return out.copy_(torch.where(own[(..., *(None,) * (out.dim() - 1))], result, out))


# -- the operator ------------------------------------------------------------------------------------------------------


class Operator:
    """An operator that is registered with torch as `torch.ops.cute_kernels.NAME`, for torch.compile and torch.export.

    Args:
        schema: as `torch.library.Library.define` takes it, the name first.
        cpu, cuda: the functions for plain CPU tensors and plain CUDA tensors, with the schema's arguments.
        meta: a function of the same arguments that returns empty results, for their shapes and dtypes.
    """

    def __init__(
        self, schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], meta: Callable[..., Any]
    ) -> None:
        self.name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.arguments = getattr(torch.ops.cute_kernels, self.name).default._schema.arguments
        _library.impl(self.name, as_kernels(cpu), "CPU")
        _library.impl(self.name, cuda, "CUDA")
        torch.library.register_fake(f"cute_kernels::{self.name}", self.together(meta), lib=_library)

    def together(self, meta: Callable[P, ResultT]) -> Callable[P, ResultT]:
        """Returns a function that first checks that all tensors are on one device, then calls ``meta``. If only some
        tensors are on "meta", torch calls only the fake function, and results on real devices would be uninitialised
        memory.
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            named = dict(zip((one.name for one in self.arguments), args, strict=False)) | kwargs
            check_together(**{name: value for name, value in named.items() if isinstance(value, Tensor)})
            return meta(*args, **kwargs)

        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # there is no way back, so nothing may look as if there were
            return getattr(torch.ops.cute_kernels, self.name)(*args, **kwargs)


PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def is_direct(first: object, second: object, others: Iterable[object] = ()) -> bool:
    """Returns whether a call's kernels may be launched without an operator: in eager mode, on plain tensors on a GPU.

    The first argument must be a plain tensor; it decides the device. The others may also be None or
    `torch.nn.Parameter`.
    """
    if not (type(first) is Tensor and type(second) in PLAIN and (first.is_cuda or GPU.takes_cpu)) or is_compiling():
        return False
    return not others or PLAIN.issuperset(map(type, others))


def route(
    *, cuda: Callable[P, ResultT], cpu: Callable[P, ResultT], operator: Callable[P, ResultT], **tensors: object
) -> Callable[P, ResultT]:
    """Returns the function for a call with these tensors: ``cuda``, ``cpu`` or ``operator``, which take the same
    arguments. The first tensor decides the device.

    ``operator`` is returned for calls that are being traced, and for tensors that are not plain. Raises TypeError for
    an argument that is no tensor. Raises ValueError if the first tensor is on neither a CPU nor a GPU, and another
    tensor is on another device.
    """
    if needs_dispatch(**tensors):
        return operator
    first: Any = next(iter(tensors.values()))
    return cuda if first.is_cuda or GPU.takes_cpu else as_kernels(cpu)
