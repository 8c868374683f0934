"""The kernel for few heads, lane by lane in NumPy: copies, operands, scores, weights, acc, and what is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.device.softmax import RESCALE_SLACK

pytest.importorskip("cutlass")

from cute_kernels.architecture import HOPPER
from cute_kernels.mla.config import BLOCK_TOKENS, HEAD_DIM
from cute_kernels.mla.few_heads import cluster_combine, producer, queries, score_loop, value_loop
from cute_kernels.mla.few_heads.config import (
    LATENT_STEPS,
    MATRIX_BYTES,
    NUM_TILES,
    PRODUCER_WARPS,
    ROW_BYTES,
    SCORE_WARPS,
    STAGE_BYTES,
    VALUE_WARPS,
    WARP_COLUMNS,
    WARP_TOKENS,
    FewHeadsConfig,
)
from layouts import banks
from layouts.kv.mla import MlaFp8
from simulator import LANES, Float32, Int32, Int64, Registers, Warp, stand_in
from simulator.registers import bf16_bits, bf16_values, halves
from tests.mla.test_gather import NUM_PAGES, PAGE_SIZE, fp8_tokens, paged, pages_of, some_indices, sparse_source

FORM = MlaFp8()
HEADS = (8, 16, 32)
CLUSTER_STRIDE = 1 << 17  # from a CTA's shared memory to the next one's
QUERIES, QUERY_SCALES, WEIGHTS, END = STAGE_BYTES, 90_000, 91_136, 91_136 + NUM_TILES * 4 * MATRIX_BYTES
MEMORY = SimpleNamespace(ring=0, queries=QUERIES, query_scales=QUERY_SCALES, weights=WEIGHTS)


def machine_with(run_on, global_memory: np.ndarray) -> Warp:
    machine = Warp(np.full(END, 0xFF, np.uint8), global_memory, cluster_stride=CLUSTER_STRIDE)
    run_on(machine)
    return machine


def lanes_of(warp: int) -> tuple[Any, Any]:
    return Int32(warp), Int32(LANES)


# -- copies ------------------------------------------------------------------------------------------------------------


def copy_block(machine: Warp, stride: int, indices: np.ndarray) -> None:
    """One block of tokens into the first stage."""
    copier = producer.Producer(FewHeadsConfig())
    source = sparse_source(pages_of(Int64(0), stride, ROW_BYTES, PAGE_SIZE), NUM_PAGES * PAGE_SIZE)
    for warp in range(PRODUCER_WARPS):
        row = warp * WARP_TOKENS + LANES % WARP_TOKENS
        entry: Any = Int32(indices[row])
        token = copier.locator.locate(SimpleNamespace(main_blocks=1), source, entry, Int32(0), row)
        copier.copy_rows(token, Int32(warp * WARP_TOKENS * ROW_BYTES), Int32(LANES))


def test_rows_are_copied_as_they_are_and_nothing_else_is_read(run_on):
    tokens = fp8_tokens(NUM_PAGES * PAGE_SIZE, any_scale=True)
    bytes_, stride = paged(tokens)
    machine = machine_with(run_on, bytes_)
    indices = some_indices(4)
    copy_block(machine, stride, indices)
    exists = (indices >= 0) & (indices < len(tokens))
    wanted = tokens[np.where(exists, indices, 0)].numpy() * exists[:, None]
    assert np.array_equal(machine.shared_memory[:STAGE_BYTES].reshape(BLOCK_TOKENS, ROW_BYTES), wanted)
    assert (machine.shared_memory[STAGE_BYTES:] == 0xFF).all()
    assert all(place % stride + size <= PAGE_SIZE * ROW_BYTES for place, size in machine.reads)
    assert len(machine.reads) == exists.sum() * 41


# -- products ----------------------------------------------------------------------------------------------------------


def some_queries(heads: int, seed: int) -> torch.Tensor:
    """bf16 [heads, 576] of very different sizes; the last head is zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-12, 12, (heads, 1), generator=generator)
    found = torch.randn((heads, HEAD_DIM), generator=generator) * sizes
    found[-1] = 0
    return found.bfloat16()


def publish(machine: Warp, config: FewHeadsConfig, num_heads: int) -> None:
    """What the value warps do with queries at the beginning of global memory."""
    shape = SimpleNamespace(num_heads=num_heads)
    share = SimpleNamespace(first_head=0, shape=shape, query_row=lambda head: head)
    for warp in range(VALUE_WARPS):
        operands = queries.Queries(config)
        for block, words in enumerate(operands.load(Int64(0), share, *lanes_of(warp))):
            to_fp16, from_fp16 = operands.store_latent(words, MEMORY, block, *lanes_of(warp))
            factor = np.asarray(to_fp16)
            pair = machine.pack_bf16x2(factor, factor)
            place = QUERY_SCALES // 4 + 8 * block + warp
            machine.shared_memory.view(np.float32)[place] = np.asarray(from_fp16)[0]
            # A branch of some lanes: the others write what those write.
            mirrored = [word[LANES % queries.ROPE_LANES] for word in words]
            operands.store_rope(mirrored, pair, MEMORY, block, Int32(warp), Int32(LANES % queries.ROPE_LANES))


def stage_of(tokens: torch.Tensor) -> np.ndarray:
    return tokens.numpy().reshape(-1)


def state_of(scorer, scales: list[Any]) -> score_loop.State:
    columns = scorer.columns
    maxima, totals, limits = Registers(columns, Float32), Registers(columns, Float32), Registers(NUM_TILES, Float32)
    maxima.fill(score_loop.LOWEST)
    limits.fill(score_loop.MIN_LIMIT)
    return score_loop.State(stand_in(scales), maxima, totals, limits)


@pytest.mark.parametrize("heads", HEADS)
def test_scores(run_on, heads):
    """Of 16 tokens of every warp, to the fp32 rounding of acc; heads that do not exist score 0."""
    tokens, config = fp8_tokens(BLOCK_TOKENS, any_scale=True, seed=5), FewHeadsConfig(heads=heads, stages=3)
    q = some_queries(heads, 6)
    missing = 3
    memory_of_q = np.concatenate([q.view(torch.int16).numpy().view(np.uint8).reshape(-1), np.full(4096, 255, np.uint8)])
    machine = machine_with(run_on, memory_of_q)
    machine.shared_memory[:STAGE_BYTES] = stage_of(tokens)
    publish(machine, config, heads - missing)
    scorer = score_loop.ScoreLoop(config)
    keys = FORM.dequantize(tokens, torch.float64).numpy()
    wanted = keys @ q.double().numpy().T
    size = np.abs(keys) @ np.abs(q.double().numpy()).T
    machine.accesses.clear()
    from_fp16 = machine.shared_memory[QUERY_SCALES:].view(np.float32)[:heads]
    found = np.zeros((BLOCK_TOKENS, heads))
    for warp in range(SCORE_WARPS):
        rows = Int32(warp * WARP_TOKENS * ROW_BYTES)
        scores = scorer.scores(MEMORY, rows, scorer.load_scales(rows, Int32(LANES)), Int32(LANES))
        for i, value in enumerate(scores):
            row, head = 16 * warp + LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2
            found[row, head] = value * np.float64(from_fp16[head])
    assert (np.abs(found - wanted)[:, : heads - missing] <= 2.0**-20 * size[:, : heads - missing]).all()
    assert not found[:, heads - missing :].any()
    for access in machine.accesses:
        least = {"ldmatrix": 4, "ld": access.width // 4}[access.kind]
        assert banks.wavefronts(access.addresses, access.width, access.kind) <= least


@pytest.mark.parametrize("heads", HEADS)
def test_values(run_on, heads):
    """Weights as the score warps store them, times values as the value warps read them, times the factors."""
    tokens, config = fp8_tokens(BLOCK_TOKENS, any_scale=True, seed=7), FewHeadsConfig(heads=heads, stages=3)
    machine = machine_with(run_on, np.zeros(16, np.uint8))
    machine.shared_memory[:STAGE_BYTES] = stage_of(tokens)
    generator = np.random.default_rng(8)
    weights = (generator.random((BLOCK_TOKENS, heads)) * 2.0 ** generator.integers(-6, 8, (1, heads))).astype(
        np.float32
    )
    largest = scales_of(tokens).max(0)
    limits = [score_loop.power_above(Float32(value)) for value in largest]
    scorer, adder = score_loop.ScoreLoop(config), value_loop.ValueLoop(config)
    for warp in range(SCORE_WARPS):
        state = state_of(scorer, [])
        for tile, limit in enumerate(limits):
            state.limits[tile] = limit
        rows = Int32(warp * WARP_TOKENS * ROW_BYTES)
        own = []
        for i in range(2 * scorer.columns):
            row, head = 16 * warp + LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2
            own.append(Float32(weights[row, head]))
        scales = scorer.load_scales(rows, Int32(LANES))
        scorer.store_weights(own, state, scales, MEMORY, 0, Int32(warp), Int32(LANES))
    values = FORM.dequantize(tokens, torch.float64).numpy()[:, :512]
    wanted, size = weights.T.astype(np.float64) @ values, weights.T.astype(np.float64) @ np.abs(values)
    found = np.zeros((heads, 512))
    machine.accesses.clear()
    for warp in range(VALUE_WARPS):
        acc = Registers(value_loop.CHUNKS * config.head_blocks * 4, Float32)
        tile = warp // 2
        place = WEIGHTS + tile * config.head_blocks * MATRIX_BYTES
        adder.add(acc, Int32(warp * WARP_COLUMNS), Int32(place), Int32(LANES))
        factor = limits[tile] * 2.0**-score_loop.WEIGHT_SLACK
        for block in range(config.head_blocks):
            for chunk in range(value_loop.CHUNKS):
                for c in range(2):
                    for i, value in enumerate(adder.pair(acc, factor, block, chunk, c)):
                        column = warp * WARP_COLUMNS + 16 * chunk + 2 * (LANES // 4) + i
                        found[8 * block + 2 * (LANES % 4) + c, column] = value
    # fp16 keeps 11 bits of a weight.
    assert (np.abs(found - wanted) <= 2.0**-11 * size + 2.0**-20).all()
    for access in machine.accesses:
        assert access.kind == "ldmatrix" and banks.wavefronts(access.addresses, 16, "ldmatrix") == 4


def scales_of(tokens: torch.Tensor) -> np.ndarray:
    return tokens[:, 512:528].contiguous().view(torch.float32).numpy()


# -- softmax -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [RESCALE_SLACK, 0.0])
def test_references_follow_and_weights_stay_within_fp16(run_on, slack):
    """Blocks of growing scores and scales, a warp at a time: acc under old references shrink by the factors. Without
    slack references are the greatest scores."""
    machine = machine_with(run_on, np.zeros(16, np.uint8))
    config = FewHeadsConfig(heads=8)
    scorer: Any = score_loop.ScoreLoop(config)
    generator = np.random.default_rng(9)
    scale = [Float32(0.25), Float32(0.5)]
    state = state_of(scorer, scale)
    exchange = 0
    acc = np.zeros((NUM_TILES, 2, 32))
    every = []
    for growth in (1.0, 0.1, 30.0, 30.0, 200.0):
        scores = [Float32(generator.standard_normal(32) * growth) for _ in range(4)]
        scales = [[Float32(2.0 ** generator.integers(-9, 3) * growth) for _ in range(NUM_TILES)] for _ in range(2)]
        every.append((scores, scales))
        if scorer.exceeds(state, scores, scales, Float32(slack)).any():
            before = [np.asarray(x) for x in state.maxima], [np.asarray(x) for x in state.limits]
            tiles = SCORE_WARPS * config.head_bytes
            stored = machine.shared_memory.view(np.float32)
            stored[: SCORE_WARPS * 8] = -np.inf
            highest = scorer.highest(state, scores)
            for t in range(4):
                stored[2 * t : 2 * t + 2] = [highest[c][t] for c in range(2)]
            stored[tiles // 4 : tiles // 4 + 16] = 0
            stored[tiles // 4 : tiles // 4 + 4] = [
                max(scales[0][j].max(), scales[1][j].max()) for j in range(NUM_TILES)
            ]
            shrink = scorer.follow(state, Int32(exchange + LANES % 4 * 8))
            ease = scorer.follow_limits(state, Int32(tiles))
            for c in range(2):
                assert np.allclose(shrink[c], np.exp2(before[0][c].astype(np.float64) - state.maxima[c]))
            for j in range(NUM_TILES):
                assert np.array_equal(np.asarray(ease[j]), before[1][j] / np.asarray(state.limits[j]))
                for c in range(2):
                    acc[j, c] *= shrink[c].astype(np.float64) * ease[j]
        weights = scorer.weights(state, scores)
        for j in range(NUM_TILES):
            for i, weight in enumerate(weights):
                term = weight.astype(np.float64) * scales[i // 2][j] / state.limits[j] * 2.0**score_loop.WEIGHT_SLACK
                assert term.max() <= 2.0 ** (slack + score_loop.WEIGHT_SLACK + 0.01)
                acc[j, i % 2] += term
    for j in range(NUM_TILES):
        for c in range(2):
            logits = [s[i].astype(np.float64) * scale[c] for s, _ in every for i in range(4) if i % 2 == c]
            tile_scales = [k[i // 2][j].astype(np.float64) for _, k in every for i in range(4) if i % 2 == c]
            if slack == 0.0:
                # Lanes with the same heads have the same reference.
                highest = np.max(logits, axis=0).reshape(8, 4).max(0)
                assert np.array_equal(np.asarray(state.maxima[c]), np.tile(highest, 8))
            wanted = sum(np.exp2(x - state.maxima[c]) * k for x, k in zip(logits, tile_scales, strict=True))
            assert np.allclose(acc[j, c] * state.limits[j] * 2.0**-score_loop.WEIGHT_SLACK, wanted, rtol=1e-5)
            if j == 0:
                assert np.allclose(
                    np.asarray(state.totals[c]), sum(np.exp2(x - state.maxima[c]) for x in logits), rtol=1e-5
                )


def test_powers_of_2(run_on):
    machine_with(run_on, np.zeros(16, np.uint8))
    for value in (score_loop.MIN_LIMIT, 2.0**-7 - 2.0**-30, 1.0, 1.0000001, 1.5, 2.0, 3.0e5, score_loop.MAX_LIMIT):
        above = score_loop.power_above(Float32(value))
        assert (np.asarray(above) == 2.0 ** np.ceil(np.log2(np.float64(np.float32(value))))).all()
        assert (np.float64(above) * np.float64(score_loop.inverse_power(above)) == 1.0).all()


# -- parts of a cluster ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("heads", HEADS)
def test_sums_of_a_cluster_meet(run_on, heads, cluster):
    """Every CTA stores its acc where their columns are added up; all columns are, once."""
    config = FewHeadsConfig(heads=heads, stages=3, cluster=cluster)
    machine = machine_with(run_on, np.zeros(16, np.uint8))
    machine.shared_memory = np.full(cluster * CLUSTER_STRIDE, 0xFF, np.uint8)
    adder = value_loop.ValueLoop(config)
    values = np.random.default_rng(10).standard_normal((cluster, heads, 512)).astype(np.float32)
    for part, warp in np.ndindex(cluster, VALUE_WARPS):
        acc = Registers(value_loop.CHUNKS * config.head_blocks * 4, Float32)
        for index in np.ndindex(config.head_blocks, value_loop.CHUNKS, 2, 2):
            block, chunk, i, c = index
            column = warp * WARP_COLUMNS + 16 * chunk + 2 * (LANES // 4) + i
            acc[adder.place(block, chunk) + 2 * i + c] = Float32(values[part, 8 * block + 2 * (LANES % 4) + c, column])
        factors = [Float32(2.0)] * 2 * config.head_blocks
        adder.send(acc, factors, MEMORY, Int32(part), *lanes_of(warp))
    for access in machine.accesses:
        assert banks.wavefronts(access.addresses, access.width, access.kind) == 2
        assert np.ptp(np.asarray(access.addresses) // CLUSTER_STRIDE) == 0
    combine = adder.cluster_combine
    for owner, head in np.ndindex(cluster, heads):
        place = SimpleNamespace(ring=owner * CLUSTER_STRIDE)
        for first in range(0, combine.columns, 64):
            found = bf16_values(halves(combine.total(place, head, first, Int32(LANES)))).reshape(-1)
            column = owner * combine.columns + first
            wanted = np.zeros(64, np.float32)
            for part in range(cluster):
                wanted = wanted + 2 * values[part, head, column : column + 64]
            assert np.array_equal(found, bf16_values(bf16_bits(wanted)))


def test_a_cluster_knows_its_maximum_and_total(run_on):
    machine = machine_with(run_on, np.zeros(16, np.uint8))
    machine.shared_memory = np.zeros(4 * CLUSTER_STRIDE, np.uint8)
    combine = cluster_combine.ClusterCombine(FewHeadsConfig(heads=32, stages=3, cluster=4))
    maxima = np.array([3.0, score_loop.LOWEST, -5.0, 4.5], np.float32)
    totals = np.array([10.0, 0.0, 1e3, 2.0], np.float32)
    for part in range(4):
        place = SimpleNamespace(statistics=Int32(part * CLUSTER_STRIDE))
        combine.store_statistics(place, Int32(LANES), Float32(maxima[part]), Float32(totals[part]))
    maximum, total = combine.whole(SimpleNamespace(statistics=Int32(0)), Int32(LANES))
    assert (np.asarray(maximum) == 4.5).all()
    assert np.allclose(total, (totals * np.exp2(maxima.astype(np.float64) - 4.5)).sum(), rtol=1e-6)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_configurations_fit_and_say_why_not():
    for heads, stages in ((8, 5), (16, 4), (32, 3)):
        assert FewHeadsConfig(heads=heads, stages=stages).smem_bytes <= HOPPER.shared_bytes
        assert FewHeadsConfig(heads=heads, stages=stages).can_implement() is None
    for config, word in (
        (FewHeadsConfig("all"), "tokens"),
        (FewHeadsConfig(heads=24), "heads"),
        (FewHeadsConfig(stages=1), "stages"),
        (FewHeadsConfig(heads=32, stages=5), "shared memory"),
        (FewHeadsConfig(ahead=0), "ahead"),
        (FewHeadsConfig(cluster=3), "cluster"),
    ):
        reason = config.can_implement()
        assert reason is not None and word in reason


def test_every_column_of_a_query_is_an_operand_once():
    places = set()
    config = FewHeadsConfig(heads=32, stages=3)
    for step in range(LATENT_STEPS + 4):
        for lane in range(32):
            for block in range(4):
                place = queries.Queries(config).place(SimpleNamespace(queries=0), step, lane, block)
                places |= {place, place + 4}
    assert places == set(range(0, config.query_bytes, 4))
