"""QuantizedLinear and quantize_model: the layer, its state dict, and what is swapped."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from cute_kernels import PackedWeight, QuantizedLinear, quantize_model, quantize_weight, quantized_linear
from cute_kernels.formats.weights import ShiftedFormat, integers
from cute_kernels.gemm import call as linear_call
from tests.linear.cases import known
from tests.observed import calls_of

BF16, FP16 = torch.bfloat16, torch.float16


def dense_layer(n: int = 70, k: int = 100, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias, dtype=BF16)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_linear_with_the_quantised_weight(bits, bias):
    dense, x = dense_layer(bias=bias), numbers(3, 100)
    layer = QuantizedLinear.from_linear(dense, bits, 64, zero_point=True)
    assert torch.equal(layer(x), quantized_linear(x, quantize_weight(dense.weight, bits, 64, True), dense.bias))
    error = (layer(x) - dense(x)).float().norm() / dense(x).float().norm()
    assert error < (0.15 if bits == 4 else 0.02)
    assert isinstance(layer.weight, PackedWeight) and layer.weight.codes is layer.codes
    assert not list(layer.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_its_state_comes_back_through_a_safetensors_file(tmp_path, bias):
    layer = QuantizedLinear.from_linear(dense_layer(bias=bias), 4, 32, zero_point=True)
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    names = {"codes", "scales", "zeros", "format"} | ({"bias"} if bias else set())
    assert layer.state_dict().keys() == names
    other = QuantizedLinear.from_linear(dense_layer(bias=bias, seed=1), 4, 32, zero_point=True)
    result = other.load_state_dict(safetensors.torch.load_file(tmp_path / "layer.safetensors"))
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(other(numbers(3, 100)), layer(numbers(3, 100)))


def test_loading_takes_on_the_format_that_is_loaded():
    perm = torch.randperm(100)
    loaded = QuantizedLinear(known(70, 100, 8, 64).pack(perm=perm, input_scale=torch.ones(100).bfloat16()))
    layer = QuantizedLinear(known(70, 100, 4, 32, True).pack())
    layer.load_state_dict(loaded.state_dict())
    assert (layer.bits, layer.group_size, layer.zeros) == (8, 64, None)
    assert torch.equal(layer(numbers(3, 100)), loaded(numbers(3, 100)))


def test_loading_copies_into_the_tensors_that_are_there_unless_it_is_told_to_assign():
    loaded, layer = (QuantizedLinear.from_linear(dense_layer(seed=seed)) for seed in (1, 2))
    codes = layer.codes
    layer.load_state_dict(loaded.state_dict())
    assert layer.codes is codes and torch.equal(codes, loaded.codes)
    layer.load_state_dict(QuantizedLinear.from_linear(dense_layer(seed=1), 8).state_dict())
    assert layer.codes is not codes and torch.equal(codes, loaded.codes)
    layer.load_state_dict(loaded.state_dict(), assign=True)
    assert layer.codes.data_ptr() == loaded.codes.data_ptr()


def test_a_model_loads_as_a_whole_onto_meta_or_real_layers():
    model = quantize_model(nn.Sequential(dense_layer(), nn.ReLU(), dense_layer(100, 70)), group_size=32)
    x = numbers(3, 100)
    for place in ("cpu", "meta"):
        other = quantize_model(nn.Sequential(dense_layer(seed=2), nn.ReLU(), dense_layer(100, 70, seed=3))).to(place)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))


def test_loading_that_is_not_strict_takes_what_is_there():
    layer = QuantizedLinear.from_linear(dense_layer(seed=5), 8)
    kept = layer.bias
    state = bad_state(bias=None, qweight=torch.zeros(1))
    result = layer.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["qweight"])
    assert layer.bits == 4 and torch.equal(layer.codes, state["codes"]) and layer.bias is kept
    assert layer.load_state_dict({"bias": kept}, strict=False).missing_keys == ["codes", "scales", "format"]
    with pytest.raises(RuntimeError, match='Missing key.*"bias"'):
        layer.load_state_dict(bad_state(bias=None))
    with pytest.raises(RuntimeError, match='Unexpected key.*"qweight"'):
        layer.load_state_dict(bad_state(qweight=torch.zeros(1)))


def bad_state(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = {**QuantizedLinear.from_linear(dense_layer(), 4, 64).state_dict(), **changes}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (bad_state(scales=None), 'Missing key.*"scales"'),
        (bad_state(scales=torch.zeros(2, 3, 64).half()), r"scales: got shape \[2, 3, 64\], want \[2, 2, 64\]"),
        (bad_state(bias=torch.zeros(71)), r"bias: got torch.float32 \[71\], want a floating \[70\]"),
        (
            known(64, 100).pack().state_dict() | {"bias": torch.zeros(64)},
            r"format: got a weight \[64, 100\], want \[70",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_reported_by_name_and_changes_nothing(state, message):
    layer = QuantizedLinear.from_linear(dense_layer(seed=5), 8, 32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    after = layer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_it_can_be_copied_moved_and_cast():
    layer = QuantizedLinear.from_linear(dense_layer())
    assert torch.equal(copy.deepcopy(layer)(numbers(2, 100)), layer(numbers(2, 100)))
    assert layer.to(FP16)(numbers(2, 100).half()).dtype == FP16
    with pytest.raises(TypeError, match="scales: got dtype torch.float32, want torch.bfloat16 or torch.float16"):
        layer.float()(numbers(2, 100).float())


def test_it_says_what_it_is():
    text = repr(QuantizedLinear.from_linear(dense_layer(), 4, None, zero_point=True))
    assert "in_features=100, out_features=70, bias=True, bits=4, group_size=None, torch.bfloat16, with zeros" in text


def test_whether_rows_may_depend_on_each_other_is_passed_on():
    layer = QuantizedLinear.from_linear(dense_layer())
    assert not layer.batch_invariant and "batch_invariant" not in repr(layer)
    layer.batch_invariant = True
    assert copy.deepcopy(layer).batch_invariant and "with batch_invariant" in repr(layer)
    assert not any("invariant" in name for name in layer.state_dict())
    with calls_of(linear_call.check) as calls:
        layer(numbers(2, 100))
    assert [call.arguments["call"].batch_invariant for call in calls] == [True]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("has", ["nothing", "perm", "input_scale", "shifts", "perm and shifts"])
def test_the_inputs_of_a_layer_have_the_gradient_of_its_dense_weight(compiled, has):
    torch.compiler.reset()
    weight, shifts = known(70, 96, group_size=32).pack(), None
    if "perm" in has:
        perm = torch.randperm(96, generator=torch.Generator().manual_seed(1)).int()
        weight = replace(weight, perm=perm)
    if has == "input_scale":
        weight = replace(weight, input_scale=numbers(96).abs() + 0.5)
    if "shifts" in has:
        shifts = numbers(70, 3).float()
    layer = QuantizedLinear(weight, numbers(70), shifts)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, of_y = numbers(2, 3, 96).requires_grad_(), numbers(2, 3, 70).flip(0)
    y = call(x)
    y.backward(of_y)
    assert torch.equal(y.detach(), layer(x.detach())) and x.grad is not None
    identity = torch.eye(96, dtype=BF16)
    dense = QuantizedLinear(weight, None, shifts)(identity).double().T
    want = of_y.double() @ dense
    assert (x.grad.double() - want).norm() <= 0.02 * want.norm()
    with torch.no_grad():
        assert not call(x).requires_grad


def test_results_of_functions_never_require_a_gradient():
    layer = QuantizedLinear.from_linear(dense_layer())
    x = numbers(2, 100).requires_grad_()
    bias, residual = (numbers(*shape).requires_grad_() for shape in ((70,), (2, 70)))
    assert not quantized_linear(x, layer.weight, bias, residual=residual).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["scales", "input_scale"])
def test_a_weights_tensors_give_results_no_gradient(name, compiled):
    torch.compiler.reset()
    weight = replace(known(70, 64).pack(), input_scale=torch.ones(64, dtype=BF16))
    weight = replace(weight, **{name: getattr(weight, name).clone().requires_grad_()})

    def layer(x):
        return quantized_linear(x, weight)

    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    assert not call(numbers(2, 64)).requires_grad


def test_it_compiles_without_graph_breaks():
    torch.compiler.reset()
    model = quantize_model(nn.Sequential(dense_layer(), nn.SiLU(), dense_layer(100, 70)), zero_point=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(numbers(3, 100)), model(numbers(3, 100)))


# -- quantize_model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_encoder_layers_of_torch_go_without_their_fused_kernel(nested):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=BF16)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = numbers(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        exact = model(x, src_key_padding_mask=mask)
        result = quantize_model(model, bits=8)(x, src_key_padding_mask=mask)
    assert isinstance(model.layers[0].linear1, QuantizedLinear)
    assert (result - exact)[~mask].norm() < 0.02 * exact[~mask].norm()


class Special(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(dense_layer(64, 64), nn.ReLU()) for _ in range(2))
        self.shared = self.layers[0][0]  # type: ignore[index]
        self.special = Special(64, 64, dtype=BF16)
        self.lm_head = dense_layer(64, 64, bias=False)


def test_linear_layers_are_swapped_in_place_and_progress_is_told():
    model, told = Model(), []
    kept = model.lm_head, model.special
    assert quantize_model(model, bits=8, group_size=64, progress=lambda *step: told.append(step)) is model
    quantised = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert quantised == {"layers.0.0", "layers.1.0"}
    assert (model.lm_head, model.special) == kept and model.shared is model.layers[0][0]  # type: ignore[index]
    assert told == [("layers.0.0", 1, 2), ("layers.1.0", 2, 2)]
    assert isinstance(model.shared, QuantizedLinear) and (model.shared.bits, model.shared.group_size) == (8, 64)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_all_new_layers_are_batch_invariant_or_none_is(batch_invariant):
    model = quantize_model(Model(), batch_invariant=batch_invariant)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert [layer.batch_invariant for layer in layers] == [batch_invariant] * 2


@pytest.mark.parametrize(
    ("skip", "swapped"),
    [((), {"layers.0.0", "layers.1.0", "lm_head"}), (("layers.*",), {"lm_head"}), (("0", "lm_*"), set())],
)
def test_skip_takes_patterns_of_names(skip, swapped):
    model = Model()
    del model.shared
    quantize_model(model, skip=skip)
    assert {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)} == swapped


def test_a_layer_that_cannot_be_quantised_is_named():
    model = Model()
    model.layers[1][0].weight.data[3, 4] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match="^layers.1.0: w: got NaN or infinite values"):
        quantize_model(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_model(dense_layer()), "model: got an nn.Linear itself"),
        (lambda: quantize_model(Model(), skip="lm_head"), "skip: got 'lm_head', want a sequence of names"),
        (
            lambda: quantize_model(Model(), skip=("lm_haed",)),
            "skip: got 'lm_haed', which names no layer .*such as lm_head",
        ),
        (
            lambda: quantize_model(Model(), skip=("layers.0", "*.mlp.*")),
            r"skip: got '\*.mlp.\*', which names no layer of M",
        ),
        (lambda: quantize_model(Model(), batch_invariant=1), "batch_invariant: got 1, want True or False"),  # type: ignore
        (lambda: QuantizedLinear(torch.zeros(4, 4)), "weight: got Tensor, want a PackedWeight"),  # type: ignore[arg-type]
        (lambda: QuantizedLinear.from_linear(nn.ReLU()), "linear: got ReLU, want an nn.Linear"),  # type: ignore[arg-type]
        (lambda: QuantizedLinear(known(70, 64).pack(), torch.zeros(64)), r"bias: got torch.float32 \[64\], want a"),
        (
            lambda: QuantizedLinear(known(64, 64, dtype=FP16).pack(), torch.full((64,), 1e6)),
            "bias: got values beyond torch.float16, that of the weight's scales",
        ),
        (lambda: QuantizedLinear.from_linear(dense_layer().to("meta")), "w: got a tensor without data"),
    ],
)
def test_what_makes_no_layer_is_refused_by_name(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


# -- shifts: zero points that are no integers --------------------------------------------------------------------------


def with_shifts(k: int = 100, group: int | None = 32, zeros: bool = False, **options) -> tuple[Any, torch.Tensor]:
    """A weight of integers, shifts that bf16 has, and W of both in fp64."""
    torch.manual_seed(3)
    weight = known(70, k, 4, group, zero_point=zeros).pack(**options)
    shifts = (0.02 * torch.randn(70, -(-k // (group or k)))).bfloat16().float()
    by_input = shifts.double().repeat_interleave(group or k, dim=1)[:, :k]
    if weight.perm is not None:
        by_input = torch.empty_like(by_input).index_copy_(1, weight.perm.long(), by_input)
    return (weight, shifts), weight.dequantize(torch.float64) + by_input


@pytest.mark.parametrize("group", [16, 32, 64, None])
def test_shifts_become_floating_zero_points_of_the_weight(group):
    (weight, shifts), w = with_shifts(group=group)
    layer = QuantizedLinear(weight, None, shifts)
    assert isinstance(layer.weight_format, ShiftedFormat) and layer.zeros is None
    assert torch.equal(layer.weight.dequantize(torch.float64), w.float().double())
    assert torch.equal(layer(torch.eye(100, dtype=BF16)), w.bfloat16().T)  # rows with a single 1
    for shape in ((3, 100), (2, 3, 100), (0, 100), (100,)):
        x = numbers(*shape)
        want = x.double() @ w.bfloat16().double().T
        got = layer(x)
        assert got.shape == want.shape and (got.double() - want).norm() <= 4e-3 * want.norm()


def test_shifts_of_act_order_and_input_scales_are_of_what_the_kernel_multiplies():
    scale = (0.5 + torch.rand(100)).to(BF16)
    (weight, shifts), w = with_shifts(perm=torch.randperm(100), input_scale=scale)
    x, bias = numbers(3, 100), numbers(70)
    layer, want = QuantizedLinear(weight, bias, shifts), (x * scale).double() @ w.T + bias.double()
    assert (layer(x).double() - want).norm() <= 4e-3 * want.norm()


def test_shifts_beside_zero_points_are_added_to_them():
    (weight, shifts), w = with_shifts(zeros=True)
    assert weight.zeros is not None
    found = QuantizedLinear(weight, None, shifts).weight.dequantize(torch.float64)
    assert (found - w).abs().max() <= 2.0**-9 * w.abs().max()


def test_a_layer_with_shifts_comes_back_through_its_state_dict_and_compiles():
    (weight, shifts), _ = with_shifts()
    layer = QuantizedLinear(weight, numbers(70), shifts)
    other = QuantizedLinear.from_linear(dense_layer(), 8)
    other.load_state_dict(layer.state_dict())
    x = numbers(3, 100)
    assert torch.equal(other(x), layer(x)) and "w4f_g32" in repr(other)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))
    apart = QuantizedLinear(weight, layer.bias).state_dict() | {"shifts": shifts}  # as they once were saved
    other.load_state_dict(apart)
    assert torch.equal(other(x), layer(x))
    other.batch_invariant = True
    assert torch.equal(other(x)[:1], other(x[:1]))
    other.load_state_dict(QuantizedLinear.from_linear(dense_layer(), 8).state_dict())
    assert other.weight_format is integers(8, 128)


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        (torch.zeros(70, 3), r"shifts: got torch.float32 \[70, 3\], want a floating \[70, 4\]"),
        (torch.zeros(70, 4).int(), "shifts: got torch.int32"),
        (torch.full((70, 4), torch.inf), "shifts: got values that are not finite"),
        ("none", "shifts: got str"),
    ],
)
def test_shifts_that_do_not_fit_are_refused(shifts, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        QuantizedLinear(known(70, 100, 4, 32).pack(), None, shifts)
    with pytest.raises(ValueError, match="^shifts: got some beside a weight in the format e2m1_g32e8m0"):
        QuantizedLinear(quantize_weight(torch.ones(70, 100), format="mxfp4"), None, torch.zeros(70, 4))
