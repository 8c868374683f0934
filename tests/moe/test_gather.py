"""The gather kernel's own code, thread by thread: every place gets its row, others are left as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.moe import gather
from cute_kernels.moe.config import GatherConfig
from cute_kernels.moe.plan import TilesPlan
from tests.moe.machine import Machine, unwrapped

LEFT = -7


@pytest.mark.parametrize("config", [GatherConfig(), GatherConfig(row_threads=64, batch=2)], ids=lambda one: one.name)
@pytest.mark.parametrize("places, count, pieces", [(1, 1, 1), (5, 0, 3), (37, 30, 5), (18, 18, 70)])
def test_every_place_that_an_expert_has_gets_its_row(places, count, pieces, config, monkeypatch):
    machine = Machine()
    machine.install(monkeypatch, gather)
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
            machine.run(lambda: kind.kernel.__wrapped__(kernel, *launches[0]), [one], block[0])

    kind = gather.GatherKernel
    kernel = unwrapped(kind, "copy")(config)
    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
    kind.__call__.__wrapped__(kernel, given, end, table, out, places, None)
    found = machine.get(out, (places, 8 * pieces), torch.int16)
    assert torch.equal(found[:count], x[rows[:count].long()])
    assert torch.all(found[count:] == LEFT)


def test_the_product_is_let_go_when_the_routing_is_there(monkeypatch):
    """Not before: it reads offsets without a wait of its own, and waits for rows alone."""
    machine, order = Machine(), []
    machine.install(monkeypatch, gather)
    monkeypatch.setattr(gather.cute.arch, "griddepcontrol_wait", lambda: order.append("wait"))
    monkeypatch.setattr(gather.cute.arch, "griddepcontrol_launch_dependents", lambda: order.append("let go"))
    kernel = unwrapped(gather.GatherKernel, "copy")(GatherConfig())
    zeros = machine.put(torch.zeros(8, dtype=torch.int32))
    body = gather.GatherKernel.kernel.__wrapped__
    machine.run(lambda: body(kernel, zeros, zeros, zeros, zeros, 1, 1), [(0, 0, 0)], 1)
    assert order == ["wait", "let go"]


def test_tiles_begin_early_only_behind_the_launch_that_brings_their_rows():
    calls: list[tuple[int, ...]] = []
    plan = TilesPlan(lambda *arguments: calls.append(arguments[1:]), SimpleNamespace(), (21, 22, 23, 24))  # type: ignore
    for rows in (0, 99):
        plan.run(torch.empty(1, 8), (1, 2, 3, 4, 5), (6, rows), (7, 8, 9))
    assert calls == [(1, 2, 3, 4, 5, 6, 7, 21, 22, 23, 24, 8, 9, early) for early in (0, 1)]
