"""Which functions a call goes through, and with what arguments: seen by the interpreter's profiling hook, so that
nothing is put in their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def calls_of(*functions: Callable[..., Any]) -> Iterator[list[dict[str, Any]]]:
    """The arguments, by name, of each call of one of ``functions`` on this thread in this block, in order.

    Functions written in C are seen as well; of their calls the arguments are not known.
    """
    codes = {code for function in functions if (code := getattr(inspect.unwrap(function), "__code__", None))}
    builtins = [function for function in functions if inspect.isbuiltin(function)]
    assert len(codes) + len(builtins) == len(functions), "want functions"
    found: list[dict[str, Any]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            found.append(dict(frame.f_locals))
        elif event == "c_call" and any(argument is function for function in builtins):
            found.append({})

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)
