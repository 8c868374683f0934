"""Few rows in one launch: parts come to those who add them up, every block is gathered once, and the order of a part
keeps to its barriers. GPUs are played in Python."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import items, line, locate, output, parts, stepped, together, work
from cute_kernels.mla.config import NUM_STAGES, PART_FLAGS, PART_ROW_BYTES, PART_WORDS, PARTS_TOGETHER, V_HEAD_DIM
from cute_kernels.mla.config import BLOCK_HEADS, MlaConfig, served_config
from cute_kernels.mla.numbers16 import Numbers
from cute_kernels.mla.schedule import heads_together
from cute_kernels.mla.softmax import LOWEST
from cute_kernels.mla.work import Shape
from tests.attention.warp import LANES, Float32, Int32
from tests.mla import orders, test_stepped
from tests.mla.test_output import Bits, accumulators, assert_no_conflicts

CONFIG = served_config("sparse", "mla_fp8", crossover=True, together=True)
HALF = V_HEAD_DIM // 2
add_parts: Any = vars(parts.Adding)["add_parts"].__wrapped__


def parts_of(num_parts: int, part: int, row: int = 0, head_block: int = 0) -> parts.Parts:
    """Those of a CTA of a launch of two blocks of heads; addresses from 0."""
    counts = SimpleNamespace(head_blocks=SimpleNamespace(value=2))
    states = SimpleNamespace(words=0, flags=0)
    shape = SimpleNamespace(num_parts=num_parts)
    return parts.Parts.of(
        SimpleNamespace(row=row, head_block=head_block, start=part, counts=counts, states=states, shape=shape)
    )


def plain_numbers(monkeypatch) -> None:
    """Addresses and numbers of CTAs are Python's."""
    for name in ("Int32", "Int64"):
        monkeypatch.setattr(parts, name, int)
    select = SimpleNamespace(select_=lambda which, a, b: a if which else b, min=min, max=max)
    monkeypatch.setattr(parts, "cutlass", select)


@pytest.mark.parametrize("num_parts", PARTS_TOGETHER)
def test_every_half_of_a_part_has_its_own_place(monkeypatch, num_parts):
    plain_numbers(monkeypatch)
    places, flags = [], []
    for row, head_block in np.ndindex(2, 2):
        own = parts_of(num_parts, 0, row, head_block)
        assert own.each == heads_together(num_parts) and own.each * own.readers == BLOCK_HEADS
        assert own.readers <= num_parts and 2 * num_parts <= 4 * 32, "all parts are read, by as many lanes as there are"
        assert num_parts * 2 * own.half_bytes <= NUM_STAGES * CONFIG.tile_bytes, "parts go where tiles were"
        for reader, part, half in np.ndindex(own.readers, num_parts, 2):
            places.append((own.place(reader, part, half), own.half_bytes))
            flags.append(own.flag(reader, part, half))
    places.sort()
    assert all(a + size == b for (a, size), (b, _) in zip(places, places[1:], strict=False)), "side by side"
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
    rows = np.zeros(16 * PART_ROW_BYTES, np.uint8)
    machine = Bits(rows, np.zeros(16, np.uint8))
    machine.install(monkeypatch, output, parts)
    for part, half, warp in np.ndindex(num_parts, 2, 4):
        own = accumulators(values[part, :, half * HALF :][:, :HALF], warp)
        scales = [output.scale_of(own, below) for below in range(2)]
        parts.stage_values(own, [scale for scale, _ in scales], parts.row_place(LANES))
        for below in range(2):
            heads = 16 * warp + np.arange(8) + 8 * below
            stats = [maxima[part, heads], totals[part, heads]] if half == 0 else []
            unit = np.asarray(scales[below][1])[:: parts.ROW_LANES]
            for i, numbers in enumerate([*stats, unit]):
                rows.view(np.float32).reshape(16, -1)[8 * below : 8 * below + 8, HALF // 2 + i] = numbers
        readers = placed.readers // 4
        for lane in range(readers):
            place = placed.place(warp * readers + lane, part, half)
            memory[place : place + placed.half_bytes] = rows[lane * placed.half_bytes :][: placed.half_bytes]
    assert_no_conflicts(machine)

    monkeypatch.setattr(parts.cutlass, "range", lambda count, unroll: range(count), raising=False)
    weights = np.where(empty, 0.0, np.exp2(np.float64(maxima)))
    wanted = (weights[..., None] * np.float64(values)).sum(0) / np.exp2(np.float64(maxima).max(0))[:, None]
    wanted_totals = (weights * totals).sum(0) / np.exp2(np.float64(maxima).max(0))
    for reader, head in np.ndindex(placed.readers, placed.each):
        size = num_parts * 2 * placed.half_bytes
        machine.shared_memory = memory[placed.place(reader, 0, 0) :][:size].copy()
        left = Int32(head * PART_ROW_BYTES)
        sums, maximum, total = add_parts(parts.Adding(CONFIG), placed, left, LANES)
        row = reader * placed.each + head
        assert np.all(maximum == maxima[:, row].max())
        assert np.allclose(total, wanted_totals[row], rtol=1e-5)
        for half, i in np.ndindex(2, 8):
            found = np.asarray(sums[8 * half + i])
            columns = half * HALF + 8 * LANES + i
            limit = 2.0**-11 * (weights[:, row, None] * np.abs(np.float64(values[:, row]))).sum(0)[columns]
            limit = limit / np.exp2(np.float64(maxima[:, row]).max()) * 1.01 + 1e-6 * np.abs(wanted[row]).max()
            assert (np.abs(found - wanted[row, columns]) <= limit + 2.0**-120).all()


class Locator:
    """Rows of request b have 70 b tokens, those of the extra cache 30 b."""

    def lengths(self, source, request: int) -> tuple[int, int]:
        return 70 * request, 30 * request


@pytest.mark.parametrize(("rows", "num_heads", "num_parts"), [(1, 128, 4), (7, 128, 5), (3, 250, 9), (20, 128, 16)])
def test_every_block_is_gathered_once(monkeypatch, rows, num_heads, num_parts):
    """Of a part, by those who gather and those who help, in order, into tiles in turn."""
    select = SimpleNamespace(select_=lambda which, a, b: a if which else b, min=min, max=max)
    for module in (locate, items, work, line):
        for name in ("Int32", "Int64", "Uint32"):
            monkeypatch.setattr(module, name, int, raising=False)
        monkeypatch.setattr(module, "cutlass", select, raising=False)
    monkeypatch.setattr(items, "cute", SimpleNamespace(make_rmem_tensor=lambda count, _: np.zeros(count, np.int64)))
    monkeypatch.setattr(locate, "numbers", SimpleNamespace(multiply_high_u32=lambda a, b: a * b >> 32))
    monkeypatch.setattr(items.PartCursor, "advance", inspect.unwrap(items.PartCursor.advance))
    head_blocks = -(-num_heads // BLOCK_HEADS)
    shape = Shape(rows, 1, num_heads, num_heads, num_parts, 0, 0.0)
    counts = items.Counts.of(shape, head_blocks, rows * head_blocks * num_parts)
    seen: list[tuple[int, int, int]] = []
    for cta in range(rows * head_blocks * num_parts):
        own = items.PartItems.of(shape, None, None, Locator(), counts, 0, 0, cta, 0)
        share = own.work(own.row, own.start, own.left)
        same = items.Items(shape, None, None, Locator(), counts, None, own.head_block, own.row, own.start, 1)
        assert (share.begin, share.end) == (lambda w: (w.begin, w.end))(same.work(own.row, own.start, 1))
        assert cta % head_blocks == own.head_block, "CTAs of a pair have blocks of heads of the same part"
        filled = {}
        for helps in range(2):
            cursor, block = items.PartCursor.at(own, helps), helps
            for number in range(share.end - share.begin + 3):
                cursor.advance()
                if number < cursor.found:
                    assert cursor.block == share.begin + block and share.begin <= cursor.block < share.end
                    filled[block] = together.ring_place(block)
                    seen.append((own.row, own.head_block, cursor.block))
                block += 2 if block == 0 else 1
        blocks = range(share.end - share.begin)
        assert {block: filled[block] for block in blocks} == filled
        assert all(filled[block] == (block % NUM_STAGES, 1 - block // NUM_STAGES % 2) for block in blocks)
    total = [-(-70 * row // 64) + -(-30 * row // 64) for row in range(rows)]
    wanted = {(row, head, block) for row in range(rows) for head in range(head_blocks) for block in range(total[row])}
    assert len(seen) == len(set(seen)) and set(seen) == wanted


class PartModel(test_stepped.Model, together.SteppedParts):
    """The order of one part with products and memory of a machine."""

    left: list[int] = []  # warps, of the CTA that is played

    def __init__(self, machine: Any):
        super().__init__(machine)
        PartModel.playing, PartModel.left = machine, []


for method in ("first", "second", "ask_next_queries"):
    setattr(PartModel, method, inspect.unwrap(getattr(together.SteppedParts, method)))


def play(monkeypatch, seed: int, blocks: int, left_out: int | None = None) -> None:
    def leave(items, sums, stats, memory, warp, lane, half) -> None:
        machine = PartModel.playing
        machine.step()
        assert not machine.readers("queries"), "parts go where queries are read"
        assert not machine.reads(machine.warp, "sums"), "sums are not there"
        PartModel.left.append(machine.warp)

    for name, value in (("leave", leave), ("Int32", int), ("Float32", float)):
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
    assert CONFIG.can_implement() is None and CONFIG.name.endswith("_together")
    for other in ({"crossover": False}, {"order": "plain"}, {"form": "mla_model1", "head_dim": 512, "scales": "ue8m0"}):
        fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
        assert MlaConfig(**(fields | other)).can_implement()
