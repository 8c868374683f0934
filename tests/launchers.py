"""Launches on a CPU: calls with CPU tensors go the way of those with CUDA tensors, and launches are noted, not made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.runtime import KernelCache, KernelSpec
from cute_kernels.runtime.cache import using
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.launch_arguments import LaunchArguments

# Programs on Linux begin at 4 MiB if they are not position-independent, and their memory right behind: with such a
# Python addresses are small numbers. No size here is as large.
LOWEST_ADDRESS = 1 << 22


class Launch(NamedTuple):
    symbol: str  # of the kernel
    arguments: tuple[Any, ...]


class RecordingCache(KernelCache):
    """Loads functions that note their launches and run nothing.

    Attributes:
        function_of: of a kernel's spec, a function that takes its arguments and checks them.
        launches: every launch that its function did not refuse.
        loaded: every spec, and the architecture it was asked for.
    """

    def __init__(self, function_of: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__(Path("nothing-is-kept"))
        self.function_of = function_of
        self.launches: list[Launch] = []
        self.loaded: list[tuple[KernelSpec, str]] = []

    def load(self, spec: KernelSpec, arch: str) -> Callable[..., None]:
        self.loaded.append((spec, arch))
        function = self.function_of(spec)

        def launch(*arguments: Any) -> None:
            function(*arguments)
            self.launches.append(Launch(spec.symbol, arguments))

        return launch

    def load_many(self, specs: Iterable[KernelSpec], arch: str, *_: Any, **__: Any) -> list[Any]:
        return [self.load(spec, arch) for spec in specs]


def cpu_as_gpu(**functions: Any) -> Gpu:
    """A Hopper GPU of 132 SMs whose tensors are those of the CPU; ``functions``: other fields of `Gpu`.

    Its name has no tuned table. A workspace's address is its number of words, so that launches show it.
    """

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    given: dict[str, Any] = {
        "is_available": lambda: True,
        "count": lambda: 1,
        "capability": lambda device: (9, 0),
        "name": lambda device: "NVIDIA Test GPU",
        "num_sms": lambda device: 132,
        "current": lambda: -1,  # what tensors on the CPU say they are on
        "guard": lambda device: nullcontext(),
        "stream": lambda device: 0,
        "is_capturing": lambda: False,
        "empty": empty,
        "workspace": lambda device, stream, num_words: num_words,
        "counters": lambda device, stream, num_words: num_words,
        "takes_cpu": True,
    }
    return Gpu(**given | functions)


def as_compiled(spec: Any) -> Callable[..., Any]:
    """A function that refuses what a compiled product would: a first argument that is not the matrix it is told."""
    kernel = getattr(spec, "kernel", None)

    def launched(*arguments: Any) -> None:
        if isinstance(kernel, CompiledAs):
            matrix = arguments[0]
            assert matrix.dim() == 2 and not matrix.shape[1] % kernel.divisibility, f"{spec}: got {matrix.shape}"

    return launched


@contextmanager
def recording(
    function_of: Callable[[Any], Callable[..., Any]] = as_compiled, **functions: Any
) -> Iterator[RecordingCache]:
    """In this block calls with CPU tensors go the way of those with CUDA tensors up to the launch, which is recorded.

    Args:
        function_of: as of `RecordingCache`. functions: as of `cpu_as_gpu`.
    """
    cache = RecordingCache(function_of)
    with using(cache), standing_in(cpu_as_gpu(**functions)):
        yield cache


def given_to(declared: LaunchArguments, *values: Any) -> SimpleNamespace:
    """A launch's arguments as a kernel's ``launch`` gets them, of values in the declared order."""
    return SimpleNamespace(**dict(zip(declared.names, values, strict=True)))


def outcome(launches: list[Launch], call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """What a call launches, in a form to compare, or the message that refuses it.

    Tensors become their address, shape, strides and dtype. Addresses of what was not ``given`` to the call become None.
    """
    launches.clear()
    try:
        call()
    except (TypeError, ValueError) as error:
        assert not launches
        return type(error), str(error)
    places = {x.data_ptr() for x in given.values() if isinstance(x, torch.Tensor)}

    def described(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return described(x.data_ptr()), x.shape, x.stride(), x.dtype
        return None if x >= LOWEST_ADDRESS and x not in places else x

    return [(launch.symbol, [described(x) for x in launch.arguments]) for launch in launches]


def assert_launched_alike_after_any_other(
    calls: Iterable[str], outcome_of: Callable[[str], Any], plans: dict[Any, Any]
) -> dict[str, Any]:
    """That each of ``calls`` launches what it does when no ``plans`` are kept, whatever was launched before it; returns
    what each of them launches.

    A plan serves a call whose key finds it. So it is enough that each call follows all others, in either order, and
    that where several calls have a key in common, the plan of each of them meets those, and every call that keeps none.
    """
    names, want, keys = list(calls), {}, {}
    for name in names:
        plans.clear()
        want[name] = outcome_of(name)
        keys[name] = set(plans)
    wrong: list[str] = []

    def follow(name: str, before: str) -> None:
        if outcome_of(name) != want[name]:
            wrong.append(f"{name!r} after {before}")

    for order in (names, names[::-1]):
        plans.clear()
        for name in [*order, *order]:
            follow(name, "all others")
    for first in names:
        if any(keys[first] & keys[name] for name in names if name != first):
            for name in names:
                if keys[first] & keys[name] or not keys[name]:
                    plans.clear()
                    outcome_of(first)
                    follow(name, repr(first))
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    return want
