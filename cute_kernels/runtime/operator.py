"""The path of a call from a public function to its kernel, written once for all families.

    public function -> route -> launch (CUDA), reference (CPU) or the registered operator (traced, or no plain tensors)
    launch: key -> kept plan -> the plan's launch on its device; checks where a plan is new or the launch is refused

A family brings functions of a call's arguments (what decides a plan, what may be said against a call, how a plan is
made) and a schema. A call like an earlier one costs the host its key, a look-up and the launch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import needs_dispatch
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.plans import keep

P = ParamSpec("P")
CallT = TypeVar("CallT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

_library = torch.library.Library("cute_kernels", "FRAGMENT")

new_call = tuple.__new__
"""Makes a call of its class and all of its values: a third of the class's own time, which each layer waits for."""


# -- launches ----------------------------------------------------------------------------------------------------------


class PlanLike(Protocol[P, ResultT_co]):
    """The part of a launch that stays the same between calls with equal keys."""

    @property
    def device_index(self) -> int:
        """The index of the device that the plan was made for."""
        ...

    def launch(self, *args: P.args, **kwargs: P.kwargs) -> ResultT_co:
        """Launches a call on the current stream of the plan's device, which is the current one."""
        ...


@dataclass(frozen=True)
class Plan(Generic[P, ResultT]):
    """A plan as a function: a closure over compiled kernels, sizes and the form of results.

    Attributes:
        device_index, launch: as in `PlanLike`.
        products: what it launches, for whoever asks which kernels serve a call.
    """

    device_index: int
    launch: Callable[P, ResultT]
    products: tuple[Any, ...] = ()


class Launcher(Protocol[P, ResultT]):
    """A function that launches calls on CUDA tensors.

    Attributes:
        plans: those kept, by key.
        launch: with `Routes`, the same function for tensors on a GPU alone.
    """

    plans: dict[Hashable, Any]
    launch: Callable[P, ResultT]
    __module__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT: ...


_LAUNCHER = """
def launch({parameters}):
    try:{route}
        _key = _key_of({arguments})
        _plan = _plan_of(_key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        _check({arguments})
        raise
    if _plan is None or _package.DEBUG{always}:
        _call = _check({arguments})
        if _plan is None:
            _plan = _make(_call)
            if _plan is None:
                return _empty(_call)
            _keep(_plans, _key, _plan)
    try:
        if _plan.device_index == _gpu.current():
            return _plan.launch({arguments})
        with _gpu.guard(_plan.device_index):
            return _plan.launch({arguments})
    except (TypeError, ValueError, RuntimeError):
        _check({arguments})
        raise
"""
"""Made anew for each family's parameters: passing them on as *args would cost every call of a decoding step 0.4 us."""

_ROUTE = """
        if not ({plain} and ({first}.is_cuda or _gpu.takes_cpu)) or _is_compiling():
            return _route(cuda=_launch, cpu=_cpu, operator=_operator, {tensors})({arguments})"""


class Routes(NamedTuple):
    """The functions that serve calls for which no kernel is launched at once; as of `route`.

    tensors: by name, where they are in the call, as in ``codes="call.weight.codes"``; the first speaks for the device.
    """

    cpu: Callable[..., Any]
    operator: Callable[..., Any]
    tensors: dict[str, str]


def launcher(
    key: Callable[P, Hashable],
    check: Callable[P, CallT],
    make: Callable[[CallT], PlanLike[P, ResultT] | None],
    empty: Callable[[CallT], ResultT] | None = None,
    always: Callable[P, bool] | None = None,
    routes: Routes | None = None,
) -> Launcher[P, ResultT]:
    """Makes a function that launches calls on CUDA tensors, with a plan for each kind of call; it takes what ``key``
    takes.

    What a repeated call has passed before is not checked again. A key holds everything that the checks read, except
    what the compiled function compares itself before it launches: shapes, strides, dtypes, alignment, device. Where
    the compiled function refuses, the checks say why in the caller's terms.

    Args:
        key: maps the call's arguments to what decides its plan. May raise AttributeError, TypeError or RuntimeError
            for an argument of a wrong kind, such as a tensor without strides. Then the checks say which argument it is;
            if they find none, the error goes on.
        check: maps the arguments to the call as an object, after all checks that need not wait for the
            device, and with `cute_kernels.arguments.DEBUG` the rest. Raises TypeError or ValueError.
        make: makes a checked call's plan; None for a call that needs no kernel.
        empty: makes the result of a checked call that needs no kernel.
        always: maps the arguments to whether they are checked although there is a plan.
        routes: where given, the result is the family's function for any tensors: on a GPU it waits for a few
            comparisons more. Its ``launch`` takes tensors on a GPU alone.
    """
    parameters = list(inspect.signature(key).parameters.values())
    names = ", ".join(parameter.name for parameter in parameters)
    fields = {
        "parameters": ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters),
        "arguments": names,
        "always": "" if always is None else f" or _always({names})",
        "route": "",
    }
    plans: dict[Hashable, Any] = {}
    scope = {"_key_of": key, "_check": check, "_make": make, "_empty": empty, "_always": always, "_plans": plans}
    scope |= {"_keep": keep, "_package": arguments, "_gpu": GPU, "_plan_of": plans.get}
    forgotten(plans.clear)

    def written(fields: dict[str, str]) -> Any:
        exec(compile(_LAUNCHER.format(**fields), f"<launcher of {key.__module__}>", "exec"), scope)
        made = scope.pop("launch")
        made.plans, made.__module__ = plans, key.__module__
        return made

    made = written(fields)
    if routes is not None:
        places = routes.tensors
        plain = " and ".join(f"type({place}) is _Tensor" for place in places.values())
        tensors = ", ".join(f"{name}={place}" for name, place in places.items())
        first = next(iter(places.values()))
        scope |= {"_launch": made, "_cpu": routes.cpu, "_operator": routes.operator, "_route": route}
        scope |= {"_is_compiling": is_compiling, "_Tensor": torch.Tensor}
        where = _ROUTE.format(plain=plain, first=first, tensors=tensors, arguments=names)
        launch, made = made, written(fields | {"route": where})
        made.launch = launch
    return cast("Launcher[P, ResultT]", made)


def on_device_of(plan: PlanLike[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """A plan's launch with its device as the current one, for calls without a launcher."""
    if plan.device_index == GPU.current():
        return plan.launch(*args, **kwargs)
    with GPU.guard(plan.device_index):
        return plan.launch(*args, **kwargs)


def as_kernels(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """The function as kernels compute: it records nothing for gradients, and autocast chooses no dtype."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


# -- the operator ------------------------------------------------------------------------------------------------------


class Operator:
    """An operator as torch sees it: `torch.ops.cute_kernels.NAME`, traced by torch.compile and torch.export.

    Args:
        schema: as `torch.library.Library.define` takes it, the name first.
        cpu, cuda: what it is on plain tensors of either kind, with the schema's arguments.
        meta: shapes and dtypes of its results, with the same arguments.
    """

    def __init__(
        self, schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], meta: Callable[..., Any]
    ) -> None:
        self.name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, as_kernels(cpu), "CPU")
        _library.impl(self.name, cuda, "CUDA")
        torch.library.register_fake(f"cute_kernels::{self.name}", meta, lib=_library)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # there is no way back, so nothing may look as if there were
            return getattr(torch.ops.cute_kernels, self.name)(*args, **kwargs)


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def is_direct(first: torch.Tensor, *others: object) -> bool:
    """Whether kernels may be launched without an operator: in eager mode, on plain tensors on a GPU. The others may be
    None, or parameters."""
    if is_compiling() or type(first) is not torch.Tensor or not (first.is_cuda or GPU.takes_cpu):
        return False
    return all(type(other) in PLAIN for other in others)


def route(
    *, cuda: Callable[P, ResultT], cpu: Callable[P, ResultT], operator: Callable[P, ResultT], **tensors: object
) -> Callable[P, ResultT]:
    """Returns which of three functions, called alike, serves a call with these tensors; the first speaks for the
    device.

    The operator is for calls that are being traced and for tensors that are not plain ones. Raises TypeError for an
    argument that is no tensor at all, ValueError for tensors on devices of neither kind that are not together.
    """
    if needs_dispatch(**tensors):
        return operator
    first: Any = next(iter(tensors.values()))
    return cuda if first.is_cuda or GPU.takes_cpu else as_kernels(cpu)
