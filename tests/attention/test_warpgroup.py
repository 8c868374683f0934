"""A warpgroup of decode attention, four emulated warps that share memory, against attention in float64."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.softmax import LOWEST, OnlineSoftmax

pytest.importorskip("cutlass")


from cute_kernels.attention import readers, warpgroup
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.mainloop import WarpState
from cute_kernels.attention.policies import WarpgroupMma, WarpMma
from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.attention.readers.common import Warpgroup
from cute_kernels.attention.tiles import tiles_of
from cute_kernels.attention.warpgroup import WarpgroupMainloop
from cute_kernels.device import wgmma
from cute_kernels.formats.kv import format_of
from layouts import banks
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, RowTile, block_token
from simulator import (
    COLUMN,
    LANES,
    ROW,
    Float32,
    Int32,
    Int64,
    Lanes,
    Meanings,
    PlainThread,
    Registers,
    Uint32,
    Warp,
    stand_in,
)
from simulator.registers import elements, from_halves, halves
from tests.attention.rig import random_int4_rows

CONFIG = candidate_configs(DecodeProblem.uniform(8, 8192, 8, 1, 128, "int4_g1", "bf16", q_len=4))[0]
SOFTMAX_SCALE = 0.11
QUERIES, HEAD_DIM, TOKENS, WARPS = 32, 128, 128, 4
GROUP = 1  # the second of the CTA: what lies before it must be stepped over
ADDRESSES = (Int32(0), Int32(CONFIG.tile_bytes[0]))  # of the tile's keys and values
COLUMNS = [column // 2 * 8 + 2 * COLUMN + column % 2 for column in range(8)]  # query of each lane's column


class Machine(Warp):
    """With wgmma; B is read as the PTX manual has it for rows of 128 bytes with 128-byte swizzling.

    Four warps, each in a thread, share one: what waits for others is a barrier of threads.
    """

    def meanings(self) -> Meanings:
        barrier, votes = threading.Barrier(WARPS), {}

        def vote(_: Any, condition: int) -> int:
            votes[threading.get_ident()] = condition
            barrier.wait(20)
            result = int(any(votes.values()))
            barrier.wait(20)
            return result

        group = {
            "Int32": lambda value: int(np.any(value)),  # conditions are of a warp, as on the GPU
            "sync_warpgroup": lambda _: barrier.wait(20),
            "any_of_warpgroup": vote,
            "pass_turn": lambda _: None,
        }
        return dataclasses.replace(super().meanings(), modules={wgmma: self.wgmma(), warpgroup: group})

    def store_shared_zero16(self, address: Lanes, offset: int) -> None:
        self.store_shared(address, offset, [Uint32(0)] * 4)

    def max_f16x2(self, a: Lanes, b: Lanes) -> Lanes:
        pair = [halves(word).view(np.float16) for word in (a, b)]
        return from_halves(np.fmax(*pair).view(np.uint16))

    def operand(self, address: int) -> np.ndarray:
        """B [32, 16] at an address within the first row of its box."""
        row, column = np.arange(QUERIES)[:, None], np.arange(16)[None, :]
        places = address + 128 * row + 2 * column
        places = places ^ (places >> 7 & 7) << 4
        return self.shared_memory.view(np.float16)[places // 2].astype(np.float64)

    def wgmma(self) -> dict[str, Any]:
        return {
            "fence": list,
            "commit": lambda: None,
            "wait": lambda pending: None,
            "wait_all": list,
            "wait_for": lambda sums, pending: list(sums),
            "descriptor": lambda address: int(np.unique(address).item()),
            "advanced": lambda low, offset: low + offset,
            "mma": self.multiply,
            "first_mma": lambda count, *operands, dtype: self.multiply([Float32(0.0)] * count, *operands, dtype=dtype),
            "STEP_BYTES": 32,
        }

    def multiply(self, sums: Sequence[Lanes], a: Sequence[Lanes], b: int, *, dtype: str) -> list[Lanes]:
        """One warp's rows of m64n32k16."""
        left, right = np.zeros((16, 16)), self.operand(b)
        for register, word in enumerate(a):
            for half in range(2):
                place = (ROW + 8 * (register % 2), 8 * (register // 2) + 2 * COLUMN + half)
                left[place] = elements(word, dtype)[:, half]
        total = left @ right.T
        result = []
        for index, value in enumerate(sums):
            place = (ROW + 8 * (index % 4 // 2), index // 4 * 8 + 2 * COLUMN + index % 2)
            result.append(Float32(np.float64(value) + total[place]))
        return result


METHODS = ("attend", "place_scores", "share_probabilities", "write_probabilities", "logit")
METHODS += ("raise_shared_maximum", "tell", "join", "clear_probabilities", "start_products")


class Rig:
    """Four warps, each in a thread, in front of a tile of random rows."""

    def __init__(self, run_on: Any, scale_exponents=((-6, 1), (-6, 1)), seed: int = 0, factor: float = 1.0):
        form, tiles = format_of("int4_g1"), tiles_of(CONFIG)
        assert form.codes == "u4"
        generator = torch.Generator().manual_seed(seed)
        self.query_start = -(-sum(CONFIG.tile_bytes) // 1024) * 1024
        shared = np.random.default_rng(seed).integers(0, 256, self.query_start + CONFIG.query_bytes, dtype=np.uint8)
        self.values: list[np.ndarray] = []
        first = GROUP * TOKENS
        for tile, start, exponents in zip(tiles, (0, CONFIG.tile_bytes[0]), scale_exponents, strict=True):
            assert isinstance(tile, RowTile)
            caches = [random_int4_rows(form, HEAD_DIM, exponents, generator) for _ in range(TOKENS // BLOCK_TOKENS)]
            cache = torch.cat(caches)
            for token, row in enumerate(cache.view(torch.uint8).numpy()):
                place = start + WORD_BYTES * tile.token_offset(first + token)
                shared[place : place + row.size] = row
            self.values.append(form.dequantize(cache, HEAD_DIM, torch.float64, None).numpy())
        self.q = torch.randn(QUERIES, HEAD_DIM, generator=generator).mul_(factor).bfloat16()
        memory = self.q.view(torch.uint8).numpy().reshape(-1).copy()
        self.machine = Machine(shared, memory)

        run_on(self.machine)
        made: Any = readers.make_readers(CONFIG)
        self.keys, self.sums = made
        copier = SimpleNamespace(stage_addresses=lambda tiles, stage: ADDRESSES)
        self.kernel: Any = SimpleNamespace(config=CONFIG, key_reader=self.keys, value_reader=self.sums, copier=copier)
        for name in METHODS:
            setattr(self.kernel, name, getattr(WarpgroupMainloop, name).__get__(self.kernel))

    def state(self, index: int) -> WarpState:
        """What a warp has before its first tile."""
        place = (Int32(LANES), Int32(0), Int32(WARPS * GROUP + index))
        keys = self.keys.make_state(*place)
        keys.query_sum_address = Int32(self.query_start + WarpgroupMma.sum_offset)
        keys.centres = Int32(self.query_start + WarpgroupMma.centre_offset + 4 * QUERIES * (WARPS * GROUP + index))
        values = self.sums.make_state(*place, Int64(0), keys)
        addresses = [Int64((8 * block + ROW) * 2 * HEAD_DIM) for block in range(4)]
        self.keys.take_query(keys, self.keys.fetch_query(addresses, Int64(0), Int32(LANES)), Float32(SOFTMAX_SCALE))
        keys.query_operand = self.query_start
        if index == 0:
            self.keys.store_query(keys, Int32(self.query_start))
        offset = Registers(1, Int32)
        offset[0] = Int32(0)
        first = Int32(self.query_start + WarpgroupMma.probability_offset + 2 * WarpgroupMma.probability_bytes * GROUP)
        exchange = Int32(self.query_start + WarpgroupMma.exchange_offset + 1024 * GROUP)
        keys.warpgroup = Warpgroup(Int32(GROUP), Int32(index), Int32(LANES), exchange, first, offset)
        self.kernel.clear_probabilities(keys.warpgroup)
        softmax: Any = OnlineSoftmax(stand_in(Registers(8, Float32)), stand_in(Registers(8, Float32)))
        softmax.references.fill(LOWEST)
        return WarpState(keys, values, softmax, stand_in(None))

    def tokens(self, index: int, j: int) -> np.ndarray:
        """Of the warpgroup, of each lane."""
        return BLOCK_TOKENS * index + np.asarray(block_token(CONFIG.token_bits, ROW, j))

    def scores(self, state: WarpState) -> list[list[Lanes]]:
        headers = self.keys.load_headers(state.keys, Int32(0))
        return [row for half in range(2) for row in self.half_scores(state, half, headers)]

    def half_scores(self, state: WarpState, half: int, headers: list[Any]) -> list[list[Lanes]]:
        dots = self.keys.rows(self.keys.start_scores(state.keys, Int32(0), half))
        return self.keys.scaled(state.keys, dots, headers[2 * half : 2 * half + 2])

    def attend(self, index: int, state: WarpState, bias: np.ndarray) -> None:
        """One tile; bias: fp64 [queries, tokens] added to the logits."""
        # Logits are changed as features do; what is only hidden goes the short way.
        changed = bool(np.isfinite(bias).all() and bias.any())

        def apply(_, s: Registers, scale: Lanes, tokens: list[np.ndarray], masked: bool) -> None:
            for j, token in enumerate(tokens):
                for column in range(8):
                    value = np.asarray(s[8 * j + column], np.float64)
                    value = value * np.asarray(scale, np.float64) if changed else value
                    s[8 * j + column] = Float32(value + bias[COLUMNS[column], token])

        kernel = SimpleNamespace(**vars(self.kernel), logits=SimpleNamespace(transforms=changed, apply=apply))
        for name in METHODS:
            setattr(kernel, name, getattr(WarpgroupMainloop, name).__get__(kernel))
        kernel.attend(state, ADDRESSES, 0, False, Int32(BLOCK_TOKENS * index), Int32(0))

    def run(self, biases: Sequence[np.ndarray], recentre: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(outputs, log2 of the sum of exponentials) after as many tiles as there are biases."""
        states = [self.state(index) for index in range(WARPS)]
        out, lse = np.full((QUERIES, HEAD_DIM), np.nan), np.full((WARPS, QUERIES), np.nan)

        def work(index: int) -> None:
            state = states[index]
            cta = SimpleNamespace(tiles=None)
            for bias in biases:
                self.kernel.start_products(cta, state, 0)
                self.attend(index, state, bias)
                if recentre:
                    self.sums.recentre(state.values)
            self.kernel.start_products(cta, state, 0)
            self.kernel.join(state)
            totals = [np.asarray(total).reshape(8, 4).sum(axis=0)[COLUMN] for total in state.softmax.totals]
            for column, first, run in self.sums.outputs(state.values):
                for i, value in enumerate(run):
                    out[COLUMNS[column], np.asarray(first) + i] = value / totals[column]
            for column, total in enumerate(totals):
                lse[index, COLUMNS[column]] = np.asarray(state.softmax.references[column]) + np.log2(total)

        with ThreadPoolExecutor(WARPS) as pool:
            list(pool.map(work, range(WARPS)))
        assert (lse == lse[0]).all()
        return out, lse[0]

    def reference(self, biases: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.values
        logits = self.q.double().numpy() @ keys.T * (SOFTMAX_SCALE * Warp.LOG2_E)
        logits = np.concatenate([logits + bias for bias in biases], axis=1)
        largest = logits.max(axis=1, keepdims=True)
        p = np.exp2(logits - largest)
        total = p.sum(axis=1)
        return p @ np.tile(values, (len(biases), 1)) / total[:, None], np.log2(total) + largest[:, 0]


def test_scores_are_those_of_the_dequantised_rows(run_on):
    rig = Rig(run_on, ((-8, 4), (-6, 1)))
    states = [rig.state(index) for index in range(WARPS)]
    found = np.full((QUERIES, TOKENS), np.nan)
    for index, state in enumerate(states):
        for j, row in enumerate(rig.scores(state)):
            for column, score in enumerate(row):
                found[COLUMNS[column], rig.tokens(index, j)] = score * state.keys.score_scale
    want = rig.q.double().numpy() @ rig.values[0].T * (SOFTMAX_SCALE * Warp.LOG2_E)
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


ZERO = np.zeros((QUERIES, TOKENS))
LATER = np.random.default_rng(1).uniform(-3, 3, (QUERIES, TOKENS))
OUTLIER = np.where(np.arange(TOKENS) == 77, 40.0, 0.0) * (np.arange(QUERIES) % 5 == 1)[:, None] + ZERO
HIDDEN = np.where(np.arange(TOKENS) > 50 + np.arange(QUERIES)[:, None] // 8, -np.inf, 0.0)


@pytest.mark.parametrize(
    "biases",
    [[ZERO], [ZERO, LATER, LATER], [LATER, OUTLIER, ZERO], [HIDDEN], [ZERO, HIDDEN]],
    ids=["one", "three", "raised later", "masked", "masked later"],
)
@pytest.mark.parametrize("recentre", [False, True])
def test_tiles_add_up_to_attention(biases, recentre, run_on):
    """One reference for four warps, raised by one of them; columns in quarters; shifts and recentred sums."""
    rig = Rig(run_on, seed=len(biases))
    out, lse = rig.run(biases, recentre)
    want, want_lse = rig.reference(biases)
    assert np.linalg.norm(out - want) < 6e-4 * np.linalg.norm(want)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_values_whose_scales_are_tiny_do_not_overflow(run_on):
    """Probabilities times scales stay small however large those are before the reference is raised."""
    biases = [ZERO - 60.0, ZERO]
    rig = Rig(run_on, ((-6, 1), (-24, -23)), seed=3)
    out, lse = rig.run(biases)
    want, want_lse = rig.reference(biases)
    assert np.linalg.norm(out - want) < 6e-4 * np.linalg.norm(want)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_logits_that_fp32_has_in_steps_of_64_come_to_an_end(run_on):
    """One is rounded once, the greatest twice: it may exceed the reference that is made of it."""
    out, _ = Rig(run_on, factor=2.0**24).run([ZERO, ZERO])
    assert not np.isinf(out).any()


@pytest.mark.parametrize("start", [0, 1024, 8192, 9216])
@pytest.mark.parametrize("number", [0, 1])
def test_probabilities_have_two_places_beside_the_queries_wherever_these_are(start, number):
    """Shared memory is aligned to 1024 bytes, not to the size of a place."""
    size, places = WarpgroupMma.probability_bytes, []
    offset = Registers(1, Int32)
    offset[0] = Int32(0)
    first = Int32(start + WarpgroupMma.probability_offset + 2 * size * number)
    place = Warpgroup(Int32(number), Int32(0), Int32(LANES), stand_in(None), first, offset)
    for _ in range(4):
        places.append(int(np.unique(place.operand()).item()))
        place.go_on(size)
        assert (place.last_operand(size) == places[-1]).all()
    queries = start + WarpgroupMma.probability_offset
    assert places == 2 * [queries + 2 * size * number, queries + size * (2 * number + 1)]
    assert WarpgroupMma.exchange_offset == WarpgroupMma.probability_offset + 4 * size


def test_keys_that_no_query_sees_are_cleared():
    """Their headers scale dot products that are hidden by then."""
    from cute_kernels.attention.copies import TileCopier

    assert TileCopier(CONFIG).cleared == (0, 1)
    assert TileCopier(dataclasses.replace(CONFIG, mainloop=WarpMma(blocks_per_warp=4, num_slices=8))).cleared == (1,)


def test_no_access_has_bank_conflicts_and_every_code_is_read_by_one_warp(run_on):
    rig = Rig(run_on)
    states = [rig.state(index) for index in range(WARPS)]
    rig.machine.accesses.clear()
    seen: list[tuple[int, int]] = []
    for state in states:
        rig.scores(state)
        before = len(rig.machine.accesses)
        rig.sums.load_codes(state.values, Int32(CONFIG.tile_bytes[0]))
        seen += [
            (address, lane // 4 % 2)
            for access in rig.machine.accesses[before:]
            for lane, address in enumerate(access.addresses)
        ]
    assert len(set(seen)) == len(seen) == TOKENS * HEAD_DIM // 4  # half words
    for access in rig.machine.accesses:
        assert banks.report(access.addresses, access.width, access.kind).conflicts == 0


class NamedBarriers:
    """What `bar.sync` and `bar.arrive` do to whole warpgroups: a barrier is passed when both have come to it."""

    def __init__(self):
        self.changed, self.arrived = threading.Condition(), {}

    def arrive(self, barrier: str) -> int:
        with self.changed:
            self.arrived[barrier] = self.arrived.get(barrier, 0) + 1
            self.changed.notify_all()
            return -(-self.arrived[barrier] // 2)

    def sync(self, barrier: str) -> None:
        times = self.arrive(barrier)
        with self.changed:
            assert self.changed.wait_for(lambda: self.arrived[barrier] >= 2 * times, 10), f"nobody comes to {barrier}"


@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_warpgroups_take_turns_with_the_products_of_a_tile_and_the_next(tiles, stage, run_on):
    """Also where all warps meet in the last tile; every tile is given back once, when its values have been read."""
    barriers, events = NamedBarriers(), []
    turns_of = {
        "await_turn": lambda number: barriers.sync(f"turn {number}"),
        "pass_turn": lambda number: barriers.arrive(f"turn {1 - number}"),
    }
    run_on(PlainThread({warpgroup: turns_of}))
    work = SimpleNamespace(length=TOKENS * tiles, num_parts=1, first_token=lambda config: 0)
    config = SimpleNamespace(lends_registers=True, num_stages=4, tile_tokens=TOKENS, slice_tokens=BLOCK_TOKENS)

    def run(number: int) -> None:
        reader = SimpleNamespace(wait_for=lambda *_: events.append((number, "end")))

        def await_tile(cta, work, token, tile):
            if token + TOKENS >= work.length:
                barriers.sync("attending")

        def attend(state, addresses, *_):
            events.append((number, "scores", addresses))
            warpgroup.pass_turn(number)

        kernel = SimpleNamespace(
            config=config,
            value_reader=reader,
            unit=SimpleNamespace(
                begin=lambda *_: (
                    SimpleNamespace(
                        keys=SimpleNamespace(warpgroup=SimpleNamespace(number=number)), values=None, logits=None
                    ),
                    0,
                    TOKENS,
                ),
                await_tile=await_tile,
                recentre=lambda *_: None,
                give_back=lambda cta, tile: events.append((number, "back", tile.stage)),
            ),
            place_queries=None,
            start_products=lambda cta, state, stage: events.append((number, "values", stage)),
            logits=SimpleNamespace(is_masked=lambda *_: False),
            copier=SimpleNamespace(stage_addresses=lambda tiles, stage: stage),
            attend=attend,
            finish=lambda *_: None,
        )
        kernel.give_first_turn = WarpgroupMainloop.give_first_turn.__get__(kernel)
        pipeline = SimpleNamespace(next=lambda tile: PipelineState((tile.stage + 1) % 4, tile.phase))
        cta = SimpleNamespace(pipeline=pipeline, tiles=None, roles=SimpleNamespace(slice_index=0))
        WarpgroupMainloop.attend_tiles(kernel, cta, work, None, PipelineState(stage, 0))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    turns = [event[0] for event in events if event[1] == "scores"]
    assert turns == [0, 1] * tiles
    for number in range(2):
        own, want = [event[1:] for event in events if event[0] == number], []
        for place in range(stage, stage + tiles):
            before = (max(stage, place - 1)) % 4
            want += [("values", before), *[("back", before)] * (place > stage), ("scores", place % 4)]
        assert own == [*want, *[("values", (stage + tiles - 1) % 4), ("end",)] * (tiles > 0)]
    # Nobody else's products between the two of a turn.
    last = {
        number: max(i for i, e in enumerate(events) if e[:2] == (number, "values"))
        for number in range(2 if tiles else 0)
    }
    owners = [e[0] for i, e in enumerate(events) if e[1] in ("values", "scores") and i not in last.values()]
    assert owners == [0, 0, 1, 1] * tiles
