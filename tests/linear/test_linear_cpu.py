"""linear on CPU tensors: against fp64 on the codes themselves, epilogues, the operator, and what is refused."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

import cute_kernels
import cute_kernels.gemm as package
from cute_kernels import rms_norm
from cute_kernels.gemm import linear_reference, quantize_weight, quantized_linear
from tests.linear.cases import GROUPS, known

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 3e-3, FP16: 6e-4, FP32: 1e-6}


def numbers(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_it_multiplies_with_the_dequantised_weight(dtype, bits, zero_point, group_size):
    case, x = known(70, 300, bits, group_size, zero_point, dtype), numbers(5, 300, dtype=dtype)
    assert relative_error(quantized_linear(x, case.pack()), x.double() @ case.dense.T) < TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
def test_one_hot_inputs_return_the_dequantised_weights_exactly(bits, zero_point):
    case = known(70, 100, bits, 32, zero_point)
    got = quantized_linear(torch.eye(100, dtype=BF16), case.pack())
    assert torch.equal(got, case.dense.to(BF16).T)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (2, 0, 3)])
def test_any_leading_shape(shape):
    case, x = known(70, 64), numbers(*shape, 64)
    got = quantized_linear(x, case.pack())
    assert got.shape == (*shape, 70) and got.dtype == BF16
    assert got.numel() == 0 or relative_error(got, x.double() @ case.dense.T) < TOLERANCE[BF16]


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
def test_rows_of_a_batch_invariant_product_are_those_of_each_by_itself(activation):
    """Bit for bit, also where vectors of a function end within a row."""
    packed, x, bias = known(70, 300).pack(), numbers(37, 300), numbers(70, seed=3)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.float32}
    options["batch_invariant"] = True
    whole = quantized_linear(x, packed, **options)
    for part in (slice(5, 6), slice(3, 12), slice(36, 37)):
        assert torch.equal(quantized_linear(x[part], packed, **options), whole[part])


def test_batch_invariance_is_an_option_of_the_function_and_the_operator():
    packed, x = known(70, 64).pack(), numbers(5, 64)
    fields = (packed.codes, packed.scales, None, None, None, "w4_g32", 70, 64, None, BF16)
    operator = torch.ops.cute_kernels.weight_only_linear
    assert torch.equal(operator(x, *fields, True), quantized_linear(x, packed, batch_invariant=True))
    assert torch.equal(operator(x, *fields), quantized_linear(x, packed))


def test_strides_do_not_matter():
    packed, x = known(70, 64).pack(), numbers(64, 6, 4).permute(2, 1, 0)
    assert torch.equal(quantized_linear(x, packed), quantized_linear(x.contiguous(), packed))
    residual = numbers(70, 6, 4, seed=2).permute(2, 1, 0)
    assert torch.equal(
        quantized_linear(x, packed, residual=residual), quantized_linear(x, packed, residual=residual.contiguous())
    )


ACTIVATE = {
    None: lambda y: y,
    "silu": lambda y: y / (1 + (-y).exp()),
    "gelu": lambda y: y * (1 + torch.erf(y / math.sqrt(2))) / 2,
    "swiglu": lambda y: y[..., 0::2] / (1 + (-y[..., 0::2]).exp()) * y[..., 1::2],
}


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("out_dtype", [None, BF16, FP16, FP32])
def test_bias_then_activation_then_residual_in_fp32_rounded_once(activation, out_dtype):
    case, x, bias = known(70, 64), numbers(5, 64), numbers(70, seed=2)
    columns = 35 if activation == "swiglu" else 70
    residual = numbers(5, columns, dtype=out_dtype or BF16, seed=3)
    got = quantized_linear(x, case.pack(), bias, residual=residual, activation=activation, out_dtype=out_dtype)
    w = case.dense.to(BF16).double()
    want = ACTIVATE[activation](x.double() @ w.T + bias.double()) + residual.double()
    assert got.dtype == (out_dtype or BF16) and got.shape == (5, columns)
    assert torch.allclose(got.double(), want, rtol=torch.finfo(got.dtype).eps, atol=1e-5)


def test_inputs_are_scaled_then_permuted():
    perm, scale = torch.randperm(96, generator=torch.Generator().manual_seed(4)), 1 + numbers(96).abs()
    case, x = known(70, 96), numbers(5, 96)
    packed = case.pack(perm=perm, input_scale=scale)
    want = (x * scale).double() @ packed.dequantize(torch.float64).T
    assert relative_error(quantized_linear(x, packed), want) < TOLERANCE[BF16]
    assert relative_error(linear_reference(x, packed, compute_dtype=torch.float64), want) < TOLERANCE[BF16]


def test_products_are_in_fp32_under_autocast_too():
    packed, x = known(70, 64).pack(), numbers(5, 64)
    want = quantized_linear(x, packed, out_dtype=FP32)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(quantized_linear(x, packed, out_dtype=FP32), want)


def test_out_is_written_and_returned_and_may_be_the_residual():
    packed, x = known(70, 64).pack(), numbers(2, 3, 64)
    room = torch.full((2, 3, 70), float("nan"), dtype=FP16)
    assert quantized_linear(x, packed, out=room) is room
    assert torch.equal(room, quantized_linear(x, packed, out_dtype=FP16))
    hidden = numbers(2, 3, 70, seed=5)
    want = quantized_linear(x, packed, residual=hidden)
    assert torch.equal(quantized_linear(x, packed, residual=hidden, out=hidden), want)


def test_the_package_exports_what_does_not_have_its_own_name():
    assert cute_kernels.quantize_weight is quantize_weight
    assert cute_kernels.quantized_linear is quantized_linear and isinstance(package, ModuleType)


def test_out_is_not_x_which_kernels_read_while_they_write():
    packed, x = known(64, 64).pack(), numbers(5, 64)
    with pytest.raises(ValueError, match="^out: got memory that x takes too, want another tensor's"):
        quantized_linear(x, packed, out=x)
    nothing = x[:0]
    assert quantized_linear(nothing, packed, out=nothing) is nothing


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x a list": ({"x": [1.0]}, "x: got list, want a torch.Tensor"),
    "x in fp32": ({"x": torch.zeros(5, 64)}, "x: got dtype torch.float32, want torch.bfloat16, that of the weight's"),
    "x too wide": ({"x": numbers(5, 65)}, r"x: got shape \[5, 65\], want \[..., 64\]"),
    "x a number": ({"x": numbers()}, r"x: got shape \[\], want \[..., 64\]"),
    "x elsewhere": ({"x": numbers(5, 64).to("meta")}, "x: got a tensor on meta, want it on cpu, where the weight is"),
    "weight a tensor": ({"weight": torch.zeros(4, 4)}, "weight: got Tensor, want a PackedWeight"),
    "bias in fp32": ({"bias": torch.zeros(70)}, "bias: got dtype torch.float32, want torch.bfloat16"),
    "short bias": ({"bias": numbers(69)}, r"bias: got shape \[69\], want \[70\]"),
    "bias with gaps": (
        {"bias": numbers(140)[::2]},
        r"bias: got strides \(2,\) for shape \[70\], want a contiguous tensor",
    ),
    "bias a list": ({"bias": [0.0]}, "bias: got list, want a torch.Tensor"),
    "residual of another shape": ({"residual": numbers(70)}, r"residual: got shape \[70\], want \[5, 70\]"),
    "residual of another dtype": (
        {"residual": numbers(5, 70), "out_dtype": FP32},
        "residual: got dtype torch.bfloat16, want torch.float32",
    ),
    "whole residual with swiglu": (
        {"residual": numbers(5, 70), "activation": "swiglu"},
        r"residual: got shape \[5, 70\], want \[5, 35\]",
    ),
    "activation": ({"activation": "relu"}, "activation: got 'relu', want None, 'silu', 'gelu', 'swiglu'"),
    "batch_invariant": ({"batch_invariant": 1}, "batch_invariant: got 1, want True or False"),
    "out_dtype": ({"out_dtype": torch.int8}, "out_dtype: got torch.int8, want None or one of"),
    "out of another shape": ({"out": numbers(5, 71)}, r"out: got shape \[5, 71\], want \[5, 70\]"),
    "out of another dtype": ({"out": numbers(5, 70), "out_dtype": FP32}, "out: got dtype torch.bfloat16, want"),
    "out a list": ({"out": [0.0]}, "out: got list, want a torch.Tensor"),
    "out in fp64": ({"out": numbers(5, 70).double()}, "out: got dtype torch.float64, want one of torch.bfloat16"),
    "out with gaps": ({"out": numbers(5, 140)[:, ::2]}, "out: got strides .* want a contiguous tensor"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_arguments_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        quantized_linear(**({"x": numbers(5, 64), "weight": known(70, 64).pack()} | changes))


def test_swiglu_wants_an_even_number_of_rows():
    with pytest.raises(ValueError, match="^activation: got 'swiglu' for a weight of 71 rows, want an even number"):
        quantized_linear(numbers(5, 64), known(71, 64).pack(), activation="swiglu")


# -- the operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_operator_passes_opcheck(rows, activation):
    packed = known(70, 64, 4, 32, True).pack()
    columns = 35 if activation else 70
    arguments = (numbers(rows, 64), packed.codes, packed.scales, packed.zeros, numbers(70), numbers(rows, columns))
    fields = (packed.format.key, *packed.shape, activation, BF16)
    torch.library.opcheck(torch.ops.cute_kernels.weight_only_linear.default, (*arguments, *fields))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_graph_breaks(dynamic):
    torch.compiler.reset()
    perm, scale = torch.arange(63, -1, -1), 1 + numbers(64).abs()
    packed, bias = known(70, 64).pack(perm=perm, input_scale=scale), numbers(70)

    def layer(x, residual):
        y = quantized_linear(x * 2, packed, bias, residual=residual, activation="silu")
        return quantized_linear(x, packed, out=torch.empty_like(y)) + y

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (5, 9):
        x, residual = numbers(2, rows, 64), numbers(2, rows, 70)
        torch.testing.assert_close(compiled(x, residual), layer(x, residual))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_is_that_of_rms_norm_before_the_product(compiled):
    packed, norm = known(70, 64).pack(), numbers(64)
    x = numbers(2, 3, 64)

    def product(x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, packed, norm=norm, norm_eps=1e-3, norm_offset=1.0)

    found = (torch.compile(product, fullgraph=True, backend="eager") if compiled else product)(x)
    assert torch.equal(found, quantized_linear(rms_norm(x, norm, eps=1e-3, weight_offset=1.0), packed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": torch.ones(65).bfloat16()}, r"norm: got shape \[65\], want \[64\]"),
        ({"norm": torch.ones(64).half()}, "norm: got dtype torch.float16, want torch.bfloat16 or torch.float32"),
        ({"norm": torch.ones(128).bfloat16()[::2]}, "norm: got strides"),
        ({"norm_eps": -1.0}, "norm_eps: got -1.0, want a finite number of at least 0"),
        ({"norm_offset": math.inf}, "norm_offset: got inf, want a finite number"),
    ],
)
def test_a_wrong_norm_is_refused_by_name(change, message):
    given = {"norm": torch.ones(64).bfloat16()} | change
    with pytest.raises((TypeError, ValueError), match=message):
        quantized_linear(numbers(3, 64), known(70, 64).pack(), **given)
