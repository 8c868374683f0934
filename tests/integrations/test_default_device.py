"""`torch.set_default_device` is the user's: what the library makes for itself lies where it means it to lie.

A default device that has no numbers (meta) shows it on any machine: what is made there cannot be read.
"""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels import QuantizedLinear, quantize_model
from cute_kernels.gemm.slices import slice_inputs
from cute_kernels.integrations.transformers.calibrate import calibrate_cache, gather_moments
from cute_kernels.integrations.transformers.inputs import StepInputs
from tests.integrations.architectures import DECODERS
from tests.integrations.test_accelerate import PROMPT

ELSEWHERE = torch.device("meta")


def assert_same_state(got: torch.nn.Module, want: torch.nn.Module) -> None:
    ours, theirs = got.state_dict(), want.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_and_experts_are_quantised_as_without_it(name):
    model = DECODERS[name].build(torch.bfloat16)
    want = quantize_model(copy.deepcopy(model), bits=4, group_size=64)
    with ELSEWHERE:
        quantize_model(model, bits=4, group_size=64)
    assert_same_state(model, want)


def test_a_layers_state_and_its_parts_have_numbers():
    layer = QuantizedLinear.from_linear(torch.nn.Linear(256, 64).bfloat16(), bits=4, group_size=64)
    want, part = layer.state_dict(), slice_inputs(layer.weight, 64, 192)
    with ELSEWHERE:
        got, ours = layer.state_dict(), slice_inputs(layer.weight, 64, 192)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(ours.codes, part.codes) and torch.equal(ours.scales, part.scales)


def test_a_recorded_steps_inputs_are_noted_on_the_host():
    given = {"input_ids": torch.tensor([[3], [5]]), "position_ids": torch.tensor([[1], [2]])}
    with ELSEWHERE:
        inputs = StepInputs(given)
    inputs.note()
    assert inputs.are(given) and not inputs.are(given | {"input_ids": torch.tensor([[3], [6]])})


def test_constants_are_calibrated_as_without_it():
    model, batch = DECODERS["llama"].build(torch.bfloat16), {"input_ids": PROMPT}
    moments = gather_moments(model, [batch])
    want = calibrate_cache(model, [], "int4_g4", moments=moments)
    with ELSEWHERE:
        got = calibrate_cache(model, [], "int4_g4", moments=moments)
    for ours, theirs in zip(got.transforms, want.transforms, strict=True):
        assert ours is not None and theirs is not None
        for name, array in ours.arrays.items():
            assert torch.equal(array, theirs.arrays[name]), name
