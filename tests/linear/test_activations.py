"""What an epilogue applies to accumulators, lane by lane in NumPy, against fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.gemm.activate import MATH
from cute_kernels.gemm.activations import Gelu
from simulator import Float32, Warp, running


def gelu(values: np.ndarray) -> np.ndarray:
    """By lanes, 32 at a time."""
    warp = Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))
    with running(warp), np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return np.concatenate([np.asarray(Gelu().device(MATH, Float32(part))) for part in values.reshape(-1, 32)])


def test_gelu_is_nearer_to_fp64_than_erf_in_fp32():
    x = np.linspace(-12, 12, 1 << 14, dtype=np.float32)
    exact = np.array([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    error = np.abs(gelu(x) - exact)
    assert error.max() < 2.7e-7
    assert (error <= 3.6e-7 * np.abs(x)).all()
    middle = np.abs(x) < 4  # where a result in 16 bits is a normal number
    assert (error <= 2.0**-11 * np.abs(exact))[middle].all()


def test_gelu_of_what_is_not_a_number_of_the_middle():
    x = np.resize(np.array([np.inf, -np.inf, np.nan, 0.0, 3e38, -3e38, 1e-30, 25.0], np.float32), 32)
    found = gelu(x)[:8]
    assert np.isnan(found[2])
    found[2] = 0
    want = [np.inf, 0, 0, 0, np.float32(3e38), 0, np.float32(5e-31), 25]
    assert np.allclose(found, want, rtol=1e-5, atol=1e-32)
