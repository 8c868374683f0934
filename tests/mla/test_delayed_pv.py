"""The mainloop with the right half a block behind, warp by warp under random schedules, as :mod:`.test_stepped` plays
the stepped one: here tiles come and go in two parts, and weights go through registers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla.config import NUM_STAGES, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.mainloops import delayed_pv, pipeline, weights
from cute_kernels.mla.policies import SplitCrossover, SplitTiles, TmaTiles
from tests.mla import orders, test_stepped

CONFIGS = [
    MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles())),
    MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles(eager=True))),
    MlaConfig(tiles=SplitTiles(SplitCrossover())),
]


class Model(test_stepped.Model):
    """Products and memory of a machine."""

    def __init__(self, machine: orders.Machine):
        super().__init__(machine)
        self.taken: dict[tuple[int, int], int] = {}  # of each warp and step: whose weights were loaded last

    def seat(self, mainloop: Any) -> Any:
        for name in ("hold_queries", "score_slab", "load_fragment"):
            setattr(mainloop, name, getattr(self, name))
        return super().seat(mainloop)

    def hold_queries(self, memory, warp, lane) -> list:
        return []

    def common_flags(self, memory, stage) -> int:
        return 0

    def await_tile(self, memory, place, phase) -> None:
        turn = self.block // NUM_STAGES
        assert (place // 2, phase) == (self.block % NUM_STAGES, turn % 2)
        self.machine.step(lambda: self.machine.full.get(place, 0) > turn)

    def score_slab(self, scores, held, memory, stage, slab: int, steps: range | None = None) -> None:
        place = 2 * stage + int(slab in self.machine.config.layout.parts[delayed_pv.RIGHT])
        assert self.machine.holds[place] == self.block
        assert self.machine.holds["queries"] == self.share
        self.machine.issue({place, "scores", "queries"})

    def mask(self, scores, flags, work, memory, stage, block, warp, lane) -> None:
        assert not self.under_way("scores"), "scores are not there"
        assert work.before + block == self.block

    def publish_step(self, packed, warp, step: int) -> None:
        self.machine.step()
        assert self.taken.get((warp, step), -1) == self.block_of_step(step) - 1, "weights replace those nobody has read"
        self.machine.holds["weights", step, warp] = packed[step]

    def block_of_step(self, step: int) -> int:
        """The block whose ``step``-th weights a warp of the first warpgroup has just added."""
        return (len(self.acc[self.machine.warp]) - 1 - step) // self.additions

    def load_fragment(self, packed, warp, steps: range) -> None:
        self.machine.step()
        assert not self.under_way("packed"), "weights replace those that are read"
        for step in steps:
            assert self.machine.holds.get(("weights", step, warp)) == self.block, "weights are not there"
            self.taken[warp, step] = self.block

    def weight_fragment(self, packed) -> Any:
        return packed if self.machine.warp < WARPGROUP_WARPS else [self.block] * weights.STEPS

    def add_values(self, acc, fragment, memory, stage, half: int, steps: range | None = None) -> None:
        machine, block = self.machine, self.block
        for step in steps or range(weights.STEPS):
            assert fragment[step] == block
            assert machine.holds[2 * stage + half] == block
            machine.issue({2 * stage + half, "accumulators", "packed" if half else ("packed", step)})
            self.acc[machine.warp].append((block, step))


def play(config: MlaConfig, seed: int, shares: list[int], left_out: int | None = None) -> None:
    """One CTA from its first to its last work tile. left_out: a named barrier that nobody waits at."""
    machine = orders.Machine(seed, config, shares, left_out)
    model = Model(machine)
    orders.play_persistent(machine, model.seat(delayed_pv.DelayedPV(config)))
    test_stepped.assert_all_added(model)
    assert not any(machine.named.values())


@pytest.mark.parametrize("shares", orders.SHARES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nobody_waits_for_ever_and_nothing_is_read_early(config, shares):
    for seed in range(8):
        play(config, seed, shares)


@pytest.mark.parametrize("left_out", [*weights.WEIGHTS_READY, weights.WEIGHTS_FREE])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.name)
def test_no_barrier_can_be_left_out(config, left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(config, seed, [5, 3], left_out)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(shares):
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(CONFIGS[0], seed, shares, pipeline.QUERIES_READ)
