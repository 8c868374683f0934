"""What the consumer warps store, lane by lane in NumPy: weights for the other warpgroup, rows of the output."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from cutlass import BFloat16

from cute_kernels.device.softmax import RESCALE_SLACK

pytest.importorskip("cutlass")

from cute_kernels.device import wgmma_tiles
from cute_kernels.mla.combine import output
from cute_kernels.mla.config import BLOCK_TOKENS, PARTIALS, WEIGHT_BYTES, MlaConfig
from cute_kernels.mla.elements import ElementType
from cute_kernels.mla.mainloops import serial, softmax
from layouts import banks
from simulator import LANES, Float32, Int32, Warp, stand_in
from simulator.registers import bf16_bits, bf16_values
from tests.mla.test_tiles import place_of


def accumulators(values: np.ndarray, warp: int) -> list:
    """A warp's part of a 64 x n matrix as the accumulators of its lanes."""
    found = []
    for i in range(values.shape[1] // 2):
        below, column = wgmma_tiles.sum_place(i)
        found.append(Float32(values[16 * warp + LANES // 4 + below, column + 2 * (LANES % 4)]))
    return found


def assert_no_conflicts(machine: Warp) -> None:
    for access in machine.accesses:
        assert banks.wavefronts(access.addresses, access.width, access.kind) == max(1, access.width // 4)


def test_weights_lie_as_the_second_warpgroup_reads_them(run_on):
    machine = Warp(np.zeros(WEIGHT_BYTES, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    weights = np.random.default_rng(0).random((64, BLOCK_TOKENS)).astype(np.float32)
    for warp in range(4):
        scores = accumulators(weights, warp)
        packed = [machine.pack_bf16x2(scores[i], scores[i + 1]) for i in range(0, len(scores), 2)]
        serial.Serial(MlaConfig()).weights.publish(packed, Int32(0), Int32(warp), Int32(LANES))
    words = machine.shared_memory.view(np.uint16)
    for row, column in np.ndindex(weights.shape):
        assert words[place_of(row, column) // 2] == bf16_bits(weights[row, column])
    assert_no_conflicts(machine)


def test_output_is_written_by_whole_sectors(run_on):
    """Four lanes of a row trade words until each has 16 bytes side by side: nothing is staged."""
    machine = Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    writer = output.Writer(ElementType(BFloat16, stand_in(machine.pack_bf16x2)), PARTIALS["fp16"])
    acc = np.random.default_rng(1).standard_normal((64, 2 * output.HALF)).astype(np.float32)
    factors = [Float32(2.0), Float32(0.5)]
    memory = np.zeros((64, 2 * output.HALF), np.uint16)
    for warp, half, below in itertools.product(range(4), range(2), range(2)):
        own = accumulators(acc[:, half * output.HALF :][:, : output.HALF], warp)
        row = Int32(16 * warp + LANES // 4 + 8 * below)
        first = writer.place(SimpleNamespace(out=0), row, LANES, half)
        for i, piece in enumerate(writer.pieces(own, factors[below], below, LANES, machine.pack_bf16x2)):
            places = np.asarray(first + output.PIECE_PITCH * i)
            sectors, counts = np.unique(places // 32, return_counts=True)
            assert len(sectors) == 16 and (counts == 2).all() and (places % 16 == 0).all()
            words = np.stack([np.asarray(word) for word in piece], axis=1)
            memory.reshape(-1, 8)[places // 16] = np.ascontiguousarray(words).view(np.uint16)
    scaled = acc * np.where(np.arange(64) % 16 < 8, 2.0, 0.5).astype(np.float32)[:, None]
    assert np.array_equal(bf16_values(memory), bf16_values(bf16_bits(scaled)))


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_partial_results_are_fp16_of_any_size(run_on, size):
    """A power of 2 brings the greatest of a row's half below 2**15; what is far smaller than all fp16 becomes 0."""
    machine = Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    writer = output.Writer(ElementType(BFloat16, stand_in(machine.pack_bf16x2)), PARTIALS["fp16"])
    acc = np.random.default_rng(3).uniform(-size, size, (64, output.HALF)).astype(np.float32)
    found = np.full((64, output.HALF), np.nan)
    for warp, below in itertools.product(range(4), range(2)):
        own = accumulators(acc, warp)
        scale, unit = output.scale_of(own, below)
        assert np.array_equal(np.float64(scale) * np.float64(unit), np.ones(32))
        row = 16 * warp + LANES // 4 + 8 * below
        for i, piece in enumerate(writer.pieces(own, scale, below, LANES, machine.pack_f16x2)):
            places = np.asarray(output.piece_offset(LANES, 0) + output.PIECE_PITCH * i)
            halves = np.ascontiguousarray(np.stack(piece, axis=1), np.uint32).view(np.float16)
            assert size < 1e-30 or np.abs(halves).max() >= 2.0**13
            for j in range(8):
                found[row, places // 2 + j] = halves[:, j] * np.float64(unit)
    top = np.abs(acc).max(1, keepdims=True)
    assert (np.abs(found - acc) <= np.maximum(2.0**-11 * np.abs(acc), 2.0**-26 * top) + 2.0**-126).all()


SCORE_SCALE = np.float32(0.3)  # of the softmax tests


def assert_softmax_of(blocks, maxima, totals, acc, exact: bool) -> None:
    """That a warp's maxima and totals are those of its 16 rows over all blocks of raw scores, and totals those of the
    weights that were summed; ``exact``: the maxima are the greatest scores."""
    scale = np.float64(SCORE_SCALE)
    every = np.concatenate(blocks, axis=1).astype(np.float32)[:16] * scale
    wanted = np.log2(np.exp2(every - every.max(1, keepdims=True)).sum(1)) + every.max(1)
    for row in range(2):
        own, top = slice(8 * row, 8 * row + 8), maxima[row].reshape(8, 4)[:, 0] * scale
        found = top + np.log2(totals[row].reshape(8, 4).sum(1))
        assert np.allclose(found, wanted[own], rtol=1e-5, atol=1e-4)
        assert np.allclose(totals[row], acc[row], rtol=1e-5)
        assert not exact or np.array_equal(top, every.max(1)[own])


@pytest.mark.parametrize("slack", [RESCALE_SLACK, 0.0])
def test_softmax_over_blocks(run_on, slack):
    """Weights, accumulators and factors of several blocks add up to the softmax, whatever the lazy maximum does.

    A maximum that may not fall behind is the greatest score."""
    machine = Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    generator = np.random.default_rng(2)
    blocks = [generator.standard_normal((64, BLOCK_TOKENS)) * 20 * growth for growth in (1, 0.1, 3, 3, 8)]
    blocks[0][5], blocks[1][5] = -np.inf, -np.inf
    scale = Float32(SCORE_SCALE)
    maxima, totals = [Float32(softmax.LOWEST)] * 2, [Float32(0.0)] * 2
    acc = np.zeros(32), np.zeros(32)
    for block in blocks:
        scores = accumulators(block.astype(np.float32), 0)
        factors = softmax.raise_maxima(scores, maxima, scale, slack)
        packed = [None] * (softmax.NUM_SCORES // 2)
        softmax.exponentiate(scores, maxima, totals, factors, scale, packed, machine.pack_bf16x2)
        for row in range(2):
            own = sum(scores[i] for i in range(softmax.NUM_SCORES) if softmax.row_of(i) == row)
            acc[row][:] = acc[row] * factors[row] + own
            assert max(scores[i].max() for i in range(softmax.NUM_SCORES)) <= 2.0**slack * 1.01
    assert_softmax_of(blocks, maxima, totals, acc, exact=not slack)
