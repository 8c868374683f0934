"""What the simulator runs of a function: what its source says, whatever the compiler has made of it in this process."""

from __future__ import annotations

from types import FunctionType

from simulator import backend


def test_a_function_that_was_compiled_in_this_process_runs_as_it_is_written():
    def written(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int, int]:
        return a, b, c, seen

    def rewritten(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int, int]:
        return -a, -b, -c, -seen

    seen = 4
    assert isinstance(written, FunctionType)
    assert backend._as_written(written) is written
    vars(written)["_original_code"], written.__code__ = written.__code__, rewritten.__code__  # as the compiler does
    assert written(1) == (-1, -2, -3, -4)
    assert backend._as_written(written)(1) == (1, 2, 3, 4)
