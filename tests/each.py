"""Tests of hundreds of values, each checked in less time than pytest takes for an item (4 ms): one item for all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")


def each(
    arguments: str, values: Iterable[ValueT] | Callable[[], Iterable[ValueT]], ids: Callable[[ValueT], object] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Has a test run for each of ``values`` as its argument, as one item of pytest.

    As `pytest.mark.parametrize` does, all are tried, and a failure names those that fail; the first one is its cause.
    Fixtures of the test are the same for all. Of several ``arguments``, "n, k", a value is a tuple. Values that take
    long to make are given as a function: it is called where the test runs, not by every process that collects it.

    Raises:
        ValueError: there are no values.
    """
    names = [name.strip() for name in arguments.split(",")]
    made = values if callable(values) else _some(arguments, values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            failures: dict[str, Exception] = {}
            found = _some(arguments, made()) if callable(made) else made
            for value in found:
                given: Any = [value] if len(names) == 1 else value
                try:
                    test(**dict(zip(names, given, strict=True)), **others)
                except Exception as error:
                    failures[str(ids(value))] = error
            if failures:
                first = next(iter(failures.values()))
                message = f"{len(failures)} of {len(found)} fail: {', '.join(failures)}\n{first}"
                raise AssertionError(message) from first

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name not in names]
        assert len(others) + len(names) == len(signature.parameters), f"{test.__name__} takes no {arguments}"
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def _some(arguments: str, values: Iterable[ValueT]) -> list[ValueT]:
    found = list(values)
    if not found:
        raise ValueError(f"{arguments}: got no values, want one at least")
    return found
