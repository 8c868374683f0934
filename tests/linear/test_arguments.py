"""Numbers that a plan knows of a launch are put in order by their names."""

from __future__ import annotations

import pytest

from cute_kernels.linear.arguments import between, matrix_arguments

SOME = matrix_arguments(("codes", "out"), ("n", "k_blocks", "splits", "activation"))


def test_numbers_are_put_in_order_by_their_names():
    assert between(SOME, "n", "activation", splits=3, k_blocks=7) == (7, 3)
    with pytest.raises(TypeError, match="^splits: got no such number, want k_blocks, splits"):
        between(SOME, "n", "activation", k_blocks=7)
    with pytest.raises(TypeError, match="^n: got a number of that name, want k_blocks, splits"):
        between(SOME, "n", "activation", n=1, k_blocks=7, splits=3)
