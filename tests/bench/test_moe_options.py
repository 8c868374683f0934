"""Options of layers of experts beside the plain call: what they are, and that wrong ones are not timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import moe_options
from bench.suites import WrongOutput
from bench.workloads import MoeModel, MoeShape

SHAPE = MoeShape(MoeModel("small", 4, 2, 256, 128), 5)


@pytest.fixture(scope="module")
def options():
    return moe_options.options_of(SHAPE, "cpu")


def test_every_option_is_right_and_all_but_one_are_the_plain_layer(options):
    moe_options.check(options)
    plain = options["plain"].call()
    for name, option in options.items():
        near = (option.call().float() - plain.float()).norm() <= 5e-3 * plain.float().norm()
        assert near == (name != "half of the experts"), name


def test_an_option_has_its_own_bytes(options):
    more = {name: option.own_bytes for name, option in options.items() if option.own_bytes}
    assert more == {"fp32 out": 2 * 5 * 256, "64-bit ids": 4 * 5 * 2}


@pytest.mark.parametrize("name", ["fp32 out", "half of the experts"])
def test_a_wrong_result_is_not_timed(name, options):
    call = options[name].call
    wrong = partial(call, topk_weights=torch.full((5, 2), 0.5))
    with pytest.raises(WrongOutput, match=f"{name}: relative error"):
        moe_options.check(options | {name: replace(options[name], call=wrong)})


def test_few_and_many_experts_and_tokens_are_timed():
    found = moe_options.shapes()
    assert {shape.tokens for shape in found} == set(moe_options.TOKENS)
    assert {shape.model.experts for shape in found} == {8, 128}
