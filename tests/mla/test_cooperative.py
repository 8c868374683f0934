"""Few rows in one launch: parts come to those who add them up, every block is gathered once, and the order of a part
keeps to its barriers. GPUs are played in Python."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work_tiles
from cute_kernels.mla.combine import cooperative, output, together
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    COOPERATIVE_PARTS,
    NUM_STAGES,
    PART_FLAGS,
    PART_ROW_BYTES,
    PART_WORDS,
    PIECE_COLUMNS,
    V_HEAD_DIM,
    served_config,
)
from cute_kernels.mla.mainloops import stepped
from cute_kernels.mla.mainloops.softmax import LOWEST, row_of
from cute_kernels.mla.schedule import cooperative_heads
from cute_kernels.mla.work import LaunchShape
from tests.attention.warp import LANES, Int32
from tests.mla import test_stepped
from tests.mla.test_output import Bits, accumulators, assert_no_conflicts
from tests.mla.test_work_tiles import python_numbers

CONFIG = served_config("sparse", "mla_fp8", crossover=True, cooperative=True)
add_parts: Any = vars(cooperative.CooperativeCombine)["add_parts"].__wrapped__


def parts_of(num_parts: int, part: int, row: int = 0, head_block: int = 0) -> cooperative.PartPlaces:
    """Those of a CTA of a launch of two blocks of heads; addresses from 0."""
    counts = SimpleNamespace(head_blocks=SimpleNamespace(value=2))
    exchange = SimpleNamespace(words=0, flags=0)
    shape = SimpleNamespace(num_parts=num_parts)
    return cooperative.PartPlaces.of(
        SimpleNamespace(row=row, head_block=head_block, start=part, counts=counts, exchange=exchange, shape=shape)
    )


def plain_numbers(monkeypatch) -> None:
    """Addresses and numbers of CTAs are Python's."""
    for name in ("Int32", "Int64"):
        monkeypatch.setattr(cooperative, name, int)
    select = SimpleNamespace(select_=lambda which, a, b: a if which else b, min=min, max=max)
    monkeypatch.setattr(cooperative, "cutlass", select)


@pytest.mark.parametrize("num_parts", COOPERATIVE_PARTS)
def test_every_piece_of_a_part_has_its_own_place(monkeypatch, num_parts):
    plain_numbers(monkeypatch)
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
def test_parts_are_added_up(monkeypatch, num_parts):
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
    plain_numbers(monkeypatch)
    placed = parts_of(num_parts, 0)
    size, columns = placed.piece_bytes, PIECE_COLUMNS
    places = {which: placed.place(*which) for which in np.ndindex(placed.readers, num_parts, cooperative.PIECES)}
    rows = np.zeros(16 * PART_ROW_BYTES, np.uint8)
    machine = Bits(rows, np.zeros(16, np.uint8))
    machine.install(monkeypatch, output, cooperative)
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

    monkeypatch.setattr(cooperative.cutlass, "range", lambda count, unroll: range(count), raising=False)
    weights = np.where(empty, 0.0, np.exp2(np.float64(maxima) - np.float64(maxima).max(0)))
    wanted = (weights[..., None] * np.float64(values)).sum(0)
    wanted_totals = (weights * totals).sum(0)
    for reader, head in np.ndindex(placed.readers, placed.each):
        machine.shared_memory = memory[places[reader, 0, 0] :][: num_parts * cooperative.PIECES * size].copy()
        left = Int32(head * PART_ROW_BYTES)
        acc, maximum, total = add_parts(cooperative.CooperativeCombine(CONFIG), placed, left, LANES)
        row = reader * placed.each + head
        assert np.all(maximum == maxima[:, row].max())
        assert np.allclose(total, wanted_totals[row], rtol=1e-5)
        for piece, i in np.ndindex(cooperative.PIECES, cooperative.LANE_COLUMNS):
            found = np.asarray(acc[cooperative.LANE_COLUMNS * piece + i])
            columns = piece * PIECE_COLUMNS + cooperative.LANE_COLUMNS * LANES + i
            limit = 2.0**-11 * (weights[:, row, None] * np.abs(np.float64(values[:, row]))).sum(0)[columns]
            limit = 1.01 * limit + 1e-6 * (weights[:, row, None] * np.abs(np.float64(values[:, row]))).max()
            assert (np.abs(found - wanted[row, columns]) <= limit + 2.0**-120).all()


class Locator:
    """Rows of request b have 70 b tokens, those of the extra cache 30 b."""

    def lengths(self, source, request: int) -> tuple[int, int]:
        return 70 * request, 30 * request


@pytest.mark.parametrize(("rows", "num_heads", "num_parts"), [(1, 128, 4), (7, 128, 5), (3, 250, 9), (20, 128, 16)])
def test_ctas_have_the_parts_of_a_launch_without_a_line(monkeypatch, rows, num_heads, num_parts):
    python_numbers(monkeypatch)
    head_blocks = -(-num_heads // BLOCK_HEADS)
    shape = LaunchShape(rows, 1, num_heads, num_heads, num_parts, 0, 0.0)
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
        assert together.ring_place(block) == (stage, phase)
        stage, phase = advance(stage, phase)


def advance(stage: int, phase: int) -> tuple[int, int]:
    stage += 1
    return stage % NUM_STAGES, phase ^ (stage == NUM_STAGES)


class PartModel(test_stepped.Model, together.CooperativeStepped):
    """The order of one part with products and memory of a machine."""

    playing: ClassVar[Any]  # the machine, and the warps that have left their part
    left: ClassVar[list[int]]

    def __init__(self, machine: Any):
        super().__init__(machine)
        PartModel.playing, PartModel.left = machine, []


for method in ("first", "second", "ask_next_queries"):
    setattr(PartModel, method, inspect.unwrap(getattr(together.CooperativeStepped, method)))


def play(monkeypatch, seed: int, blocks: int, left_out: int | None = None) -> None:
    def publish_part(work_tiles, acc, stats, memory, warp, lane, half) -> None:
        machine = PartModel.playing
        machine.step()
        assert not machine.readers("queries"), "parts go where queries are read"
        assert not machine.reads(machine.warp, "accumulators"), "accumulators are not there"
        PartModel.left.append(machine.warp)

    for name, value in (("publish_part", publish_part), ("Int32", int), ("Float32", float)):
        monkeypatch.setattr(together, name, value)
    test_stepped.play(monkeypatch, seed, [blocks], left_out, model_class=PartModel, modules=(stepped, together))
    assert sorted(PartModel.left) == list(range(8))


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_nobody_waits_for_ever_and_parts_are_left_when_they_are_there(monkeypatch, blocks):
    for seed in range(15):
        play(monkeypatch, seed, blocks)


@pytest.mark.parametrize("left_out", [*stepped.WEIGHTS_READY, stepped.WEIGHTS_FREE])
def test_no_barrier_can_be_left_out(monkeypatch, left_out):
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, 5, left_out)


def test_which_configurations_may_add_up_together():
    assert CONFIG.can_implement() is None and CONFIG.name.endswith("_cooperative")
    model1 = replace(CONFIG, form="mla_model1", head_dim=512, scales="ue8m0")
    for other in (replace(CONFIG, crossover=False), replace(CONFIG, order="plain"), model1):
        assert "cooperative" in (other.can_implement() or "")
