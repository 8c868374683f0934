"""Tests of hundreds of values, each checked in less time than pytest takes for an item (3 ms): one item for all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")


def each(
    argument: str, values: Iterable[ValueT], ids: Callable[[ValueT], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Has a test run for each of ``values`` as its ``argument``, as one item of pytest.

    As `pytest.mark.parametrize` does, all are tried, and a failure names those that fail; the first one is its cause.
    Fixtures of the test are the same for all.

    Raises:
        ValueError: there are no values.
    """
    values = list(values)
    if not values:
        raise ValueError(f"{argument}: got no values, want one at least")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            failures: dict[str, Exception] = {}
            for value in values:
                try:
                    test(**{argument: value}, **others)
                except Exception as error:
                    failures[ids(value)] = error
            if failures:
                first = next(iter(failures.values()))
                message = f"{len(failures)} of {len(values)} fail: {', '.join(failures)}\n{first}"
                raise AssertionError(message) from first

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != argument]
        assert len(others) < len(signature.parameters), f"{test.__name__} takes no {argument}"
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
