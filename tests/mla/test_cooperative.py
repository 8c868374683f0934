"""Few rows in one launch: parts come to those who add them up, every block is gathered once, and the order of a part
keeps to its barriers. GPUs are played in Python."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work_tiles
from cute_kernels.mla.combine import cooperative, one_launch, output
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    COOPERATIVE_PARTS,
    NUM_STAGES,
    PART_FLAGS,
    PART_ROW_BYTES,
    PART_WORDS,
    PIECE_COLUMNS,
    V_HEAD_DIM,
    MlaConfig,
    served_config,
)
from cute_kernels.mla.mainloops import stepped, weights
from cute_kernels.mla.mainloops.pipeline import NoNextQueries
from cute_kernels.mla.mainloops.softmax import LOWEST, row_of
from cute_kernels.mla.policies import CooperativeTiles, Crossover
from cute_kernels.mla.schedule import cooperative_heads
from cute_kernels.mla.work import MlaSizes
from simulator import LANES, Int32, Meanings, PlainThread, Warp, stand_in
from tests.mla import orders, test_stepped
from tests.mla.test_output import accumulators, assert_no_conflicts

CONFIG = served_config("sparse", "mla_fp8", crossover=True, cooperative=True)


def parts_of(num_parts: int, part: int, row: int = 0, head_block: int = 0) -> cooperative.PartPlaces:
    """Those of a CTA of a launch of two blocks of heads; addresses from 0."""
    counts = SimpleNamespace(head_blocks=SimpleNamespace(value=2))
    exchange = SimpleNamespace(words=0, flags=0)
    shape = SimpleNamespace(num_parts=num_parts)
    return cooperative.PartPlaces.of(
        SimpleNamespace(row=row, head_block=head_block, start=part, counts=counts, exchange=exchange, shape=shape)
    )


@pytest.mark.parametrize("num_parts", COOPERATIVE_PARTS)
def test_every_piece_of_a_part_has_its_own_place(run_on, num_parts):
    run_on(PlainThread())
    places: list[tuple[int, int]] = []
    flags: list[int] = []
    for row, head_block in np.ndindex(2, 2):
        own = parts_of(num_parts, 0, row, head_block)
        assert own.each == cooperative_heads(num_parts) and own.each * own.readers == BLOCK_HEADS
        assert own.readers <= num_parts <= 32, "all parts are read, a lane has one's statistics"
        assert num_parts * cooperative.PIECES * own.piece_bytes <= NUM_STAGES * CONFIG.tile_bytes, (
            "parts go where tiles were"
        )
        for which in np.ndindex(own.readers, num_parts, cooperative.PIECES):
            places.append((own.place(*which), own.piece_bytes))
        flags += [own.flag(*which) for which in np.ndindex(own.readers, num_parts)]
    places.sort()
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(places)), "side by side"
    assert places[-1][0] + places[-1][1] == 4 * num_parts * PART_WORDS * 4
    assert len(set(flags)) == len(flags) and max(flags) < 4 * num_parts * PART_FLAGS * 4


@pytest.mark.parametrize("num_parts", [4, 7, 8, 11, 16, 32])
def test_parts_are_added_up(run_on, num_parts):
    """What warps stage and send, by heads, is what readers fetch and add, in fp16 times powers of 2."""
    generator = np.random.default_rng(num_parts)
    values = generator.standard_normal((num_parts, BLOCK_HEADS, V_HEAD_DIM)).astype(np.float32)
    values *= np.exp2(generator.integers(-90, 90, (num_parts, BLOCK_HEADS, 1))).astype(np.float32)
    maxima = (generator.standard_normal((num_parts, BLOCK_HEADS)) * 20).astype(np.float32)
    totals = generator.random((num_parts, BLOCK_HEADS)).astype(np.float32) * 64
    empty = generator.random((num_parts, BLOCK_HEADS)) < 0.3
    empty[:, 5] = True
    values[empty], maxima[empty], totals[empty] = 0.0, LOWEST, 0.0

    memory = np.zeros(num_parts * PART_WORDS * 4, np.uint8)
    run_on(PlainThread())
    placed = parts_of(num_parts, 0)
    size, columns = placed.piece_bytes, PIECE_COLUMNS
    places = {which: placed.place(*which) for which in np.ndindex(placed.readers, num_parts, cooperative.PIECES)}
    rows = np.zeros(16 * PART_ROW_BYTES, np.uint8)
    machine = Warp(rows, np.zeros(16, np.uint8))
    run_on(machine)
    for part, piece, warp in np.ndindex(num_parts, cooperative.PIECES, 4):
        own = accumulators(values[part, :, piece * columns :][:, :columns], warp)
        scales = [output.scale_of_some([own[i] for i in range(len(own)) if row_of(i) == below]) for below in range(2)]
        cooperative.stage_values(own, [scale for scale, _ in scales], cooperative.row_place(LANES))
        for below in range(2):
            heads = 16 * warp + np.arange(8) + 8 * below
            stats = [maxima[part, heads], totals[part, heads]] if piece == 0 else []
            unit = np.asarray(scales[below][1])[:: cooperative.ROW_LANES]
            for i, numbers in enumerate([*stats, unit]):
                rows.view(np.float32).reshape(16, -1)[8 * below : 8 * below + 8, columns // 2 + i] = numbers
        readers = placed.readers // 4
        for lane in range(readers):
            memory[places[warp * readers + lane, part, piece] :][:size] = rows[lane * size :][:size]
    assert_no_conflicts(machine)

    worth = np.where(empty, 0.0, np.exp2(np.float64(maxima) - np.float64(maxima).max(0)))
    wanted = (worth[..., None] * np.float64(values)).sum(0)
    wanted_totals = (worth * totals).sum(0)
    for reader, head in np.ndindex(placed.readers, placed.each):
        machine.shared_memory = memory[places[reader, 0, 0] :][: num_parts * cooperative.PIECES * size].copy()
        left = Int32(head * PART_ROW_BYTES)
        acc, maximum, total = cooperative.CooperativeCombine(CONFIG).add_parts(placed, left, LANES)
        row = reader * placed.each + head
        assert np.all(maximum == maxima[:, row].max())
        assert np.allclose(total, wanted_totals[row], rtol=1e-5)
        for piece, i in np.ndindex(cooperative.PIECES, cooperative.LANE_COLUMNS):
            found = np.asarray(acc[cooperative.LANE_COLUMNS * piece + i])
            columns = piece * PIECE_COLUMNS + cooperative.LANE_COLUMNS * LANES + i
            limit = 2.0**-11 * (worth[:, row, None] * np.abs(np.float64(values[:, row]))).sum(0)[columns]
            limit = 1.01 * limit + 1e-6 * (worth[:, row, None] * np.abs(np.float64(values[:, row]))).max()
            assert (np.abs(found - wanted[row, columns]) <= limit + 2.0**-120).all()


class Locator:
    """Rows of request b have 70 b tokens, those of the extra cache 30 b."""

    def lengths(self, source, request: int) -> tuple[int, int]:
        return 70 * request, 30 * request


@pytest.mark.parametrize(("rows", "num_heads", "num_parts"), [(1, 128, 4), (7, 128, 5), (3, 250, 9), (20, 128, 16)])
def test_ctas_have_the_parts_of_a_launch_without_a_line(run_on, rows, num_heads, num_parts):
    run_on(PlainThread())
    head_blocks = -(-num_heads // BLOCK_HEADS)
    shape = MlaSizes(rows, 1, num_heads, num_heads, num_parts, stand_in(0), stand_in(0.0))
    num_ctas = rows * head_blocks * num_parts
    counts = work_tiles.Counts.of(shape, head_blocks, num_ctas)
    for cta in range(num_ctas):
        own, other = (
            kind.of(shape, None, None, Locator(), counts, 0, 0, cta, 0)
            for kind in (work_tiles.PartTiles, work_tiles.WorkTiles)
        )
        assert own.head_block == other.head_block
        share, wanted = (which.work(which.row, which.start, which.left) for which in (own, other))
        for name in ("row", "first_head", "part", "begin", "end", "length", "main_blocks", "extra_length", "left"):
            assert getattr(share, name) == getattr(wanted, name)


def test_tiles_are_given_back_in_turn():
    """(stage, phase) behind so many tiles, as the ring of those that gather has it."""
    stage, phase = 0, 1
    for block in range(9):
        assert one_launch.pipeline_place(block) == (stage, phase)
        stage, phase = advance(stage, phase)


def advance(stage: int, phase: int) -> tuple[int, int]:
    stage += 1
    return stage % NUM_STAGES, phase ^ (stage == NUM_STAGES)


class PartMachine(orders.Machine):
    """A machine that sees parts leave."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.left: list[int] = []

    def meanings(self) -> Meanings:
        known = super().meanings()
        return replace(known, modules={**known.modules, one_launch: {"publish_part": self.publish_part}})

    def publish_part(self, work_tiles, acc, stats, memory, warp, lane, half) -> None:
        self.step()
        assert not self.readers("queries"), "parts go where queries are read"
        assert not self.reads(self.warp, "accumulators"), "accumulators are not there"
        self.left.append(self.warp)


def play(seed: int, blocks: int, left_out: int | None = None) -> None:
    machine = PartMachine(seed, MlaConfig(), [blocks], left_out)
    model = test_stepped.Model(machine)
    mainloop = model.seat(stepped.Stepped(machine.config, NoNextQueries()))
    orders.play(machine, one_launch.PartConsumers(mainloop))
    test_stepped.assert_all_added(model)
    assert sorted(machine.left) == list(range(8))


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_nobody_waits_for_ever_and_parts_are_left_when_they_are_there(blocks):
    for seed in range(15):
        play(seed, blocks)


@pytest.mark.parametrize("left_out", [*weights.WEIGHTS_READY, weights.WEIGHTS_FREE])
def test_no_barrier_can_be_left_out(left_out):
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(seed, 5, left_out)


def test_which_configurations_may_add_up_together():
    assert CONFIG.can_implement() is None and CONFIG.name.endswith("_cooperative")
    model1 = replace(CONFIG, form="mla_model1", head_dim=512, tiles=CooperativeTiles(Crossover("ue8m0")))
    assert "cooperative" in (model1.can_implement() or "")
