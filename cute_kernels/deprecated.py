"""Names that arguments had before 0.2. They work for one release, and a warning says what they are called now.

A function takes them as ``**old``, annotated so that no type checker lets one pass. A call with today's names pays for
an empty dict; everything here runs for calls with old names alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.compiler import is_compiling

GOES_IN = "0.3"

RENAMED: Any = None
"""Default of an argument that is wanted, but may still come under its old name; None in the call."""

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_old_names(function: Function) -> Function:
    """Marks a function that takes arguments under old names: its signature, as help() shows it, has today's alone."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.kind not in variadic]
    vars(function)["__signature__"] = signature.replace(parameters=kept)
    return function


def current_values(function: str, old: Mapping[str, Any], **names: tuple[str, Any]) -> list[Any]:
    """The values of arguments of which some came under old names.

    Args:
        function: its name, for messages.
        old: what came under names that the function does not have.
        names: by today's name: the old one, and what came under today's, None for nothing.

    Returns:
        A value for each of ``names``, in their order.

    Raises:
        TypeError: an unknown name, or a value under both names of an argument.
    """
    known = {before: now for now, (before, _) in names.items()}
    for before in old:
        if before not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {before!r}")
        now = known[before]
        if names[now][1] is not None:
            raise TypeError(f"{before}: got it together with {now}, which is its name now; want {now} alone")
        warn(f"{function}: {before} is called {now} now", stacklevel=4)
    return [old.get(before, value) for before, value in names.values()]


def warn(message: str, stacklevel: int = 3) -> None:
    """A DeprecationWarning where the function that calls this was called; none while torch.compile traces a call."""
    if not is_compiling():
        warnings.warn(f"{message}; the old way goes in {GOES_IN}", DeprecationWarning, stacklevel=stacklevel)
