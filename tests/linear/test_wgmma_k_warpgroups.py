"""Warpgroups that take the k blocks of a tile in turn: which stages they wait for, multiply and give back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.wgmma import reading, register_mainloop
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import Limbs, MmaSync
from cute_kernels.gemm.wgmma.results import Dsmem
from simulator import PlainThread, stand_in

DSMEM = WgmmaConfig(integers(4), "bf16", tile_m=16, block_k=128, num_stages=6, reduction=Dsmem(2, 2))


@pytest.fixture
def stepping(run_on) -> list[tuple[int, int]]:
    """The kernel's loops in plain Python, and what they wait for: (stage, parity)."""
    waited: list[tuple[int, int]] = []
    run_on(PlainThread(arch={"mbarrier_wait": lambda stage, phase: waited.append((stage, phase))}))
    return waited


@pytest.mark.parametrize("begin, k_blocks", [(0, 1), (3, 2), (0, 7), (8, 31), (5, 64)])
@pytest.mark.parametrize("k_warpgroups, num_stages", [(2, 4), (2, 6), (3, 6), (3, 12), (4, 8), (4, 12)])
def test_every_k_block_is_multiplied_once_and_given_back_once(
    begin: int, k_blocks: int, k_warpgroups: int, num_stages: int, stepping
):
    config = replace(DSMEM, reduction=Dsmem(2, k_warpgroups), warpgroups=k_warpgroups, num_stages=num_stages)
    taken: list[int] = []
    for group in range(k_warpgroups):
        stages = reading.StageReader(config)
        subject: Any = register_mainloop.RegisterMainloop(config, reading.MainloopParts(stages, stand_in(None)))
        log: list[tuple[int, int, bool]] = []
        subject.multiply_k_block = lambda acc, memory, here, place, channel, last, releases, tile_m, log=log: (
            log.append((here.stage, last.stage, bool(releases)))
        )
        k_rank = stages.k_rank(group)
        work_tile = SimpleNamespace(begin=begin, end=begin + k_blocks)
        pipeline = Pipeline(stand_in(0), stand_in(num_stages), num_stages)
        place, memory = SimpleNamespace(k_rank=k_rank), SimpleNamespace(pipeline=pipeline)
        stepping.clear()
        state = memory.pipeline.consumer_state(k_rank), memory.pipeline.consumer_state()
        _, last = subject.multiply(None, memory, work_tile, place, [], state, True, config.tile_m)
        own = range(k_rank, k_blocks, k_warpgroups)
        assert stepping == [(k_block % num_stages, k_block // num_stages % 2) for k_block in own]
        assert [at for at, _, _ in log] == [k_block % num_stages for k_block in own]
        # Each k block's stage is given back under the products of the next one of the turn, the last one's behind all.
        assert [at for _, at, told in log if told] == [k_block % num_stages for k_block in own[:-1]]
        assert last.stage == own[-1] % num_stages if own else not log
        taken += [begin + k_block for k_block in own]
    assert sorted(taken) == list(range(begin, begin + k_blocks))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reduction": Dsmem(2, 5)}, "k_warpgroups 5 is not one of 1, 2, 3, 4"),
        ({"warpgroups": 3}, "3 warpgroups are no multiple of 2 that interleave"),
        ({"num_stages": 5}, "num_stages 5 is no multiple of 2 warpgroups"),
        ({"num_stages": 2}, "or less than two for each"),
        ({"mainloop": Limbs()}, "Limbs does not go with Dsmem"),
        ({"mainloop": MmaSync()}, "MmaSync does not go with Dsmem"),
    ],
)
def test_turns_that_cannot_be_had_are_refused(changes: dict[str, Any], message: str):
    assert DSMEM.can_implement() is None
    assert message in (replace(DSMEM, **changes).can_implement() or "")
