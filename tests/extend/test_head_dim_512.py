"""Heads of 512 columns in extend attention, run by the simulator: two work tiles have equal scores, and each has one
half of V's columns. `test_decode`, `test_unpack`, `test_channels` and `test_fp8` have what codes and queries become."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.problem import AttentionProblem

pytest.importorskip("cutlass")

from cute_kernels.attention.compile import CAUSAL_PAGES
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import WARPGROUP_ROWS
from cute_kernels.attention.extend_schedule import choose, choose_fp8, choose_newer, choose_splits, choose_unpacked
from cute_kernels.attention.loads.memory import KEYS, VALUES, Rows
from cute_kernels.attention.loads.tma import BlockPlace, Filling, TmaTileProducer
from cute_kernels.attention.mainloops import tile_results
from cute_kernels.attention.mainloops.tile_queries import SLAB_BYTES, WARP_ROWS, QueryLoader, QueryRows
from cute_kernels.attention.mainloops.tile_results import ResultWriter
from cute_kernels.attention.work_tiles import ExtendSizes, Lengths, Work, Worker
from cute_kernels.device.division import Divisor
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.formats.scores.terms import ScoreTerms
from simulator import LANES, Altered, Float32, Int32, Int64, Warp, running, stand_in
from tests.extend.test_unpack import Machine

DIM, GROUP, HEADS = 512, 4, 3


def config_of(kv_format: str = "bf16", page_tokens: int = 64) -> ExtendConfig:
    config = choose(AttentionProblem.ragged(DIM, kv_format, kv_format, "bf16", page_tokens, CAUSAL_PAGES))
    assert config.can_implement() is None
    return config


def in_rows(tile: np.ndarray, rows: int, columns: int, slab_bytes: int) -> torch.Tensor:
    """A tile of 16 bits in the 128-byte swizzle, row by row."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    place = column // 64 * slab_bytes + row * 128 + (column % 64 // 8 ^ row % 8) * 16 + column % 8 * 2
    return torch.from_numpy(tile.view(np.int16)[place // 2]).view(torch.bfloat16)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def test_what_is_computed_and_what_is_refused():
    """Every format has a kernel that reads it, and those of one scale a row one that unpacks them."""
    for name in ("bf16", "int8_token_head", "e4m3_tensor", "int4_g4"):
        config = config_of(name)
        assert (config.value_parts, config.value_dim, config.operand_columns) == (2, 256, (512, 256))
        assert config.smem_bytes <= config.limits.shared_bytes
        others = [choose_newer(config)] if config.q_dtype == name else list(choose_unpacked(config))
        assert [each.can_implement() for each in others] == [None] * len(others)
    assert choose_fp8(config_of("e4m3_tensor"))[1].can_implement() == "FP8 products want head_dim 128, not 512"


def test_few_work_tiles_count_twice():
    """A launch of 33 tiles of two parts has a CTA for each of 132 SMs with 2 splits, not 4."""
    shape = (128, 1, 33, 33, 32768, 132)
    assert choose_splits(*shape) == 4 and choose_splits(*shape, value_parts=2) == 2


@pytest.mark.parametrize("apart", [0, 3])
def test_queries_come_as_they_are(apart):
    """With other heads between them or not."""
    config, rows = config_of(), 70  # of a request: 6 rows of the second warpgroup exist
    q = torch.randn(2 + -(-rows // GROUP), HEADS * GROUP + apart, DIM).bfloat16()
    machine = Warp(np.full(config.query_bytes, 0xFF, np.uint8), bytes_of(q))
    given = {"head": Int32(1), "q_start": Int32(2), "num_rows": Int32(rows), "first_row": Int32(0)}
    work = SimpleNamespace(**given)
    with running(machine):
        shape = SimpleNamespace(group=Divisor.of(Int32(GROUP)), num_q_heads=Int32(HEADS * GROUP))
        loader: Any = QueryLoader(config)
        queries = QueryRows(Int64(0), Int64(q.stride(0) * 2))
        for warp in range(4):
            loader.ask(shape, work, queries, Int32(0), Int32(WARPGROUP_ROWS), Int32(warp), Int32(LANES))
    found = in_rows(machine.shared_memory, WARPGROUP_ROWS, DIM, SLAB_BYTES)
    exist = rows - WARPGROUP_ROWS
    packed = np.arange(WARPGROUP_ROWS, rows)
    assert torch.equal(found[:exist], q[2 + packed // GROUP, GROUP + packed % GROUP])
    assert not found[exist:].any(), "rows that the request lacks are zeros"


@pytest.mark.parametrize("operand, part", [(KEYS, 0), (KEYS, 1), (VALUES, 0), (VALUES, 1)])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_rows_at_a_request_s_end_are_copied_and_the_others_become_zeros(page_tokens, operand, part):
    """K's rows come whole, V's columns by work tile."""
    config, first_valid, stop = config_of(page_tokens=page_tokens), 35, 59
    tokens, (columns, size) = config.tile_tokens, (config.operand_columns[operand], config.tile_bytes[operand])
    cache = torch.randn(4, page_tokens, HEADS, DIM).bfloat16()  # pages, of which the block has some
    pages = [2, 0] if page_tokens == 16 else [3]
    machine = Warp(np.full(size, 0xFF, np.uint8), bytes_of(cache))
    with running(machine):
        strides = [stride * 2 for stride in cache.stride()[:3]]
        rows: Any = Rows(Int64(0), Int64(strides[0]), Int32(strides[1]), Int64(strides[2]))
        producer: Any = TmaTileProducer(config)
        work = stand_in(SimpleNamespace(head=Int32(2), value_part=Int32(part), kv_stop=Int32(stop)))
        memory = stand_in(SimpleNamespace(tiles=Int32(0), tile=lambda *_: Int32(0)))
        source = stand_in(SimpleNamespace(rows=lambda _: rows))
        lanes = LANES % len(pages)
        first = 32 % page_tokens if page_tokens > 32 else 0
        at = BlockPlace(Int32(1), Int32(np.array(pages)[lanes]), Int32(np.full(32, first)))
        filling = Filling(source, work, memory, Int32(first_valid))
        producer.copy_rows(operand, filling, at, Int32(0), Int32(LANES))
    found = in_rows(machine.shared_memory, tokens, columns, config.slab_bytes)
    block = torch.cat([cache[page, first : first + min(page_tokens, tokens), 2] for page in pages])
    first_column = part * columns if operand == VALUES else 0
    want = block[:, first_column : first_column + columns].clone()
    want[: first_valid - tokens], want[stop - tokens :] = 0, 0
    assert torch.equal(found, want)


def test_every_head_and_half_has_a_work_tile():
    config, splits, slots = config_of(), 3, 2
    worker: Any = Worker(config, ScoreTerms(config.features, 2))
    memory = np.array([0, 40, 300, 0], np.int32).view(np.uint8)  # 160 rows of one request
    found = []
    with running(Warp(np.zeros(64, np.uint8), memory)):
        count = slots * HEADS * config.value_parts * splits
        sizes = ExtendSizes(
            *map(Int32, (40, 1, HEADS * GROUP, 300)),
            *(Divisor.of(Int32(n)) for n in (GROUP, HEADS * config.value_parts, splits)),
            *map(Int32, (slots, count, 0)),
        )
        for tile in range(count):
            own = worker.find(sizes, Lengths(Int64(0), Int64(8), Int64(0), Int32(0)), Int32(tile), Int32(LANES))
            work = Work(*own)
            fields = work.first_row, work.split, work.head, work.value_part
            found.append(tuple(int(np.asarray(field).flat[0]) for field in fields))
    want = [(row, split, head, part) for row in (0, 128) for split in range(3) for head in range(3) for part in (0, 1)]
    assert sorted(found) == want
    assert all(found[i][:3] == found[i + 1][:3] for i in range(0, count, 2)), "both halves of V run side by side"


class Number:
    """Float32 of the simulator, with an infinity."""

    inf = np.float32(np.inf)

    def __new__(cls, value: Any) -> Any:
        return Float32(value)


def sums_of(want: torch.Tensor, part: int, lanes: np.ndarray) -> list[Any]:
    """A thread's sums of one half of V's columns. want: fp32 [16, 512]."""
    places = (sum_place(j) for j in range(DIM // 4))
    return [Float32(want[lanes // 4 + row, part * 256 + column + lanes % 4 * 2].numpy()) for row, column in places]


def written(splits: int) -> tuple[np.ndarray, torch.Tensor]:
    """(the bytes that both halves' work tiles write of 16 rows with sums of weights of 1, what their sums stand for:
    fp32 [16, 512])."""
    config, want = config_of(), torch.randn(WARP_ROWS, DIM)
    size = WARP_ROWS * (DIM * 2 if splits == 1 else splits * (DIM + 1) * 4)
    machine = Machine(np.zeros(64, np.uint8), np.full(size, 0xFF, np.uint8))
    # Lanes of a quad store other things in parts: each in turn, all lanes alike, as branches may not diverge here.
    all_lanes = [LANES] if splits == 1 else [LANES // 4 * 4 + k for k in range(4)]
    with running(Altered(machine, modules={**machine.meanings().modules, tile_results: {"Float32": Number}})):
        shape = SimpleNamespace(num_q_heads=Int32(GROUP), total_q=Int32(WARP_ROWS // GROUP))
        shape.splits = SimpleNamespace(value=Int32(splits))
        operands = SimpleNamespace(out=Int64(0), partials=Int64(0), lse=Int64(0))
        writer: Any = ResultWriter(config)
        one, zero = Float32(np.ones(32)), Float32(np.zeros(32))
        for part, lanes, i in itertools.product(range(config.value_parts), all_lanes, range(2)):
            work = SimpleNamespace(head=Int32(0), value_part=Int32(part), split=Int32(splits - 1))
            row, sums = Int32(lanes // 4 + 8 * i), sums_of(want, part, lanes)
            rest = row >= 0, zero, one, sums, one, Int32(lanes), i
            if splits == 1:
                writer.write_row(operands, None, work, row, Int32(0), *rest)
            else:
                writer.write_part(shape, operands, work, row, *rest)
    return machine.global_memory, want


def test_both_halves_make_a_row_of_the_output():
    found, want = written(1)
    assert torch.equal(torch.from_numpy(found).view(torch.bfloat16).view(WARP_ROWS, DIM), want.bfloat16())


def test_both_halves_make_a_row_of_a_split_s_part():
    found, want = written(2)
    parts = torch.from_numpy(found).view(torch.float32)
    averages, weights = parts[: 2 * WARP_ROWS * DIM].view(2, WARP_ROWS, DIM), parts[2 * WARP_ROWS * DIM :].view(2, -1)
    assert torch.equal(averages[1], want) and not weights[1].any() and weights[0].isnan().all()
