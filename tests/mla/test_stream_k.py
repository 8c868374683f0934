"""The line of all rows, lane by lane in NumPy: every block is somebody's, once, and what is put down is taken up by the
CTA that has the rest of the row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.cuda import EMPTY_WORD
from cute_kernels.mla import stream_k, work_tiles
from cute_kernels.mla.config import BLOCK_HEADS, FLAG_WORDS, STATE_WORDS
from cute_kernels.mla.work import MlaSizes
from simulator import LANES, Int32, Meanings, PlainThread, Warp, stand_in
from tests.mla.test_gather import divisor_of


class Locator:
    """Requests with so many tokens each, a third of them in the extra cache."""

    def lengths(self, source: np.ndarray, request: Any) -> tuple[Any, Any]:
        extra = np.asarray(source)[request] // 3
        return Int32(source[request] - extra), Int32(extra)


def blocks_of(tokens: int) -> int:
    extra = tokens // 3
    return -(-(tokens - extra) // 64) + -(-extra // 64)


def warp() -> Warp:
    return Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))


def shares_of(lengths: np.ndarray, request_rows: int, num_heads: int, teams: int) -> list[list[Any]]:
    """The shares of every CTA."""
    head_blocks, rows = -(-num_heads // BLOCK_HEADS), len(lengths) * request_rows
    shape = MlaSizes(*map(stand_in, (rows, request_rows, num_heads, num_heads, 0, 0, 0.0)))
    counts = work_tiles.Counts(*map(divisor_of, (rows * head_blocks, head_blocks, request_rows, teams)))
    found = []
    for cta in range(teams * head_blocks):
        own: Any = work_tiles.WorkTiles.of(shape, lengths, None, Locator(), counts, 0, 0, Int32(cta), LANES)
        row, start, left, shares = own.row, own.start, own.left, []
        while left[0] > 0:
            work = own.work(row, start, left)
            if shares:
                same = own.next_tile(row, left)
                for name in ("row", "first_head", "begin", "end", "length", "main_blocks", "extra_length", "left"):
                    assert np.max(getattr(work, name)) == np.max(getattr(same, name)), "what a cursor finds"
            shares.append(work)
            row, start, left = row + 1, Int32(0), Int32(work.left)
        found.append(shares)
    return found


def whole_rows(lengths: np.ndarray, request_rows: int, teams: int) -> int:
    """Blocks of a row if rows stay whole, else 1."""
    rows, blocks = len(lengths) * request_rows, max(1, blocks_of(int(lengths[0])))
    gain = -(-rows // teams) * blocks - rows * blocks // teams
    stay = len(set(map(blocks_of, lengths.tolist()))) == 1
    return blocks if stay and gain <= stream_k.CUT_UNITS + rows * blocks // teams // stream_k.CUT_SHARE else 1


@pytest.mark.parametrize(
    ("requests", "request_rows", "num_heads", "teams"),
    [
        (1, 1, 64, 1),
        (9, 2, 128, 3),
        (128, 1, 256, 33),
        (40, 1, 16, 40),
        (33, 3, 100, 2),
        (70, 1, 64, 32),
        (1, 5, 64, 5),
    ],
)
@pytest.mark.parametrize("kind", ["equal", "any", "empty", "one", "turns"])
def test_every_block_once(run_on, requests, request_rows, num_heads, teams, kind):
    run_on(warp())
    random = np.random.default_rng(requests + teams)
    lengths = {
        "equal": np.full(requests, 2048),
        "any": random.integers(0, 3000, requests),
        "empty": random.integers(0, 3, requests) * 50,
        "turns": np.full(requests, 9000),
        "one": np.where(np.arange(requests) == requests // 2, 50_000, 64),
    }[kind].astype(np.int32)
    head_blocks = -(-num_heads // BLOCK_HEADS)
    ctas = shares_of(lengths, request_rows, num_heads, teams)
    seen = {}
    units = [sum(max(1, int(np.max(s.end - s.begin))) for s in shares) for shares in ctas]
    assert max(units) - min(units) <= whole_rows(lengths, request_rows, teams), "stretches differ"
    for cta, shares in enumerate(ctas):
        for place, share in enumerate(shares):
            row, head, begin, end = (int(np.max(v)) for v in (share.row, share.first_head, share.begin, share.end))
            for block in range(begin, end):
                assert seen.setdefault((row, head, block), cta) == cta
            total = blocks_of(int(lengths[row // request_rows]))
            publishes, resumes = bool(np.all(share.publishes)), bool(np.all(share.resumes))
            assert publishes == (begin > 0) and resumes == (end < total)
            assert not publishes or place == 0, "only the first share can be the end of a row"
            if not publishes:
                assert seen.setdefault((row, head, "written"), cta) == cta
            if resumes:
                other = ctas[cta - head_blocks][0]
                assert cta >= head_blocks, "a CTA waits for one of a lower number"
                assert (int(np.max(other.row)), int(np.max(other.begin))) == (row, end) and np.all(other.publishes)
    for row, head in itertools.product(range(requests * request_rows), range(head_blocks)):
        total = blocks_of(int(lengths[row // request_rows]))
        assert (row, head * BLOCK_HEADS, "written") in seen
        assert all((row, head * BLOCK_HEADS, block) in seen for block in range(total))
    assert len(seen) == head_blocks * sum(1 + blocks_of(int(n)) for n in lengths) * request_rows


class GlobalMemory(PlainThread):
    """Global memory by words, for one lane at a time: names and arguments of `ptx` and `numbers`."""

    def __init__(self, num_words: int):
        super().__init__()
        self.words: list[Any] = [EMPTY_WORD] * num_words
        self.released: set[int] = set()

    def meanings(self) -> Meanings:
        arch = {"sync_warp": lambda: None, "vote_any_sync": bool}
        return replace(super().meanings(), arch=arch)

    def store_global(self, address: int, values: list[Any], offset: int = 0) -> None:
        assert (address + offset) % (4 * len(values)) == 0
        for i, value in enumerate(values):
            self.words[(address + offset) // 4 + i] = value

    def load_global_words(self, address: int, offset: int, num_words: int, constant: bool) -> list[Any]:
        assert not constant, "another CTA writes it"
        words = self.words[(address + offset) // 4 :][:num_words]
        return [SimpleNamespace(bitcast=lambda _, word=word: word) for word in words]

    def store_released(self, address: int, word: int) -> None:
        self.store_global(address, [word])
        self.released.add(address)

    def load_acquired(self, address: int) -> int:
        return self.words[address // 4]


@pytest.mark.parametrize("num_heads", [64, 17, 100])
def test_states_come_back_to_their_lanes(run_on, num_heads):
    """Every lane of a warp that has heads finds its own registers in the other CTA; flags are as they were then."""
    flags, first_head = 4 * 3 * STATE_WORDS, 64 * (num_heads > 64)
    memory = GlobalMemory(3 * (STATE_WORDS + FLAG_WORDS))
    run_on(memory)
    work = SimpleNamespace(first_head=first_head, shape=SimpleNamespace(num_heads=num_heads))
    places = list(itertools.product(range(2), range(4), reversed(range(32))))  # lane 0, which has the flag, last
    numbers = itertools.count()
    put = {}
    for half, warp, lane in places:
        acc, stats = [next(numbers) for _ in range(stream_k.ACC)], [[next(numbers)] * 2 for _ in range(2 - 2 * half)]
        put[half, warp, lane] = acc, stats
        stream_k.PartialExchange(*map(stand_in, (0, flags, 1, None))).publish(work, acc, stats, warp, lane, half)
    existing = [place for place in places if first_head + 16 * place[1] < num_heads]
    wanted = sorted(x for place in existing for x in (*put[place][0], *itertools.chain(*put[place][1])))
    assert sorted(word for word in memory.words[: flags // 4] if word != EMPTY_WORD) == wanted
    assert len(memory.released) == len(existing) // 32
    for half, warp, lane in places:
        acc, stats = [None] * stream_k.ACC, [[None] * 2 for _ in range(2 - 2 * half)]
        stream_k.PartialExchange(*map(stand_in, (0, flags, None, 1))).resume(work, acc, stats, warp, lane, half)
        found = put[half, warp, lane]
        assert (acc, stats) == found if (half, warp, lane) in existing else acc == [None] * stream_k.ACC
    assert set(memory.words[flags // 4 :]) == {EMPTY_WORD}
