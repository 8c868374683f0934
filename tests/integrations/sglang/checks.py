"""The list of interface checks, which `interface` runs, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}
"""By name, in the order in which they run."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def lines(said: Any) -> list[str]:
    """Lines of a log that was stood in for."""
    calls = [*said.log.call_args_list, *said.error.call_args_list, *said.info.call_args_list]
    return [" ".join(map(str, call.args)) for call in calls]
