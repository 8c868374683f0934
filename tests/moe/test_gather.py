"""Rows that the kernel that prepares rows of x gathers: every place gets its row, others are left as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.arguments import INPUT_ROWS
from cute_kernels.gemm.inputs.kernel import InputRowsKernel
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from tests.launchers import given_to
from tests.moe.machine import Machine

LEFT = -7


@pytest.mark.parametrize("places, count, pieces, parts", [(1, 1, 1, 1), (5, 0, 3, 1), (7, 4, 5, 2), (3, 3, 300, 1)])
def test_every_place_that_an_expert_has_gets_its_row(places, count, pieces, parts, run_on):
    machine, kernel, launches = Machine(), InputRowsKernel(RowsConfig("bf16", makes=INPUTS)), []
    run_on(machine)
    x = torch.randint(0, 1 << 15, (9, 8 * pieces), dtype=torch.int16)
    rows = torch.randint(0, len(x), (places,), dtype=torch.int32)
    rows[count:] = 1 << 18  # of no row: whoever reads it is caught
    end, table = machine.put(torch.tensor([count], dtype=torch.int32)), machine.put(rows)
    out = machine.put(torch.full((places, 8 * pieces), LEFT, dtype=torch.int16))

    def launch(grid, block, **options):
        for one in ((i, j, 0) for j in range(grid[1]) for i in range(grid[0])):
            machine.grid = grid
            machine.run(lambda: InputRowsKernel.kernel(kernel, *launches[0]), [one], block[0])

    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
    made = SimpleNamespace(shape=(places, 8 * pieces), address=out)
    given = given_to(INPUT_ROWS, made, machine.put(x), end, table, 0, 0, 8 * pieces, parts)
    InputRowsKernel.launch(kernel, given, None)
    found = machine.get(out, (places, 8 * pieces), torch.int16)
    assert torch.equal(found[:count], x[rows[:count].long()])
    assert torch.all(found[count:] == LEFT)
