"""MXFP4's scales: those up to 2 are multiplied in by the product that decodes codes, others make another format."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import (
    PackedWeight,
    QuantizedLinear,
    interleave_experts,
    interleave_weights,
    quantize_experts,
    quantize_weight,
    quantized_linear,
    stack_experts,
)
from cute_kernels.formats.weights import MXFP4
from cute_kernels.formats.weights.fp4 import MOST_FOLDED, MXFP4_ANY
from cute_kernels.gemm import pack_experts, pack_weight, slice_outputs
from cute_kernels.gemm.experts.module import QuantizedExperts
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.integrations.checkpoints.experts import Stack

N, K = 64, 96
CODES = torch.arange(N * K // 2).view(N, K // 2).mul(37).to(torch.uint8)


def scales_up_to(most: int) -> torch.Tensor:
    """Bytes [N, K / 32] from 0 on, ``most`` among them."""
    scales = torch.arange(N * K // 32).mul(7).remainder(min(most, 128)).to(torch.uint8).view(N, -1)
    scales[5, 1] = most
    return scales


def test_every_code_under_every_scale_that_is_folded_is_exact(run_on):
    """Subnormal numbers of bf16 and the sign of zero as well."""
    pytest.importorskip("cutlass")
    from cute_kernels.device.packed_math import HopperMath
    from simulator import stand_in
    from tests.attention.warp import LANES, Uint32, bf16_values, halves
    from tests.linear.warp import LinearWarp

    run_on(LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8)))
    decoder = MXFP4.scaling_decoder("bf16", HopperMath("bf16"))
    codes = [np.full(32, word, np.uint32) for word in (0x76543210, 0xFEDCBA98)]
    for first in range(0, MOST_FOLDED + 1, 16):
        stored = np.minimum(first + LANES, MOST_FOLDED).astype(np.uint32)
        factor = stand_in(decoder.scale_word)(Uint32(stored))
        rows = stand_in(decoder.row_numbers)([factor | factor << 16] * 2, None)
        for number, word in enumerate(codes):
            found = [bf16_values(halves(each)) for each in stand_in(decoder.fragment)([Uint32(word)], 0, rows)]
            columns = np.concatenate([np.stack([each[:, half] for each in found], axis=1) for half in (0, 1)], axis=1)
            levels = torch.arange(8 * number, 8 * number + 8).to(torch.uint8).expand(32, 1, 8)
            wanted = MXFP4.dequantize(levels, torch.from_numpy(stored).to(torch.uint8).view(32, 1), None)[:, 0].numpy()
            assert np.array_equal(columns, wanted) and np.array_equal(np.signbit(columns), np.signbit(wanted)), first


@pytest.mark.parametrize(("most", "form"), [(MOST_FOLDED, MXFP4), (MOST_FOLDED + 1, MXFP4_ANY), (254, MXFP4_ANY)])
def test_a_scale_beyond_2_makes_a_weight_of_the_format_that_takes_any(most, form):
    """Also where one expert alone has it, in slices, and where a state dict says MXFP4."""
    scales = scales_up_to(most)
    weight = pack_weight("mxfp4", CODES, scales)
    assert weight.format is form and slice_outputs(weight, 3, 40).format is form
    codes, plain = torch.stack([CODES] * 2), torch.full_like(scales, 120)
    experts = pack_experts("mxfp4", codes, torch.stack([plain, scales]))
    assert experts.format is pack_experts("mxfp4", codes, torch.stack([scales, plain])).format is form
    assert torch.equal(experts[1].dequantize(torch.float64), weight.dequantize(torch.float64))
    for found in (weight, experts):
        state = type(found)(**fields(found), format=MXFP4, check_values=False).state_dict()
        assert type(found).from_state_dict(state).format is form


def fields(weight: PackedWeight | PackedExperts) -> dict[str, Any]:
    return {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "shape")}


def test_large_weights_are_quantised_to_the_format_that_takes_any_scale():
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    assert quantize_weight(w, format="mxfp4").format is MXFP4
    large = quantize_weight(w * 64, format="mxfp4")
    assert large.format is MXFP4_ANY
    x = torch.eye(K)[:3].bfloat16()
    assert torch.equal(quantized_linear(x, large), large.dequantize()[:, :3].T)
    assert quantize_experts(torch.stack([w, w * 64]), format="mxfp4").format is MXFP4_ANY


def test_mxfp4_refuses_a_scale_beyond_2_where_nothing_is_packed():
    weight = pack_weight("mxfp4", CODES, scales_up_to(200))
    with pytest.raises(
        ValueError, match="^scales: got 200, want .* 128 in e2m1_g32e8m0, or the format e2m1_g32e8m0any$"
    ):
        PackedWeight(**fields(weight), format=MXFP4)
    assert PackedWeight(**fields(weight), format=MXFP4_ANY).format is MXFP4_ANY
    with pytest.raises(ValueError, match="^scales: got 255, which is NaN"):
        pack_weight("mxfp4", CODES, scales_up_to(255))


LARGE, SMALL = (pack_weight("mxfp4", CODES, scales_up_to(most)) for most in (200, 120))


@pytest.mark.parametrize("weights", [(LARGE, SMALL), (SMALL, LARGE)], ids=["large first", "small first"])
def test_weights_with_scales_beyond_2_are_made_one_with_others(weights):
    """As the experts of a checkpoint that are read one by one are, and gates and ups of which one has such scales."""
    wanted = torch.stack([weight.dequantize() for weight in weights])
    stack = Stack(2)
    for i, weight in enumerate(weights):
        stack.put(i, weight)
    for experts in (stack_experts(weights), stack.finish()):
        assert experts.format is MXFP4_ANY and torch.equal(experts.dequantize(), wanted)
    assert stack_experts([SMALL] * 2).format is MXFP4
    pair = interleave_weights(*weights)
    assert pair.format is MXFP4_ANY and torch.equal(pair.dequantize(), wanted.transpose(0, 1).flatten(0, 1))
    one, other = (stack_experts([weight] * 3) for weight in weights)
    assert interleave_experts(one, other).format is MXFP4_ANY


def test_a_layer_loads_scales_beyond_2_into_memory_that_no_kernel_of_small_ones_reads():
    """A merged layer, whose views its parts are, and a captured graph would decode them wrongly."""
    layer, experts = QuantizedLinear(SMALL), QuantizedExperts(stack_experts([SMALL]))
    for module, large, small in ((layer, LARGE, SMALL), (experts, stack_experts([LARGE]), experts.weight)):
        codes, state = module.codes, {name: tensor.clone() for name, tensor in small.state_dict().items()}
        module.load_state_dict(state)
        assert module.codes is codes
        module.load_state_dict(large.state_dict())
        assert module.codes is not codes and module.weight.format is MXFP4_ANY
        assert torch.equal(module.weight.dequantize(), large.dequantize())
        codes = module.codes
        module.load_state_dict(state)
        assert module.codes is codes and module.weight.format is MXFP4


def test_a_layer_pickled_when_mxfp4_was_one_format_is_of_the_one_that_its_scales_need():
    for module in (QuantizedLinear(LARGE), QuantizedExperts(stack_experts([LARGE]))):
        module.weight_format = MXFP4
        assert module.weight.format is MXFP4
        assert pickle.loads(pickle.dumps(module)).weight.format is MXFP4_ANY


def test_scales_in_torchs_own_dtype_choose_the_format():
    assert MXFP4.fitting(scales_up_to(200).view(torch.float8_e8m0fnu)) is MXFP4_ANY
    assert MXFP4.fitting(scales_up_to(120).view(torch.float8_e8m0fnu)) is MXFP4
