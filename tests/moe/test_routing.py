"""The routing kernel's own code, thread by thread: what it writes is what the reference says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.experts import routing
from cute_kernels.gemm.experts.arguments import ROUTING
from cute_kernels.gemm.experts.reference import route_reference
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from simulator import Altered
from tests.launchers import given_to
from tests.moe.machine import Machine

WARPS = 4  # Python threads are slow


def run(topk_ids: torch.Tensor, num_experts: int, run_on) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    machine = Machine()
    run_on(Altered(machine, modules={routing: {"SORTING_WARPS": WARPS}}))
    count = topk_ids.numel()
    sizes = num_experts + 1, count, count
    addresses = [machine.put(torch.full((max(1, size),), -7, dtype=torch.int32)) for size in sizes]
    launches = []

    def launch(**options):
        machine.run(lambda: kind.kernel(kernel, *launches[0]), [(0, 0, 0)], 32 * WARPS)

    kind = routing.RoutingKernel
    kernel = kind(RouterConfig(f"int{8 * topk_ids.element_size()}", IDS))
    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
    given = SimpleNamespace(shape=tuple(topk_ids.shape), address=machine.put(topk_ids))
    kind.launch(kernel, given_to(ROUTING, given, *addresses, num_experts), None)
    return tuple(machine.get(a, (size,), torch.int32) for a, size in zip(addresses, sizes, strict=True))  # type: ignore


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens, topk, experts", [(1, 1, 8), (1, 8, 256), (5, 2, 8), (70, 3, 33), (40, 8, 512)])
def test_assignments_are_sorted_in_their_order(tokens, topk, experts, dtype, run_on):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts, (tokens, topk), generator=generator).to(dtype)
    check(ids, experts, run_on)


def check(ids: torch.Tensor, experts: int, run_on) -> None:
    offsets, rows, places = run(ids, experts, run_on)
    wanted = route_reference(ids, experts)
    assert torch.equal(offsets, wanted[0])
    total = int(offsets[-1])
    assert torch.equal(rows[:total], wanted[1][:total])
    assert torch.equal(places.view(ids.shape), wanted[2])


def test_one_expert_has_all(run_on):
    check(torch.full((50, 2), 3), 8, run_on)


def test_ids_beyond_the_experts_go_nowhere(run_on):
    ids = torch.tensor([[0, -1, 7], [8, 2**32, 3], [2**31, 7, -(2**40)]])
    check(ids, 8, run_on)
    check(ids.clamp(-(2**31), 2**31 - 1).int(), 8, run_on)


def test_no_expert_at_all(run_on):
    check(torch.full((3, 2), -1), 8, run_on)
