"""Unpacking beside the products, run by the simulator: the same bits as in a launch of its own, in the order in which
work tiles want them, each chunk told of once, and not before its rows are there."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")


from cute_kernels.attention.extend import beside
from cute_kernels.attention.extend.beside import CHUNKS, UNPACKING, ChunkUnpacker, SourceBeside
from cute_kernels.attention.extend.call import make_call as check_call
from cute_kernels.attention.extend.memory import Pages, Source
from cute_kernels.attention.extend.plan import problem_of
from cute_kernels.attention.extend.policies import TILE_WORDS_AT
from cute_kernels.attention.extend.progress import BLOCK_BYTES, NOTHING, Progress
from cute_kernels.attention.extend.schedule import ExtendProblem, choose, choose_beside
from cute_kernels.attention.extend.unpack import UnpackLengths, UnpackTarget
from cute_kernels.attention.features import Features
from cute_kernels.device.division import Divisor
from simulator import LANES, Altered, Int32, Int64, Lanes, Scheduler, Uint32, Warp, running
from tests.extend.cases import Call, make_call
from tests.extend.test_unpack import LENGTHS, Q_LENS, Unpacked, _rows

CTAS, WARPS = 2, 3
READY = CHUNKS - 1


def _of(meaning: Any) -> Any:
    """A meaning of a method, whatever object it is called of."""
    return lambda _, *given: meaning(*given)


class UnpackedBeside(Unpacked):
    """As :class:`.test_unpack.Unpacked`, by warps that draw chunks.

    Attributes:
        told: the tile of every chunk that was told of, as (request, head, block, operand), in order.
        num_drawn: numbers that were drawn.
    """

    def _run(self, call: Call, at: dict[str, int], prefix_only: bool) -> None:
        config = choose_beside(choose(problem_of(check_call(*call.tensors, **call.keywords))))
        assert config is not None and config.unpacks == self.config
        table, (batch,) = call.options.get("block_table"), call.seq_lens.shape
        blocks, page_size, kv_heads, _ = call.caches[0].shape
        max_pages = 0 if table is None else table.shape[1]
        head_major = call.options.get("cache_layout") == "HND"
        rows = [_rows(cache, at[name], head_major) for name, cache in (("k", call.k_cache), ("v", call.v_cache))]
        self.shape = batch, kv_heads, self.room // self.config.tile_tokens
        self.told: list[tuple[int, ...]] = []
        self.num_drawn = 0
        self.at, self.scheduler, self.own = at, Scheduler(len(call.q)), threading.local()
        self.met = [0] * (CTAS * WARPS)
        own: dict[Any, Any] = {Progress: {"draw": _of(self._draw), "tell": _of(self._tell)}}
        own[ChunkUnpacker] = {"publish": _of(self._publish)}
        own[beside] = {"store_below": self.machine.store_below}
        with running(Altered(self.machine, modules=own, arch={"barrier": self._meet, "barrier_arrive": self._arrive})):
            pages = Pages(Int64(at["table"]), Int32(max_pages), Int32(blocks), Divisor.of(Int32(page_size)))
            none: Any = None
            cache: Any = Source(rows[0], rows[1], pages, None, Int64(0))
            target = UnpackTarget(*(Int64(at[name]) for name in ("k_rows", "v_rows", "scales")))
            progress = Progress(Int64(0), *(Int32(size) for size in self.shape))
            source = SourceBeside(none, none, none, None, Int64(0), cache, target, Int32(self.room), progress)
            shape = SimpleNamespace(
                total_q=Int32(len(call.q)),
                batch=Int32(batch),
                kv_heads=Divisor.of(Int32(kv_heads)),
                max_seq_len=Int32(page_size * (max_pages or 1)),
                window=Int32(call.options.get("window_size") or 0),
            )
            lengths = UnpackLengths(Int64(at["ends"]), Int64(at["lengths"]), Int32(prefix_only))
            unpacker: Any = ChunkUnpacker(config)
            run = partial(unpacker.run, shape, source, lengths)
            self.scheduler.run([partial(self._warp, run, warp) for warp in range(CTAS * WARPS)])
        assert len(set(self.met[:WARPS])) == len(set(self.met[WARPS:])) == 1, "warps of a CTA meet as often"

    def _warp(self, run, warp: int) -> None:
        self.own.warp = warp
        run(SimpleNamespace(drawn=Int32(warp // WARPS * 8)), Int32(warp % WARPS), Int32(LANES))

    def _arrive(self, barrier_id: int, number_of_threads: int) -> None:
        assert (barrier_id, number_of_threads) == (UNPACKING, 32 * WARPS)
        self.met[self.own.warp] += 1

    def _meet(self, barrier_id: int, number_of_threads: int) -> None:
        self._arrive(barrier_id, number_of_threads)
        warp = self.own.warp
        met, first = self.met[warp], warp // WARPS * WARPS
        self.scheduler.until(lambda: min(self.met[first : first + WARPS]) >= met, warp)

    def _publish(self, ticket: Lanes, address: Lanes, warp: Lanes, lane: Lanes) -> None:
        if warp == 0:
            self.machine.store_shared(address, 0, [Uint32(ticket)])

    def _draw(self, lane: Lanes) -> Lanes:
        """The next number, once the others have done what they may."""
        number, self.num_drawn = self.num_drawn, self.num_drawn + 1
        self.scheduler.until(lambda: True, self.own.warp)
        return Int32(number)

    def _tell(self, word: Lanes, lane: Lanes) -> None:
        place = int(np.asarray(word)[0])
        if place == NOTHING:
            return
        block, offset = divmod(place - 4 * TILE_WORDS_AT, BLOCK_BYTES)
        self.told.append((*(int(i) for i in np.unravel_index(block, self.shape)), offset // 4))
        if self.told.count(self.told[-1]) == CHUNKS:
            request, head, block, operand = self.told[-1]
            assert (self._rows_of(operand)[request, head, block] != 0xFFFF).all(), "told of before rows are there"

    def _rows_of(self, operand: int) -> np.ndarray:
        tile = self.config.tile_tokens, self.config.head_dim
        start, size = self.at[("k_rows", "v_rows")[operand]], 2 * int(np.prod((*self.shape, *tile)))
        return self.machine.global_memory[start : start + size].view(np.uint16).reshape(*self.shape, *tile)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int4_g4": ("int4_g4", {}),
    "int4_g1, pages of 16": ("int4_g1", {"page_size": 16}),
    "int4_g4, pages of 48, HND": ("int4_g4", {"page_size": 48, "cache_layout": "HND"}),
    "e4m3, a scale a tensor": ("e4m3_tensor", {}),
    "e5m2, contiguous": ("e5m2", {"page_size": None}),
    "int8, a scale a row": ("int8_token_head", {}),
    "e4m3, a scale a row, pages of 16": ("e4m3_token_head", {"page_size": 16}),
    "a pair": (("e4m3_tensor", "int4_g4"), {}),
    "another pair": (("e4m3_tensor", "int8_token_head"), {}),
    "a third": (("int8_token_head", "int4_g4"), {}),
    "int8, window": ("int8_token_head", {"window_size": 40}),
    "head_dim 80": ("e5m2", {"head_dim": 80}),
    "16 bits": ("bf16", {}),
    "16 bits, pages of 16": ("bf16", {"page_size": 16}),
    "16 bits, pages of 48, HND": ("bf16", {"page_size": 48, "cache_layout": "HND"}),
    "16 bits, window": ("bf16", {"window_size": 40}),
    "16 bits, head_dim 64": ("bf16", {"head_dim": 64, "page_size": 16}),
    "16 bits, head_dim 80": ("bf16", {"head_dim": 80}),
    "window": ("int4_g4", {"window_size": 40}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_makes_the_bits_of_a_launch_of_its_own(name):
    kv_format, options = CASES[name]
    call = make_call(kv_format, Q_LENS, LENGTHS, **options)
    mine, other = UnpackedBeside(call), Unpacked(call)
    assert all((a == b).all() for a, b in zip(mine.raw, other.raw, strict=True))
    assert (mine.scales.view(np.uint32) == other.scales.view(np.uint32)).all()


def test_each_chunk_is_told_of_once():
    found = UnpackedBeside(make_call("int4_g4", Q_LENS, LENGTHS))
    blocks = {0: 2, 2: 3}  # of requests with queries
    tiles = {(b, h, i, operand) for b, n in blocks.items() for h in range(2) for i in range(n) for operand in range(2)}
    assert set(found.told) == tiles and all(found.told.count(tile) == CHUNKS for tile in tiles)
    assert found.num_drawn >= CHUNKS * len(tiles) / WARPS, "a number is a chunk for each warp of a CTA"


def test_last_tokens_of_the_last_request_come_first():
    """Work tiles begin there. A warp tells of a chunk when it has asked for its next one."""
    found = UnpackedBeside(make_call("int4_g4", Q_LENS, LENGTHS))
    whole = [tile for i, tile in enumerate(found.told) if found.told[: i + 1].count(tile) == CHUNKS]
    places = [(-request, -block) for request, _, block, _ in whole]
    late = max(places.index(place) for place in set(places))
    assert places[:1] == [min(places)] and late <= len(places)
    order = sorted(set(places))
    firsts = [places.index(place) for place in order]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("window", [None, 1])
def test_the_last_token_s_tile_is_there_where_no_query_sees_it(window):
    """Of older tokens beside new ones: attention loads it, and would wait for ever."""
    q_lens, lengths = [3, 2], [132, 90]
    call = make_call("int4_g4", q_lens, lengths, new=True, window_size=window)
    found = UnpackedBeside(call, prefix_only=True)
    for request, (q_len, length) in enumerate(zip(q_lens, lengths, strict=True)):
        tile = (length - q_len - 1) // found.config.tile_tokens
        assert found.told.count((request, 0, tile, 1)) == CHUNKS
        if window == 1:
            assert not any(found._rows_of(operand)[request, :, tile].any() for operand in range(2)), "zeros"


def test_numbers_on_the_device_that_cannot_be_do_no_harm():
    call = make_call("int4_g4", [3, 5], [100, 40])
    call.seq_lens[0], call.cu_seqlens_q[2] = 2**30, -7
    call.options["block_table"][0] = -1
    for cache in call.caches:
        cache.zero_()
    UnpackedBeside(call)  # which refuses accesses out of bounds


@pytest.mark.parametrize("missing, known", [(0, 0), (1, 0), (2, 1), (9, 4), (31, 15), (None, 16)])
def test_a_warp_waits_for_both_tiles_of_a_block(missing, known):
    """missing: which of the words, the block's own first, K's before V's, is not there yet; it is when looked at
    again."""
    words = np.full(4 * TILE_WORDS_AT // 4 + 2 * 40, READY, np.int32)
    block, looks = 20, []
    if missing is not None:
        words[TILE_WORDS_AT + 2 * (block - missing // 2) + missing % 2] = READY - 1
    machine = Warp(np.zeros(16, np.uint8), words.view(np.uint8))

    def load_acquired(address: Lanes) -> Lanes:
        looks.append(True)
        if len(looks) > 1:
            words[:] = READY
        return machine.load_global_words(address, 0, 1)[0]

    machine.load_acquired = load_acquired  # type: ignore[attr-defined]
    with running(Altered(machine, arch={"popc": lambda word: Int32(int(np.asarray(word)[0]).bit_count())})):
        progress = Progress(Int64(0), Int32(1), Int32(1), Int32(40))
        found: Any = progress.wait(Int32(0), Int32(0), Int32(block), Int32(0), Int32(READY), Int32(LANES))
        assert int(np.asarray(found)[0]) == (known or 16) and len(looks) == (1 if known else 2)
        near: Any = progress.wait(Int32(0), Int32(0), Int32(2), Int32(1), Int32(READY), Int32(LANES))
        assert int(np.asarray(near)[0]) >= 2, "blocks before the first are not looked at"


def test_where_sums_leave_no_room_keys_are_unpacked_before():
    features = Features(causal=True, paged=True)
    for name in ("bf16", "int4_g4"):
        assert choose_beside(choose(ExtendProblem(256, name, name, "bf16", 64, features))) is None
    for name in ("bf16", "int4_g1", "int4_g4", "e4m3_tensor", "e5m2", "int8_token_head", "e4m3_token_head"):
        config = choose_beside(choose(ExtendProblem(128, name, name, "bf16", 64, features)))
        assert config is not None and config.takes_table and config.name.endswith(f"beside_{name}_p64")
