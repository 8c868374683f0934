"""Which functions a call goes through, and with what arguments: seen by the interpreter's profiling hook, so that
nothing is put in their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One of ``function``; its arguments by name, none if the function is written in C."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


@contextmanager
def calls_of(*functions: Callable[..., Any]) -> Iterator[list[Call]]:
    """Each call of one of ``functions`` on this thread in this block, in order."""
    codes = {getattr(inspect.unwrap(function), "__code__", None): function for function in functions}
    builtins = [function for function in functions if inspect.isbuiltin(function)]
    assert (None in codes) == bool(builtins), "want functions"
    found: list[Call] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            found.append(Call(codes[frame.f_code], dict(frame.f_locals)))
        elif event == "c_call" and argument in builtins:
            found.append(Call(argument, {}))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)
