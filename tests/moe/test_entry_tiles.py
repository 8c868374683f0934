"""Tiles of few rows among assignments: which there are, where rows of x come to lie, and where results go. The device's
own code, thread by thread; the products are `cute_kernels.gemm.wgmma.register_mainloop`'s."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.architecture import HOPPER
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.activations import ClampedSwiglu, activation_named, config_of, number_of
from cute_kernels.gemm.experts.ranges import assignments
from cute_kernels.gemm.experts.ranges.assignments import AssignmentFinder
from cute_kernels.gemm.experts.ranges.schedule import row_factor
from cute_kernels.gemm.experts.wgmma.entry_config import (
    ENTRY_ROWS,
    LONG_BLOCK_K,
    RINGS,
    ROW_COLUMNS,
    EntryConfig,
    entry_rows,
    ring_config,
)
from cute_kernels.gemm.experts.wgmma.entry_kernel import (
    EntryKernel,
    EntryLoads,
    EntryResults,
    EntryTile,
    EntryTileScheduler,
    EntryTileSizes,
)
from cute_kernels.gemm.experts.wgmma.schedule import SMEM_RESERVE, entry_config, entry_tiles
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.wgmma.epilogue import GATED_PITCH, PACKED_PITCH, Store
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K
from cute_kernels.gemm.wgmma.memory import TileMemory, barriers_from
from cute_kernels.gemm.wgmma.results import StagedStore
from layouts.weights.hopper import TILE_N
from simulator import stand_in
from tests.moe.machine import Machine, Pointer, Registers

NUM_EXPERTS, NUM_TILES, K_BLOCKS = 8, 3, 5
IDS = {
    "one token": [5, 2],
    "one expert has more than an entry": [3] * 11 + [0],
    "unknown ones between": [-1, 4, 9, 4, 8, 0, 1, 4],
    "two a lane": [i * 5 % 7 for i in range(45)],
    "nobody": [-1, 8],
}


def problem(places: int = 8, n: int = 4096, k: int = 2048, experts: int = 128, **others: Any) -> GroupedProblem:
    form = others.pop("form", integers(4))
    return GroupedProblem(places, experts, n, k, k, form, others.pop("dtype", "bf16"), batch_invariant=True, **others)


def configured(rows: int, block_k: int = 128) -> EntryConfig:
    config = entry_config(problem(), rows, block_k, 1)
    assert config is not None
    return config


def sizes(ids: list[int], k: int = 0, n: int = 0, topk: int = 1) -> EntryTileSizes:
    numbers = dict.fromkeys(("m", "scale_groups", "whole", "splits", "split_k_blocks", "activation", "out_kind"), 0)
    own = {"num_experts": NUM_EXPERTS, "places": len(ids), "id_words": 1, "row_factor": row_factor(topk), "waits": 1}
    return stand_in(EntryTileSizes)(
        **numbers, n=n, k=k, num_tiles=NUM_TILES, k_blocks=K_BLOCKS, grid=None, tiles=Divisor.of(NUM_TILES), **own
    )


def finder_of(machine: Any, ids: list[int], rows: int) -> AssignmentFinder:
    """What a warp's lane knows of entries."""
    lanes = range(-(-len(ids) // WARP_THREADS))
    experts = [
        assignments.load_expert(machine.ids, i * WARP_THREADS + machine.lane, len(ids), 1, NUM_EXPERTS) for i in lanes
    ]
    return AssignmentFinder.of(experts, NUM_EXPERTS, machine.lane, rows)


def on_machine(run_on, ids: list[int]) -> Any:
    machine: Any = Machine()
    run_on(machine)
    machine.ids = machine.put(torch.tensor(ids, dtype=torch.int32))
    return machine


@pytest.mark.parametrize("rows", ENTRY_ROWS)
@pytest.mark.parametrize("num_ctas", [1, 4, 7])
@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
def test_every_tile_of_every_entry_is_computed_by_one_warpgroup(ids, num_ctas, rows, run_on):
    """And no warpgroup has two more than another; with fewer than CTAs, each has a CTA of its own."""
    machine, found = on_machine(run_on, ids), [[] for _ in range(RINGS * num_ctas)]

    def work() -> None:
        finder = finder_of(machine, ids, rows)
        for ring in range(RINGS):
            first = machine.cta.block[0] + ring * num_ctas
            scheduler = stand_in(EntryTileScheduler)(sizes(ids), finder, first, RINGS * num_ctas)
            for index in range(scheduler.first, scheduler.count, scheduler.stride):
                tile = scheduler.work_tile(index)
                if machine.lane == 7:
                    places = tuple(int(tile.entry.place(row)) for row in range(tile.entry.rows))
                    found[first].append((int(tile.entry.expert), places, int(tile.block)))
                    assert (tile.begin, tile.end) == (0, K_BLOCKS)

    machine.run(work, [(cta, 0, 0) for cta in range(num_ctas)], WARP_THREADS)
    taken = [tile for own in found for tile in own]
    assert len(taken) == len(set(taken)) and all(len(places) <= rows for _, places, _ in taken)
    results = [(place, block) for _, places, block in taken for place in places]
    known = [place for place, expert in enumerate(ids) if 0 <= expert < NUM_EXPERTS]
    assert sorted(results) == sorted((place, block) for place in known for block in range(NUM_TILES))
    assert all(ids[place] == expert for expert, places, _ in taken for place in places)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    if len(taken) <= num_ctas:
        assert not any(found[num_ctas:])


@pytest.mark.parametrize("block_k", LONG_BLOCK_K)
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("rows", ENTRY_ROWS)
@pytest.mark.parametrize("ids", [[2], [3] * 2, [3] * 5, [1, 3, 1, 1, 6, 1]], ids=str)
def test_each_row_is_the_first_of_eight(ids, rows, topk, block_k, run_on):
    """Where pieces of 16 bytes are not swizzled; nobody writes what lies where an entry has no row."""
    machine, config = on_machine(run_on, ids), configured(rows, block_k)
    ring, k = ring_config(config), K_BLOCKS * block_k
    x = torch.randn(-(-len(ids) // topk), k).bfloat16()
    operands, shape = SimpleNamespace(x=machine.put(x)), sizes(ids, k=k, topk=topk)
    pipeline = Pipeline(stand_in(Pointer(0)), stand_in(Pointer(64)), ring.num_stages)
    where = SimpleNamespace(x_address=4096, pipeline=pipeline)
    found: list[tuple[Any, list[torch.Tensor]]] = []

    def work() -> None:
        if machine.here.thread == 0:
            pipeline.init()
        machine.cta.all.pass_by()
        scheduler = stand_in(EntryTileScheduler)(shape, finder_of(machine, ids, rows), 0, NUM_TILES)
        if machine.warp == 0:
            EntryLoads(ring).copy(operands, shape, where, scheduler, machine.lane)
            return
        here = pipeline.consumer_state()
        for index in range(scheduler.first, scheduler.count, scheduler.stride):
            tile, blocks = scheduler.work_tile(index), []
            for _ in range(K_BLOCKS):
                pipeline.consumer_wait(here)
                begin = where.x_address + here.stage * ring.x_stage_bytes
                blocks.append(torch.from_numpy(machine.cta.shared[begin : begin + ring.x_stage_bytes].copy()))
                machine.sync_warp()
                if machine.lane == 0:
                    pipeline.consumer_release(here)
                here = pipeline.next(here)
            if machine.lane == 0:
                places = [int(tile.entry.place(row)) for row in range(tile.entry.rows)]
                found.append((places, blocks))

    machine.run(work, [(0, 0, 0)], 2 * WARP_THREADS)
    assert found
    for places, blocks in found:
        for number, block in enumerate(blocks):
            operand = block.view(torch.bfloat16).view(block_k // TMA_TILE_K, rows, ROW_COLUMNS, TMA_TILE_K)
            for row, place in enumerate(places):
                wanted = x[place // topk, number * block_k : (number + 1) * block_k]
                assert torch.equal(operand[:, row, 0].flatten(), wanted)


@pytest.mark.parametrize("rows", ENTRY_ROWS)
def test_the_warps_of_a_ring_free_its_stages(rows):
    """A ring whose barriers wait for the other ring's warps as well stops when it comes to a stage for the second
    time."""
    config = configured(rows)
    regions = dict.fromkeys(("x_address", "codes", "scales", "zeros", "staging", "table", "x_scales", "partials"), 0)
    memory = stand_in(TileMemory)(x=None, **regions, **barriers_from(config, stand_in(Pointer(0))))
    declared = {group.name: group for group in config.barriers}
    kernel: Any = SimpleNamespace(ring=ring_config(config))
    for number in range(RINGS):
        ring = EntryKernel.ring_of(kernel, memory, number).pipeline
        assert (ring.fills, ring.releases) == (declared["full"].arrivals, declared["empty"].arrivals)
        assert ring.releases == ring_config(config).consumer_warps < config.consumer_warps


@pytest.mark.parametrize("features, pitch", [(TILE_N, PACKED_PITCH), (TILE_N // 2, GATED_PITCH)])
@pytest.mark.parametrize("columns", [80, 112])
def test_results_are_stored_where_their_assignments_are(features, pitch, columns, run_on):
    """Of an entry's rows, and of the features that there are."""
    ids = [2, 5, 2, 7, 2]
    machine, staged = on_machine(run_on, ids), torch.randn(ENTRY_ROWS[-1] * ROW_COLUMNS, pitch // 2).bfloat16()
    out = machine.put(torch.zeros(len(ids), columns).bfloat16())
    results = EntryResults(ring_config(configured(ENTRY_ROWS[-1])))

    def work() -> None:
        if machine.here.thread == 0:
            machine.cta.shared[: staged.nbytes] = staged.view(torch.uint8).flatten().numpy()
        machine.cta.all.pass_by()
        entry, thread = finder_of(machine, ids, ENTRY_ROWS[-1]).find(0), machine.here.thread
        for block in range(-(-columns // features)):
            tile = stand_in(EntryTile)(entry, block, 0, K_BLOCKS)
            store = stand_in(Store)(staging=0, warpgroup=0, tid=thread, row_warp=thread // 32, lane=machine.lane)
            results.store_rows(SimpleNamespace(out=out), columns, store, tile, features, pitch)

    machine.run(work, [(0, 0, 0)], 4 * WARP_THREADS)
    stored = machine.get(out, (len(ids), columns), torch.bfloat16)
    for row, place in enumerate((0, 2)):
        for block in range(-(-columns // features)):
            own = stored[place, block * features : (block + 1) * features]
            assert torch.equal(own, staged[ROW_COLUMNS * row, : len(own)])
    assert not stored[[1, 3, 4]].any()


@pytest.mark.parametrize("activation", ["swiglu", ClampedSwiglu(limit=1.0)], ids=str)
def test_results_have_their_experts_biases_and_activation(activation, run_on):
    """What a warpgroup's accumulators are, column by column: of each eight the first is an entry's row."""
    ids, n, own = [2, 5, 2], 128, activation_named(activation)
    machine, config = on_machine(run_on, ids), ring_config(configured(ENTRY_ROWS[-1]))
    config = replace(config, store=StagedStore(activation=config_of(activation)))
    generator = torch.Generator().manual_seed(3)
    sums = torch.randn(n // TILE_N, TILE_N, config.tile_m, generator=generator)
    bias = torch.randn(NUM_EXPERTS, n, generator=generator).bfloat16()
    out = machine.put(torch.zeros(len(ids), n // 2).bfloat16())
    operands, results = SimpleNamespace(out=out, bias=machine.put(bias)), EntryResults(config)
    shape = replace(sizes(ids, n=n), activation=number_of(activation))

    def work() -> None:
        entry, thread, lane = finder_of(machine, ids, ENTRY_ROWS[-1]).find(0), machine.here.thread, machine.lane
        for block in range(n // TILE_N):
            acc = Registers(config.own_m // 2, np.float32)
            for i in range(len(acc)):
                row, column = 16 * machine.warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + lane % 4 * 2 + i % 2
                acc[i] = np.float32(sums[block, row, column])
            store = stand_in(Store)(staging=0, warpgroup=0, tid=thread, row_warp=machine.warp, lane=lane)
            tile = stand_in(EntryTile)(entry, block, 0, K_BLOCKS)
            results.finish(operands, shape, None, store, tile, acc, 0, 0)

    machine.run(work, [(0, 0, 0)], 4 * WARP_THREADS)
    stored = machine.get(out, (len(ids), n // 2), torch.bfloat16)
    assert own is not None and not stored[1].any()
    for row, place in enumerate((0, 2)):
        wanted = own.of_rows(sums[:, :, ROW_COLUMNS * row].flatten().double() + bias[2].double())
        torch.testing.assert_close(stored[place].double(), wanted, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("bits, group, zero", [(4, 128, False), (4, 32, True), (4, 0, False), (8, 64, False)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("k", [256, 640, 2048, 14336])
def test_layouts_can_be_compiled(k, dtype, bits, group, zero):
    found = entry_tiles(problem(2, k=k, form=integers(bits, group, zero), dtype=dtype, experts=8), 1)
    assert found is not None and found.k_blocks * found.config.block_k == k
    assert found.config.can_implement() is None and found.config.smem_bytes + SMEM_RESERVE <= HOPPER.shared_bytes
    ring = ring_config(found.config)
    assert ring.block_tiles == found.config.block_tiles == 1
    assert ring.stage_bytes == found.config.stage_bytes and RINGS * ring.num_stages == found.config.num_stages


@pytest.mark.parametrize(
    "given, tokens",
    [
        pytest.param(problem(65), 65, id="too many assignments"),
        pytest.param(problem(8, experts=8), 4, id="experts with more rows than an entry"),
        pytest.param(problem(k=2048 + 32), 8, id="an odd K"),
        pytest.param(replace(problem(), k=1984), 8, id="a padded K"),
        pytest.param(problem(n=4104), 8, id="features that are no vectors"),
    ],
)
def test_others_are_sorted(given, tokens):
    assert entry_tiles(given, tokens) is None
    assert entry_tiles(problem(), 8) is not None


@pytest.mark.parametrize("experts, topk, rows", [(8, 2, {1: 1, 2: 2}), (128, 8, {1: 1, 2: 1, 4: 2, 8: 2})])
def test_entries_have_as_many_rows_as_experts_usually(experts, topk, rows):
    """And no more than there are tokens: each row takes eight columns of the MMAs."""
    for tokens, wanted in rows.items():
        found = entry_tiles(problem(tokens * topk, experts=experts), tokens)
        assert found is not None and entry_rows(found.config) == wanted
