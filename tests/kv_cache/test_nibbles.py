"""Codes of 4 bits from two products a hair apart: right wherever both agree, and they seldom do not."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.device import nibbles
from tests.kv_cache.lanes import Float32, Gpu

STEPS = [2.0**-24, 3 * 2.0**-24, 2.0**-15, 0.1, 1 / 3, 0.333, 1.0, 1.0 + 2.0**-10, 2.0 - 2.0**-10, 17.0, 4368.0, 65504.0]


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    gpu.install(monkeypatch, nibbles)
    return gpu


def found(values: np.ndarray, shift: float, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, whether they may be wrong, the right ones) of values [n, 32]."""
    registers = [Float32(row) for row in values]
    both = nibbles.quotients(registers, Float32(shift), Float32(step))
    upper, lower = (np.clip(np.stack(codes).view(np.int32), 0, 15) for codes in both)
    with np.errstate(all="ignore"):
        exact = (values.astype(np.float32) - np.float32(shift)) / np.float32(step)
    return lower, upper != lower, np.clip(np.rint(exact), 0, 15).astype(np.int32)


def near_ties(step: float, shift: float) -> np.ndarray:
    """fp32 numbers on and next to those that lie halfway between two codes."""
    ties = ((np.arange(-2, 18)[:, None] + 0.5) * step + shift).astype(np.float32)
    return ties + np.arange(-16, 16).astype(np.float32) * np.spacing(ties)


@pytest.mark.parametrize("step", [float(np.float16(step)) for step in STEPS])
def test_codes_are_right_or_doubted(gpu, step):
    generator = np.random.default_rng(int(step * 2**24))
    for shift in (0.0, max(-7.5 * step, -65504.0), -8.0, 2.0**-24, 60000.0):
        shift = float(np.float16(shift))
        spread = generator.uniform(-1.0, 17.0, (40, 32)) * step + shift
        extremes = np.array([[0.0, -0.0, 65504.0, -65504.0, shift, 1e-30, -1e-30, 1e-38] * 4])
        for values in (near_ties(step, shift), spread.astype(np.float32), extremes.astype(np.float32)):
            codes, doubted, right = found(values, shift, step)
            assert np.array_equal(codes[~doubted], right[~doubted])


def test_few_codes_are_doubted(gpu):
    values = np.random.default_rng(0).standard_normal((2000, 32)).astype(np.float32)
    low, high = values.min(), values.max()
    step, shift = (float(np.float16(x)) for x in ((high - low) / 15, low))
    _, doubted, _ = found(values, shift, step)
    assert 0 < doubted.mean() < 1e-4


def test_what_is_halfway_is_doubted(gpu):
    _, doubted, _ = found(np.full((1, 32), 2.5, np.float32), 0.0, 1.0)
    assert doubted.all()


def test_integers_are_brought_into_range_and_packed(gpu):
    codes = [0, 15, 16, 2**31 - 1, -1, -(2**31), 7, 9]
    words = [np.broadcast_to(np.array(code, np.int64), 32).astype(np.int32).view(np.uint32) for code in codes]
    assert {hex(int(x)) for x in nibbles.pack(words)} == {"0x9700fff0"}
    assert {hex(int(x)) for x in nibbles.pack(words[6:])} == {"0x97"}
