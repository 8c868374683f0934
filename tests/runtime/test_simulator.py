"""The simulator runs a function as its source has it, whatever the compiler has made of it; its sums are the GPU's."""

from __future__ import annotations

import importlib
from fractions import Fraction
from types import FunctionType

import numpy as np
import pytest

from simulator import backend, registers
from simulator.gpu import exact_fma
from simulator.warp import Warp


def test_a_function_that_was_compiled_in_this_process_runs_as_it_is_written():
    def written(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int, int]:
        return a, b, c, seen

    def rewritten(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int, int]:
        return -a, -b, -c, -seen

    seen = 4
    assert isinstance(written, FunctionType)
    assert backend._as_written(written) is written
    vars(written)["_original_code"], written.__code__ = written.__code__, rewritten.__code__  # as the compiler does
    assert written(1) == (-1, -2, -3, -4)
    assert backend._as_written(written)(1) == (1, 2, 3, 4)


def test_a_module_first_imported_on_the_simulator_is_compiled_behind_it(tmp_path, monkeypatch):
    """Else a test that imports a reader there breaks whatever its process compiles next."""
    cutlass = pytest.importorskip("cutlass")
    (tmp_path / "first_seen_inside.py").write_text("from cutlass import Float32, Int32\nKEPT = bool\n")
    monkeypatch.syspath_prepend(tmp_path)
    with backend.running(Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))):
        module = importlib.import_module("first_seen_inside")
        assert module.Int32 is registers.Int32
    assert (module.Int32, module.Float32, module.KEPT) == (cutlass.Int32, cutlass.Float32, bool)


def test_who_adds_to_a_register_in_place_changes_no_other():
    one, pair = registers.Int32(7), registers.Registers(2, registers.Float32)
    one += 1
    pair[0] += 1.5
    assert (one == 8).all() and (registers.Int32(7) == 7).all()
    assert (pair[0] == 1.5).all() and (pair[1] == 0).all() and isinstance(pair[1], registers.Register)


def numbers(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Two factors and a summand of 32 lanes, fp32 [3, 32], all finite with their results."""
    exponents = {"far apart": (67, 187), "alike": (120, 134)}.get(kind, (126, 128))
    bits = rng.integers(0, 1 << 23, (3, 32)) | rng.integers(*exponents, (3, 32)) << 23
    x = (bits | rng.integers(0, 2, (3, 32)) << 31).astype(np.uint32).view(np.float32)
    if kind == "halfway":  # products of 25 bits or fewer, and summands that may tip them
        x[:2] = rng.integers(1 << 11, 1 << 13, (2, 32)) | 1
        x[2] = rng.choice([0.0, 2.0**-60, -(2.0**-60), 1.0], 32)
    if kind == "subnormal":  # products next to half of the least number
        x[:2] = [[(1 + 2.0**-20) * 2.0**-75], [(1 - 2.0**-20) * 2.0**-75]]
        x[2] = rng.integers(-(1 << 22), 1 << 22, 32) * 2.0**-149
    if kind == "cancelling":
        x[2] = -(x[0].astype(np.float64) * x[1]) * rng.choice([1.0, 1 + 2.0**-22], 32)
    return x


@pytest.mark.parametrize("kind", ["far apart", "alike", "subnormal", "halfway", "cancelling"])
def test_a_fused_sum_is_the_nearest_number_to_the_exact_one(kind):
    rng = np.random.default_rng(0)
    for _ in range(12):
        a, b, c = numbers(kind, rng)
        for got, *terms in zip(np.asarray(exact_fma(a, b, c)), a, b, c, strict=True):
            x, y, z = (Fraction(float(term)) for term in terms)
            exact = x * y + z
            off = abs(Fraction(float(got)) - exact)
            for other in (np.nextafter(got, np.float32(np.inf)), np.nextafter(got, np.float32(-np.inf))):
                distance = abs(Fraction(float(other)) - exact)
                even = int(got.view(np.uint32)) % 2 == 0
                assert off < distance or (off == distance and even), terms
