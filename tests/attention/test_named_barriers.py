"""A kernel uses the number of a named barrier once, and its table says the numbers that the code has."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

pytest.importorskip("cutlass")

from cute_kernels.attention import barriers, decode_kernel, extend_kernel, extend_policies
from cute_kernels.attention.extend_policies import MMA_WARPGROUPS
from cute_kernels.attention.mainloops import warpgroup_barriers

MOST = 16  # named barriers of a CTA; number 0 is that of all its threads


def numbers_in(module: ModuleType) -> dict[str, list[int]]:
    """Numbers by name, as the table of a kernel's docstring has them: "FIRST_TURN (3, 4)"."""
    rows = re.findall(r"^    ([A-Z_]+) \((\d+(?:, \d+)*)\)", module.__doc__ or "", re.M)
    return {name: [int(number) for number in numbers.split(", ")] for name, numbers in rows}


@pytest.mark.parametrize(
    "kernel, names", [(decode_kernel, barriers), (extend_kernel, warpgroup_barriers)], ids=["decode", "extend"]
)
def test_no_two_named_barriers_of_a_kernel_have_one_number(kernel: ModuleType, names: ModuleType):
    table = numbers_in(kernel)
    taken = [number for numbers in table.values() for number in numbers]
    assert len(taken) > 3 and len(set(taken)) == len(taken) and all(0 < number < MOST for number in taken)
    assert {name: numbers[0] for name, numbers in table.items()} == {name: getattr(names, name) for name in table}
    for name, numbers in table.items():
        assert len(numbers) == (MMA_WARPGROUPS if name.startswith("FIRST_") else 1), name


@pytest.mark.parametrize(
    "kernel, names", [(decode_kernel, barriers), (extend_kernel, warpgroup_barriers)], ids=["decode", "extend"]
)
def test_every_named_barrier_stands_in_its_kernels_table(kernel: ModuleType, names: ModuleType):
    own = {name: value for name, value in vars(names).items() if name.isupper() and not hasattr(extend_policies, name)}
    numbers = {name for name, value in own.items() if type(value) is int and value < MOST}
    assert numbers == numbers_in(kernel).keys()
