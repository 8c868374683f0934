"""Commands whose output goes to a program that stops reading, such as `head`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

Main = TypeVar("Main", bound=Callable[..., int])


def ends_with_its_reader(main: Main) -> Main:
    """Makes a program's `main` end without a message, and with status 0, when its output is no longer read."""

    @functools.wraps(main)
    def quiet(*arguments: Any) -> int:
        try:
            status = main(*arguments)
            sys.stdout.flush()  # what is left would be written at exit, where nothing catches the error
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
            return 0
        return status

    return cast("Main", quiet)
