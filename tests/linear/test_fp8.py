"""Products in FP8 on CPU tensors: what E4M3 activations mean, against fp64 on the quantised operands."""

from __future__ import annotations

import copy
import re
import weakref
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

from cute_kernels import (
    PackedWeight,
    QuantizedLinear,
    quantize_activations,
    quantize_model,
    quantize_weight,
    quantized_linear,
    rms_norm,
)
from cute_kernels.formats.weights.base import spelling
from cute_kernels.gemm import fp8, ops
from cute_kernels.gemm.normed import NormedRows
from cute_kernels.gemm.operands.fp8 import LEAST, MOST, dequantize_activations, fp8_rows
from cute_kernels.runtime.gpu import standing_in
from tests.each import each
from tests.launchers import cpu_as_gpu
from tests.linear.cases import known

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ("fp8", "fp8_block", "fp8_block_e8m0", "mxfp8", "mxfp4", "w4g128", "w4g32", "w4gchannel")
TOLERANCE = 3e-3
NO_HOPPER = cpu_as_gpu(capability=lambda device: (8, 9))  # torch rounds x, and multiplies


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(name: str, n: int = 70, k: int = 320) -> PackedWeight:
    return quantize_weight(numbers(n, k, seed=2), format=name, dtype=BF16)


def exact_product(x: torch.Tensor, weight: PackedWeight, scale: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64, of the operands as they are rounded."""
    size = 128 if scale is None and weight.group_size and weight.bits == 8 else 0
    codes, scales = quantize_activations(x, size, scale=scale)
    of_inputs = scales.double().repeat_interleave(size or x.shape[-1], dim=-1)[..., : x.shape[-1]]
    return codes.double() * of_inputs @ weight.dequantize(torch.float64).T


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("group_size", [0, 128])
@pytest.mark.parametrize("k", [1, 128, 300])
def test_codes_are_the_nearest_and_scales_the_least_of_four_bits(dtype, group_size, k):
    x = numbers(2, 3, k, dtype=dtype)
    codes, scales = quantize_activations(x, group_size)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scales.shape == (2, 3, -(-k // group_size) if group_size else 1) and scales.dtype == FP32
    error = (dequantize_activations(codes, scales, group_size) - x.float()).abs()
    steps = scales.repeat_interleave(group_size or k, dim=-1)[..., :k] * 2.0**-9
    assert (error <= torch.maximum(x.float().abs() * 2.0**-4 * 1.0001, steps)).all()
    size = group_size or k
    largest = torch.stack([part.abs().amax(dim=-1) for part in x.float().split(size, dim=-1)], dim=-1) / MOST
    assert not (scales.view(torch.int32) & 0xFFFFF).any()  # of fp32's 23 bits behind the first
    assert (scales >= largest * (1 - 2.0**-18)).all() and (scales < largest * 1.125).all()


def test_rows_of_zeros_and_of_tiny_numbers_have_codes_0_and_scales_that_are_not():
    x = torch.zeros(3, 256)
    x[1] = LEAST / 2**20
    x[2, 200] = LEAST
    codes, scales = quantize_activations(x, 128)
    assert not codes[:2].float().any() and codes[2, 200].float() == 416  # of a scale of 1.25 / 512
    assert (scales > 0).all() and scales.isfinite().all()
    assert (quantize_activations(x)[1] > 0).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_the_rows_products_nan_and_no_others(value):
    x, weight = numbers(3, 320), weight_of("fp8_block")
    x[1, 130] = value
    codes, scales = quantize_activations(x, 128)
    assert scales[1].isnan().tolist() == [False, True, False]
    assert codes.float().isnan().sum() == 1 and not codes[1, 128:130].float().any()
    y = quantized_linear(x, weight, activations="fp8")
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_a_given_scale_saturates_and_keeps_nan():
    x = torch.tensor([[1.0, -900.0, float("inf"), float("nan"), 0.5, 448.0]])
    codes, scales = quantize_activations(x, scale=torch.tensor([1.0]))
    assert codes.float()[0, :3].tolist() == [1.0, -448.0, 448.0] and codes.float()[0, 3].isnan()
    assert codes.float()[0, 4:].tolist() == [0.5, 448.0] and scales.tolist() == [[1.0]]
    assert quantize_activations(x, scale=torch.tensor(2.0))[0].float()[0, 1] == -448.0


def test_values_between_two_codes_go_to_the_even_one():
    x = torch.tensor([[448.0, 17.0, 19.0, -21.0]])
    assert quantize_activations(x)[0].float().tolist() == [[448.0, 16.0, 20.0, -20.0]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((torch.zeros(2, 4, dtype=torch.int8),), {}), "x: got dtype torch.int8"),
        (((torch.zeros(()),), {}), r"x: got shape \[\]"),
        (((torch.zeros(2, 4), 64), {}), "group_size: got 64, want 128, or 0"),
        (((torch.zeros(2, 4),), {"scale": torch.zeros(2)}), "scale: got torch.float32"),
        (((torch.zeros(2, 4),), {"scale": torch.zeros(1)}), "scale: got 0, want a positive finite number"),
        (((torch.zeros(2, 4),), {"scale": torch.tensor(torch.inf)}), "scale: got inf"),
        (((torch.zeros(2, 4),), {"scale": torch.ones(1, dtype=BF16)}), "scale: got torch.bfloat16"),
        (((torch.zeros(2, 4),), {"scale": 1.0}), "scale: got float"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    args, kwargs = arguments
    with pytest.raises((TypeError, ValueError), match=said):
        quantize_activations(*args, **kwargs)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [None, 0.02])
def test_it_multiplies_the_rounded_activations_with_the_weight(name, scale):
    weight, x = weight_of(name), numbers(5, 320)
    given = None if scale is None else torch.tensor(scale)
    y = quantized_linear(x, weight, activations="fp8", activation_scale=given, out_dtype=FP32)
    assert relative_error(y, exact_product(x, weight, given)) < 1e-6
    y = quantized_linear(x, weight, activations="fp8", activation_scale=given)
    assert y.dtype == BF16 and relative_error(y, exact_product(x, weight, given)) < TOLERANCE
    assert 5e-3 < relative_error(y, x.double() @ weight.dequantize(torch.float64).T) < 5e-2


@each("name", FORMATS)
@each("m", [1, 3, 16, 17, 64])
@each("k", [140, 320])
def test_rounded_rows_are_bf16_numbers_and_their_16_bit_products_near_enough(name, m, k):
    """As few rows are served on a GPU: what 16-bit products are off by is the rounding of the weight."""
    weight, x = weight_of(name, k=k), numbers(m, k)
    x[0, :3] = torch.tensor([1e-30, -3e5, 7.3])
    rounded = fp8_rows(x, weight.format)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    y = quantized_linear(rounded.bfloat16(), weight, out_dtype=FP32)
    assert relative_error(y, exact_product(x, weight)) < 0.6 * TOLERANCE


@pytest.mark.parametrize("name", [name for name in FORMATS if name in ("fp8", "w4gchannel")])
def test_rows_rounded_by_a_given_scale_are_near_enough_in_bf16(name):
    """Whatever the scale's last bits; the weight's scales are applied to sums, so codes are exact."""
    x, weight = numbers(16, 320), weight_of(name).dequantize(torch.float64)
    for part in range(16):
        scale = torch.tensor((1 + part / 16 + 0.03) / 64)
        rounded = fp8_rows(x, weight_of(name).format, scale)
        assert relative_error(rounded.bfloat16().double() @ weight.T, rounded.double() @ weight.T) < TOLERANCE


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_bias_activation_and_residual_follow(activation):
    weight, x, bias = weight_of("fp8_block", 64), numbers(3, 320), numbers(64, seed=3)
    residual = numbers(3, 32 if activation == "swiglu" else 64, seed=4)
    y = quantized_linear(x, weight, bias, residual=residual, activation=activation, activations="fp8")
    sums = exact_product(x, weight) + bias.double()
    if activation == "silu":
        sums = nn.functional.silu(sums)
    if activation == "swiglu":
        sums = nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]
    assert relative_error(y, sums + residual.double()) < TOLERANCE


def test_act_order_and_input_scales_come_before_the_rounding():
    case = known(70, 256, 4, 64)
    perm, scale = torch.randperm(256, generator=torch.Generator().manual_seed(5)), numbers(256).abs() + 0.5
    weight, x = case.pack(perm=perm, input_scale=scale), numbers(3, 256)
    packed = (x * scale)[:, perm]
    codes, scales = quantize_activations(packed)
    rows = dequantize_activations(codes, scales).double()
    dense = weight.dequantize(torch.float64)[:, perm]
    assert relative_error(quantized_linear(x, weight, activations="fp8"), rows @ dense.T) < TOLERANCE


def test_a_norm_comes_before_the_rounding():
    weight, x, norm = weight_of("mxfp4", k=256), numbers(3, 256), numbers(256, seed=6)
    want = quantized_linear(rms_norm(x, norm), weight, activations="fp8")
    assert torch.equal(quantized_linear(x, weight, norm=norm, activations="fp8"), want)
    assert torch.equal(quantized_linear(NormedRows(x, norm), weight, activations="fp8"), want)
    with pytest.raises(ValueError, match="^norm: got a tensor for x of NormedRows"):
        quantized_linear(NormedRows(x, norm), weight, norm=norm, activations="fp8")


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_leading_shape(shape):
    y = quantized_linear(numbers(*shape, 320), weight_of("fp8"), activations="fp8")
    assert y.shape == (*shape, 70) and y.dtype == BF16


def test_out_is_written():
    weight, x, out = weight_of("fp8"), numbers(3, 320), torch.empty(3, 70, dtype=FP32)
    assert quantized_linear(x, weight, activations="fp8", out=out) is out
    assert relative_error(out, exact_product(x, weight)) < 1e-6


def test_rows_do_not_depend_on_the_batch():
    weight, x = weight_of("w4g128"), numbers(9, 320)
    options: dict[str, Any] = {"activations": "fp8", "batch_invariant": True, "out_dtype": FP32}
    whole = quantized_linear(x, weight, **options)
    assert all(torch.equal(quantized_linear(x[i : i + 1], weight, **options)[0], whole[i]) for i in range(9))


@pytest.mark.parametrize("name", ["nvfp4", "w8g128", "w4g128z"])
def test_formats_whose_codes_are_no_fp8_operands_are_refused(name):
    said = f"activations: got 'fp8' for weights in {spelling(weight_of(name).format)}, want None (16-bit products), or "
    said += "weights with "
    with pytest.raises(ValueError, match=re.escape(said)):
        quantized_linear(numbers(3, 320), weight_of(name), activations="fp8")
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in"):
        quantize_model(nn.Sequential(nn.Linear(64, 64, dtype=BF16)), format=name, activations="fp8")


def test_nothing_is_rounded_unless_it_is_asked_for():
    weight, x = weight_of("fp8"), numbers(3, 320)
    assert torch.equal(quantized_linear(x, weight), ops.linear_reference(x, weight))
    with pytest.raises(ValueError, match="activations: got 'int8', want None"):
        quantized_linear(x, weight, activations="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="activation_scale: got one with activations None"):
        quantized_linear(x, weight, activation_scale=torch.ones(1))


def test_a_traced_call_is_one_operator():
    weight, x = weight_of("fp8_block"), numbers(3, 320)
    traced = torch.compile(lambda x: quantized_linear(x, weight, activations="fp8"), fullgraph=True, backend="eager")
    assert torch.equal(traced(x), quantized_linear(x, weight, activations="fp8"))
    traced = torch.compile(lambda x: quantize_activations(x, 128), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(traced(x), quantize_activations(x, 128), strict=True))
    for arguments in ((x, 128, None), (x, 0, torch.ones(1))):
        torch.library.opcheck(torch.ops.cute_kernels.quantize_activations.default, arguments)


# -- torch's product --------------------------------------------------------------------------------------------------


def scales_rows_on_a_cpu() -> bool:
    """Whether this PyTorch's product takes a scale a row on a CPU, where it stands in for a GPU's: not in 2.11."""
    codes, scales = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.T, scale_a=scales, scale_b=scales.T, out_dtype=BF16)
    except RuntimeError:
        return False
    return True


needs_row_scales = pytest.mark.skipif(
    not scales_rows_on_a_cpu(), reason="this PyTorch's CPU product takes no scale a row; tests/gpu/test_fp8.py has it"
)


@needs_row_scales
@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 5])
def test_torchs_product_serves_codes_by_rows_on_a_gpu(scale, bias, m):
    weight, x = weight_of("fp8", 80), numbers(m, 320)
    given, added = None if scale is None else torch.tensor(scale), numbers(80, seed=7) if bias else None
    options: dict[str, Any] = {"activations": "fp8", "activation_scale": given}
    with standing_in(NO_HOPPER):
        y = quantized_linear(x, weight, added, **options)
    assert y.dtype == BF16
    want = exact_product(x, weight, given) + (0 if added is None else added.double())
    assert relative_error(y, want) < TOLERANCE


@needs_row_scales
def test_row_codes_are_made_once_and_anew_when_others_are_loaded():
    layer = QuantizedLinear.from_linear(nn.Linear(320, 80, dtype=BF16), format="fp8")
    other = QuantizedLinear.from_linear(nn.Linear(320, 80, dtype=BF16), format="fp8")
    layer.activations = other.activations = "fp8"
    x = numbers(3, 320)
    with standing_in(NO_HOPPER):
        layer(x)
        kept = fp8.kept_row_codes(layer.weight, lambda: True)
        layer(x)
        assert fp8.kept_row_codes(layer.weight, lambda: True) is kept
        layer.load_state_dict(other.state_dict())
        assert fp8.kept_row_codes(layer.weight, lambda: True) is not kept
        assert torch.equal(layer(x), other(x))
    codes = layer.weight.unpack_tiles(0, 2)[:80, :320]
    fp8.forget_row_codes(layer.weight.codes)
    for may_copy in (False, True):  # decided once: a weight's products do not change while a model runs
        assert fp8.kept_row_codes(layer.weight, lambda may_copy=may_copy: may_copy) is None
    assert torch.equal(fp8.row_codes(layer.weight).view(torch.uint8), codes)


@needs_row_scales
def test_row_codes_that_a_graph_copies_are_not_kept():
    layer = QuantizedLinear.from_linear(nn.Linear(320, 80, dtype=BF16), format="fp8")
    layer.activations = "fp8"
    x = numbers(3, 320)
    with standing_in(NO_HOPPER):
        with mock.patch.object(fp8, "is_captured", lambda codes: True):
            y = layer(x)
            assert layer.codes not in fp8._kept_rows and not fp8.has_room(layer.codes)
        assert torch.equal(layer(x), y) and layer.codes in fp8._kept_rows


@needs_row_scales
def test_a_plan_keeps_no_tensors_of_the_first_call():
    layer = QuantizedLinear.from_linear(nn.Linear(320, 80, dtype=BF16), format="fp8")
    layer.activations = "fp8"
    x = numbers(5, 320)
    there = weakref.ref(x)
    with standing_in(NO_HOPPER):
        layer(x)
        del x
        assert ops.launch.plans and there() is None


# -- layers -----------------------------------------------------------------------------------------------------------


def test_a_layer_rounds_what_it_is_told_to(tmp_path):
    dense, x = nn.Linear(320, 64, dtype=BF16), numbers(3, 320)
    layer = QuantizedLinear.from_linear(dense, format="fp8")
    plain = layer(x)
    layer.activations = "fp8"
    assert layer.products == "FP8 products" and "fp8 activations" in repr(layer)
    assert not torch.equal(layer(x), plain)
    assert torch.equal(layer(x), quantized_linear(x, layer.weight, layer.bias, activations="fp8"))
    layer.activation_scale = torch.tensor(0.02)
    scaled = layer(x)
    assert torch.equal(
        scaled,
        quantized_linear(x, layer.weight, layer.bias, activations="fp8", activation_scale=layer.activation_scale),
    )
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = QuantizedLinear.from_linear(nn.Linear(320, 64, dtype=BF16), format="fp8")
    other.activations = "fp8"
    result = other.load_state_dict(safetensors.torch.load_file(tmp_path / "layer.safetensors"))
    assert not result.missing_keys and not result.unexpected_keys and torch.equal(other(x), scaled)
    layer.activations = None
    layer.activation_scale = None
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, lambda layer: layer.to("meta", BF16).to_empty(device="cpu")])
def test_a_static_scale_stays_fp32_when_a_layer_is_cast(cast):
    layer, x = QuantizedLinear.from_linear(nn.Linear(128, 64, dtype=BF16), format="fp8"), numbers(3, 128)
    layer.activations, layer.activation_scale = "fp8", torch.tensor(0.013)
    want, state = layer(x), layer.state_dict()
    moved = cast(copy.deepcopy(layer))
    moved.load_state_dict(state)
    assert moved.activation_scale.dtype == torch.float32 and torch.equal(moved(x), want)


def test_a_layer_refuses_formats_and_shifts():
    layer = QuantizedLinear.from_linear(nn.Linear(64, 64, dtype=BF16), 8)
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in w8g128"):
        layer.activations = "fp8"
    shifted = QuantizedLinear(weight_of("w4g128", 64, 128), shifts=torch.zeros(64, 1))
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in w4fg128"):
        shifted.activations = "fp8"
    into = QuantizedLinear(weight_of("w4g128", 64, 128))
    into.activations = "fp8"
    with pytest.raises(RuntimeError, match="activations: got 'fp8' for weights in w8g128"):
        into.load_state_dict(QuantizedLinear.from_linear(nn.Linear(128, 64, dtype=BF16), 8).state_dict())


def test_inputs_of_a_layer_have_gradients():
    layer, x = QuantizedLinear(weight_of("fp8", 64)), numbers(3, 320).requires_grad_()
    layer.activations = "fp8"
    layer(x).float().sum().backward()
    assert x.grad is not None and relative_error(x.grad, layer.dequantize().double().sum(dim=0).expand(3, -1)) < 5e-3


def test_a_layer_of_fewer_inputs_than_products_take_is_refused_when_it_is_told_to_round():
    """Not by its first call on a GPU."""
    layer = QuantizedLinear(weight_of("fp8", 64, 64))
    with pytest.raises(ValueError, match="activations: got 'fp8' for a weight of 64 inputs with padding, want None"):
        layer.activations = "fp8"
    assert layer.activations is None
    with pytest.raises(ValueError, match="^1: activations: got 'fp8' for a weight of 64 inputs"):
        quantize_model(nn.Sequential(nn.ReLU(), nn.Linear(64, 64, dtype=BF16)), format="fp8", activations="fp8")
    QuantizedLinear(weight_of("fp8", 64, 65)).activations = "fp8"


def test_a_models_report_says_which_products():
    model = nn.Sequential(nn.Linear(128, 64, dtype=BF16))
    quantize_model(model, format="fp8", activations="fp8")
    assert vars(model)["quantization_report"].quantized[0].note == "FP8 by rows, FP8 products as asked"
    layer = model[0]
    assert isinstance(layer, QuantizedLinear) and layer.activations == "fp8"
    with pytest.raises(ValueError, match="activations: got 'fp4', want None"):
        quantize_model(nn.Sequential(nn.Linear(64, 64)), activations="fp4")  # pyright: ignore[reportArgumentType]
