"""The kernels that a benchmark runs: compiled side by side before it times them, and never without a word.

A call compiles the kernel that it lacks, which takes seconds, one after the other. `specs` of a benchmark lists its
kernels; :func:`needed_by` finds those of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cute_kernels.runtime import KernelCache, KernelSpec, arch_of, default_cache
from cute_kernels.runtime.cache import using
from cute_kernels.runtime.gpu import forget
from cute_kernels.runtime.workers import default_jobs

Say = Callable[[str], None]


def make_ready(specs: Iterable[KernelSpec], say: Say) -> None:
    """Loads these kernels. What is missing is compiled side by side, which ``say`` is told."""
    specs = list(dict.fromkeys(specs))
    if not specs:
        return
    cache, arch, begin = default_cache(), arch_of(), time.perf_counter()
    missing = sum(not cache.has(spec, arch) for spec in specs)
    if missing:
        jobs = min(missing, default_jobs())
        say(f"compiling {missing} of {len(specs)} kernels, {jobs} at a time; they are kept for the next run")
    cache.load_many(specs, arch)
    if missing:
        say(f"compiled in {time.perf_counter() - begin:.1f} s")


def needed_by(calls: Iterable[Callable[[], object]]) -> list[KernelSpec]:
    """The kernels of calls: each runs once, and its launches compute nothing, so what it returns means nothing."""
    noting = _Noting()
    try:
        with using(noting):
            for call in calls:
                call()
    finally:
        forget()  # plans that would go on launching nothing
    return list(noting.noted)


def needed_by_cases(cases: Iterable[Callable[[], Iterable[Callable[[], object]]]]) -> list[KernelSpec]:
    """The kernels of the calls that each case makes; one that cannot make them says why when its turn comes."""
    found: dict[KernelSpec, None] = {}
    for make in cases:
        with suppress(Exception):
            found |= dict.fromkeys(needed_by(make()))
    return list(found)


@contextmanager
def told(say: Say) -> Iterator[None]:
    """In this block ``say`` is told of every kernel that a call is about to compile."""
    cache = default_cache()
    if isinstance(cache, _Telling):
        yield
        return
    with using(_Telling(cache, say)):
        yield


class _Noting(KernelCache):
    """Notes what is loaded; its functions do nothing."""

    def __init__(self) -> None:
        super().__init__(Path("nothing-is-kept"))
        self.noted: dict[KernelSpec, None] = {}

    def load(self, spec: KernelSpec, arch: str) -> Any:
        self.noted[spec] = None
        return lambda *arguments: None

    def load_many(self, specs: Iterable[KernelSpec], arch: str, *_: Any, **__: Any) -> list[Any]:
        return [self.load(spec, arch) for spec in specs]


class _Telling(KernelCache):
    """Another cache that says what it is about to compile."""

    def __init__(self, cache: KernelCache, say: Say) -> None:
        super().__init__(cache.store.root)
        self.cache, self.say = cache, say

    def load(self, spec: KernelSpec, arch: str) -> Any:
        if not self.cache.has(spec, arch):
            self.say(f"compiling {spec}")
        return self.cache.load(spec, arch)

    def load_many(self, specs: Iterable[KernelSpec], arch: str, *given: Any, **options: Any) -> list[Any]:
        return self.cache.load_many(specs, arch, *given, **options)

    def has(self, spec: KernelSpec, arch: str) -> bool:
        return self.cache.has(spec, arch)
