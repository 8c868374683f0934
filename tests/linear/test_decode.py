"""Every code with every zero point, as the consumer warps decode it: exact, in every width and dtype."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights import integer_decode as decode
from simulator import stand_in
from tests.attention.warp import bf16_bits, bf16_values, elements, from_halves
from tests.linear.warp import LinearWarp


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_less_every_zero_point_is_exact(bits: int, dtype: str, run_on):
    gpu = LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8))
    run_on(gpu)
    subject = decode.IntegerDecoder(bits, dtype, HopperMath(dtype))
    masks = subject.masks(decode.Uint32(0))
    words = subject.words_per_step
    generator = np.random.default_rng(bits)
    for zero in (None, *range(1 << bits)):
        points = [subject.symmetric_zero] * 2 if zero is None else [decode.Uint32(zero)] * 2
        offsets = subject.offsets(points)
        # Each lane's words hold different codes; a step's fragment is [row g, row g + 8] of two columns twice.
        codes = generator.permutation(np.arange(256) % (1 << bits)).reshape(32, 8)
        packed = np.zeros((32, words), np.uint64)
        for place in range(8):
            packed[:, place * bits // 32] |= codes[:, place].astype(np.uint64) << np.uint64(place * bits % 32)
        registers = subject.fragment([decode.Uint32(packed[:, i]) for i in range(words)], 0, offsets, masks)
        found = np.concatenate(
            [elements(register, {"bf16": "bf16", "fp16": "f16"}[dtype]) for register in registers], 1
        )
        middle = subject.symmetric_zero if zero is None else zero
        assert np.array_equal(np.sort(found, axis=1), np.sort(codes - float(middle), axis=1))


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_is_rounded_once(bits: int, zero_point: bool, run_on):
    """Codes as subnormal numbers, of scales of both signs from tiny to the largest that there is room for."""
    subject, generator = subnormal_decoder(bits, zero_point, run_on), np.random.default_rng(bits)
    for exponent in (*range(-60, 27, 3), 26):
        scales = bf16_values(bf16_bits((0.99 * generator.random((32, 2)) + 1) * 2.0**exponent * (-1) ** exponent))
        scales[0] = 0
        pairs = [from_halves(np.stack([bf16_bits(row)] * 2, 1)) for row in scales.T]
        points = generator.integers(0, 1 << bits, (32, 2)) if zero_point else np.full((32, 2), subject.symmetric_zero)
        rows = stand_in(subject.row_numbers)(pairs, [decode.Uint32(row) for row in points.T])
        for first in range(0, 256, 8):
            codes = (np.arange(32)[:, None] * 8 + np.arange(8) + first) % (1 << bits)
            exact = less(codes, points, bits) * scales[:, [0, 1, 0, 1], None]
            assert np.array_equal(fragment_of(subject, codes, rows), bf16_values(bf16_bits(exact)).astype(np.float64))


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_whose_scale_comes_later_are_exact(bits: int, zero_point: bool, run_on):
    subject = subnormal_decoder(bits, zero_point, run_on)
    for zero in range(1 << bits) if zero_point else [subject.symmetric_zero]:
        codes, points = np.arange(256).reshape(32, 8) % (1 << bits), np.full((32, 2), zero)
        found = fragment_of(subject, codes, subject.row_numbers(None, [decode.Uint32(row) for row in points.T]))
        assert np.array_equal(found, less(codes, points, bits))


# [register][column] codes of a step, by bits: a register has two of one row, 4 bits half a word from one another.
IN_REGISTERS = {4: [[0, 4], [1, 5], [2, 6], [3, 7]], 8: [[0, 2], [1, 3], [4, 6], [5, 7]]}


def subnormal_decoder(bits: int, zero_point: bool, run_on) -> decode.SubnormalDecoder:
    run_on(LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8)))
    return decode.SubnormalDecoder(bits, "bf16", zero_point)


def less(codes: np.ndarray, points: np.ndarray, bits: int) -> np.ndarray:
    """[lane, register, column] codes [lane, 8] of a step less the zero points [lane, 2] of their rows."""
    return codes[:, IN_REGISTERS[bits]].astype(np.float64) - points[:, [0, 1, 0, 1], None]


def fragment_of(subject: decode.SubnormalDecoder, codes: np.ndarray, rows) -> np.ndarray:
    """[lane, register, column] what a step's codes [lane, 8] become."""
    bits = subject.bits
    words = np.zeros((32, 2), np.uint64)
    for place in range(8):
        words[:, place * bits // 32] |= codes[:, place].astype(np.uint64) << np.uint64(place * bits % 32)
    registers = subject.fragment([decode.Uint32(words[:, i]) for i in range(2)], 0, rows)
    return np.stack([elements(register, "bf16") for register in registers], 1) * subject.unit
