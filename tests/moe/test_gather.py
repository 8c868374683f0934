"""The gather kernel's own code, thread by thread: every place gets its row, others are left as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.experts import gather
from cute_kernels.gemm.experts.arguments import GATHER
from cute_kernels.gemm.experts.config import GatherConfig
from tests.launchers import given_to
from tests.moe.machine import Machine

LEFT = -7


@pytest.mark.parametrize("config", [GatherConfig(), GatherConfig("fp16")], ids=lambda one: one.name)
@pytest.mark.parametrize("places, count, pieces", [(1, 1, 1), (5, 0, 3), (37, 30, 5), (18, 18, 70)])
def test_every_place_that_an_expert_has_gets_its_row(places, count, pieces, config, run_on):
    machine = Machine()
    run_on(machine)
    x = torch.randint(0, 1 << 15, (9, 8 * pieces), dtype=torch.int16)
    rows = torch.randint(0, len(x), (places,), dtype=torch.int32)
    rows[count:] = 1 << 30  # of no row: whoever reads it is caught
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    end, table = machine.put(torch.tensor([count], dtype=torch.int32)), machine.put(rows)
    out = machine.put(torch.full((places, 8 * pieces), LEFT, dtype=torch.int16))
    launches = []

    def launch(grid, block, **options):
        blocks = [(i, j, 0) for j in range(grid[1]) for i in range(grid[0])]
        for one in blocks:
            machine.run(lambda: kind.kernel(kernel, *launches[0]), [one], block[0])

    kind = gather.GatherKernel
    kernel = kind(config)
    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
    kind.launch(kernel, given_to(GATHER, given, end, table, out, places), None)
    found = machine.get(out, (places, 8 * pieces), torch.int16)
    assert torch.equal(found[:count], x[rows[:count].long()])
    assert torch.all(found[count:] == LEFT)
