"""Weights made on a GPU are those made on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import PackedWeight, quantize_weight
from tests.integrations.checkpoints import goldens
from tests.linear.cases import GROUPS


def assert_same(on_gpu: PackedWeight, on_cpu: PackedWeight) -> None:
    got, want = on_gpu.state_dict(), on_cpu.state_dict()
    assert on_gpu.device.type == "cuda" and got.keys() == want.keys()
    assert all(torch.equal(got[name].cpu(), want[name]) for name in want)
    assert torch.equal(on_gpu.dequantize().cpu(), on_cpu.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_quantisation(bits, zero_point, group_size):
    w = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    on_cpu = quantize_weight(w, bits, group_size, zero_point)
    assert_same(quantize_weight(w.cuda(), bits, group_size, zero_point), on_cpu)
    assert_same(quantize_weight(w, bits, group_size, zero_point, device="cuda"), on_cpu)
    assert_same(on_cpu.to("cuda"), on_cpu)


def test_importers():
    golden = goldens.layer(72, 256, 64, act_order=True, lowest_zero=1)
    for make, tensors in (
        (PackedWeight.from_awq, goldens.awq(golden)),
        (PackedWeight.from_gptq, goldens.gptq(golden)),
        (PackedWeight.from_compressed_tensors, goldens.compressed_tensors(golden)),
    ):
        assert_same(make(**{name: tensor.cuda() for name, tensor in tensors.items()}), make(**tensors))  # type: ignore[operator]


def test_a_weight_beyond_two_to_the_31_elements():
    w = torch.empty(262208, 8192, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    packed = quantize_weight(w)
    for first in (0, 131072, 262080):
        rows = slice(first, first + 128)
        assert torch.equal(
            packed.dequantize_tiles(first // 64, first // 64 + 2), quantize_weight(w[rows]).dequantize(torch.float32)
        )


@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
def test_tinygemm_tiles_are_those_of_pytorch(inner_k_tiles):
    golden = goldens.layer(72, 256, 64, dtype=torch.bfloat16)
    codes = torch.tensor(golden.codes, dtype=torch.uint8, device="cuda")
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, inner_k_tiles)
    tensors = goldens.tinygemm(golden, inner_k_tiles)
    assert torch.equal(packed.cpu(), tensors["packed_weight"])
    weight = PackedWeight.from_torchao(packed_weight=packed, scale_and_zero=tensors["scale_and_zero"].cuda())
    assert torch.equal(weight.dequantize(torch.float64).cpu(), golden.dense)
