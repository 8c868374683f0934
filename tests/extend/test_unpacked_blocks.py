"""Every block of keys that a work tile asks for is one that unpacking makes: who waits for any other waits for ever."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cute_kernels.attention.problem import AttentionProblem

pytest.importorskip("cutlass")

from cute_kernels.attention.extend_schedule import choose, choose_unpacked
from cute_kernels.attention.loads.unpack import UnpackKernel
from cute_kernels.attention.work_tiles import ExtendSizes, Lengths, Work, Worker
from cute_kernels.device.division import Divisor
from cute_kernels.formats.scores.features import Features
from cute_kernels.formats.scores.terms import ScoreTerms
from simulator import LANES, Int32, Int64, Warp, running

CASES, MAX_SEQ_LEN = 400, 1500
ODD = (-(2**31), -7, 0, 1, 127, 128, 900, 2**31 - 1)  # what numbers on the device may be by mistake


def request_of(generator: random.Random, *, sound: bool) -> tuple[int, int, int, int]:
    """(queries before the request's, and up to their end, of how many; its length)."""
    if not sound:
        return generator.choice(ODD), generator.choice(ODD), generator.choice([1, 300]), generator.choice(ODD)
    length = generator.choice([0, 1, 127, 128, 129, 256, generator.randrange(MAX_SEQ_LEN + 1)])
    queries = generator.choice([0, 1, 3, 128, length, generator.randrange(max(length, 1))])
    before = generator.randrange(300)
    return before, before + queries, before + queries + generator.randrange(1, 300), length


FEATURES: dict[str, dict[str, Any]] = {"all keys": {}, "causal": {"causal": True}}
FEATURES["window"] = {"causal": True, "window": True}


@pytest.mark.parametrize("sound", [True, False], ids=["lengths", "any numbers"])
@pytest.mark.parametrize("name", FEATURES)
def test_blocks_that_work_tiles_ask_for_are_unpacked(name: str, sound: bool):
    generator, features = random.Random(name), FEATURES[name]
    config = choose(AttentionProblem.ragged(128, "int4_g4", "int4_g4", "bf16", 64, Features(paged=True, **features)))
    unpack, attention = choose_unpacked(config)
    worker: Any = Worker(attention, ScoreTerms(attention.features, 2))
    kernel, tokens, asked = UnpackKernel(unpack), attention.tile_tokens, 0
    for _ in range(CASES):
        first, last, total_q, length = request_of(generator, sound=sound)
        group, splits, prefix_only = generator.choice([1, 4, 7]), generator.choice([1, 3]), generator.randrange(2)
        window = generator.choice([1, 2, 77, 128, 1000]) if features.get("window") else 0
        num_slots = total_q * group // attention.tile_rows + 1
        memory = np.array([first, last, length, 0], np.int64).astype(np.int32).view(np.uint8)
        with running(Warp(np.zeros(64, np.uint8), memory)):
            sizes = ExtendSizes(
                *map(Int32, (total_q, 1, group, MAX_SEQ_LEN)),
                *(Divisor.of(Int32(n)) for n in (group, 1, splits)),
                *map(Int32, (num_slots, num_slots * splits, window)),
            )
            places = Int64(0), Int64(8)
            made = kernel.tokens(sizes, Lengths(*places, None, Int32(prefix_only)), Int32(LANES))
            begin, end = (int(np.asarray(each)[0]) for each in made)
            for tile in range(0, num_slots * splits, 32):
                numbers = Int32(LANES) + tile
                found = worker.find(sizes, Lengths(*places, Int64(0), Int32(prefix_only)), numbers, Int32(LANES))
                work = Work(*found)
                span = worker.span(sizes, work)
                is_one = np.asarray((work.first_row >= 0) & (work.first_row < work.num_rows) & (span.begin < span.end))
                is_one &= tile + LANES < num_slots * splits
                asked += int(is_one.sum())
                case = f"{first, last, total_q, length}, group {group}, window {window}, prefix {prefix_only}"
                assert (np.asarray(span.begin)[is_one] >= begin // tokens).all(), case
                assert (np.asarray(span.end)[is_one] <= -(-end // tokens)).all(), case
    assert asked > 100
