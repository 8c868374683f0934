"""Options of linear layers beside the plain call: that they are what their names say, and are checked before timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import linear_options
from bench.linear_options import INPUT, INVARIANT, RESIDUAL, Layer, LinearOptions
from bench.random_weights import Format
from bench.suites import WrongOutput
from cute_kernels import NormedRows
from cute_kernels.norm.config import MAX_COLUMNS

LAYER = Layer(128, 256, 3)


@pytest.fixture(scope="module")
def options():
    return LinearOptions(LAYER, Format(), "cpu").all()


def test_every_option_is_right_and_changes_the_result(options):
    linear_options.check(options)
    plain = options["plain"].call()
    for name, option in options.items():
        result = option.call()
        result = result.rows if isinstance(result, NormedRows) else result
        same = result.shape == plain.shape and torch.equal(result.to(plain.dtype), plain)
        assert same == (name in ("plain", "fp32 out", "batch invariant")), name


def test_an_option_has_its_own_bytes(options):
    m, n, k = LAYER.m, LAYER.n, LAYER.k
    assert options["plain"].own_bytes == options["strided x"].own_bytes == options["swiglu"].own_bytes == 0
    assert options["residual"].own_bytes == options["fp32 out"].own_bytes == 2 * m * n
    assert options["bias"].own_bytes == 2 * n
    assert options["norm given"].own_bytes == 4 * m * n + 2 * n + m * n // 16
    assert options["norm taken"].own_bytes == m * k // 16
    assert options["act order"].own_bytes == 4 * k and options["input scale"].own_bytes == 2 * k
    assert options["zero points"].own_bytes == n * k // 128
    assert options["groups of 32"].own_bytes == 2 * n * k * 3 // 128


def test_no_two_options_share_a_weight(options):
    """One that many calls share is met warmer than others."""
    codes = [
        argument.codes for option in options.values() for argument in option.call.args if hasattr(argument, "codes")
    ]
    assert len(codes) == len(options) == len({one.data_ptr() for one in codes})


def test_rows_that_are_too_wide_to_be_normed_give_no_norm():
    wide = LinearOptions(replace(LAYER, n=MAX_COLUMNS + 64), Format(), "cpu").all()
    assert "norm given" not in wide and "norm taken" in wide


def test_what_each_may_take(options):
    assert options["residual"].allowed_us(10.0) == pytest.approx(1.0, abs=0.01)
    assert (INPUT.allowed_us(10.0), INPUT.allowed_us(100.0)) == (1.0, pytest.approx(5.0))
    assert options["batch invariant"].bar == INVARIANT and options["bias and residual"].bar == RESIDUAL


def test_a_wrong_result_is_not_timed(options):
    call = options["bias"].call

    def twice(x, weight, bias):
        return 2 * call.func(x, weight, bias)

    wrong = replace(options["bias"], call=partial(twice, *call.args, **call.keywords))
    with pytest.raises(WrongOutput, match="bias: relative error"):
        linear_options.check({"bias": wrong})


def test_kernels_that_are_timed_are_known_beforehand():
    found = linear_options.specs([(8192, 8192, 16)])
    assert 2 <= len(found) <= 11
