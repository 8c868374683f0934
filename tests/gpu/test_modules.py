"""`QuantizedLinear` and models of such layers on a GPU: moved, loaded, cast, compiled, captured in CUDA graphs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cute_kernels import QuantizedLinear, quantize_model, quantized_linear
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_one_graph_serves, assert_replays, captured, compiled
from tests.gpu.linear_forms import (
    BF16,
    EVERY_ROWS,
    FORMS,
    MORE_ROWS,
    ROWS,
    Form,
    K,
    N,
    all_forms,
    exact,
    multiply_all,
    numbers,
)
from tests.gpu.specs import products_needed_by
from tests.gpu.test_linear import CUDA, TOLERANCE, assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

MODEL_TOLERANCE = 1.2e-2  # of the largest result, with five roundings to bf16 one after the other
DENSE = ((4, 128, False), (8, None, True))  # bits, group, zero points of what is quantised here
dense_forms = pytest.mark.parametrize("bits, group, zero", DENSE)
CAST = ("act-order", "awq")


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        multiply_all([*FORMS.values(), *(FORMS[name].cast for name in CAST)])
        for bits, group, zero in DENSE:
            model = quantised_mlp(bits, group, zero, device="cpu")  # whose gate is all that other layers made here are
            for m in EVERY_ROWS:
                model(numbers(m, K, device="cpu"))

    return products_needed_by(work)


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


# -- QuantizedLinear ---------------------------------------------------------------------------------------------------


def layer_of(form: Form, seed: int = 0, device: str = CUDA) -> QuantizedLinear:
    """Made on the CPU and moved."""
    bias = torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(form.dtype)
    return QuantizedLinear(form.pack("cpu", seed), bias).to(device)


def dense_layer(n: int, k: int, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, dtype=BF16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5)
    return layer


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours)


@all_forms
def test_a_layer_moved_to_the_gpu_is_linear_with_its_weight(form):
    layer, on_cpu = layer_of(form), layer_of(form, device="cpu")
    assert {tensor.device.type for tensor in layer.buffers()} == {"cuda"}
    for m in ROWS:
        x = numbers(m, K, dtype=form.dtype, seed=m)
        assert torch.equal(layer(x), quantized_linear(x, form.pack(), layer.bias))
        wanted = exact(x.cpu(), on_cpu.weight, bias=on_cpu.bias)
        assert_near(layer(x).cpu(), wanted, TOLERANCE[form.dtype])


@all_forms
@pytest.mark.parametrize("shape", [(2, 8), (1, 1), (4, 5, 5), ()], ids=str)
def test_a_layer_takes_inputs_of_any_dimensions(form, shape):
    layer, x = layer_of(form), numbers(math.prod(shape), K, dtype=form.dtype)
    found = layer(x.view(*shape, K))
    assert found.shape == (*shape, N) and torch.equal(found.view(-1, N), layer(x))


@pytest.mark.parametrize("layout", ["columns apart", "rows apart", "off 16 bytes", "transposed"])
def test_a_layer_takes_inputs_of_any_strides(layout):
    layer, x = layer_of(FORMS["w4"]), numbers(16, K)
    given = {
        "columns apart": lambda: torch.stack([x, x], -1)[..., 0],
        "rows apart": lambda: torch.cat([x, x], 1)[:, :K],
        "off 16 bytes": lambda: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(16, K),
        "transposed": lambda: x.view(2, 8, K).transpose(0, 1).contiguous().transpose(0, 1),
    }[layout]()
    assert torch.equal(layer(given).reshape(16, N), layer(x))


@dense_forms
def test_layers_quantised_on_the_gpu_are_those_quantised_on_the_cpu(bits, group, zero):
    dense = dense_layer(N, K)
    moved = QuantizedLinear.from_linear(dense, bits, group, zero).to(CUDA)
    put = QuantizedLinear.from_linear(dense, bits, group, zero, device=CUDA)
    made = QuantizedLinear.from_linear(copy.deepcopy(dense).to(CUDA), bits, group, zero)
    assert_same_state(put, moved)
    assert_same_state(made, moved)
    x = numbers(8, K)
    assert torch.equal(put(x), moved(x)) and torch.equal(made(x), moved(x))
    error = (made(x) - functional.linear(x, dense.weight.to(CUDA))).float().norm()
    assert error <= (0.15 if bits == 4 else 0.02) * made(x).float().norm()


@all_forms
def test_state_comes_back_through_a_safetensors_file(form, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    layer, x = layer_of(form), numbers(8, K, dtype=form.dtype)
    files.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    for other in (layer_of(form, seed=1), layer_of(FORMS["both"], seed=1)):
        assert other.weight.dtype != form.dtype or not torch.equal(other(x), layer(x))
        other.load_state_dict(files.load_file(tmp_path / "layer.safetensors"))
        assert {tensor.device.type for tensor in other.buffers()} == {"cuda"}
        assert torch.equal(other(x), layer(x))


@all_forms
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_without_data_takes_on_the_gpus(form, assign):
    layer, x = layer_of(form), numbers(8, K, dtype=form.dtype)
    other = layer_of(form, seed=1).to("meta")
    assert other(x.to("meta")).is_meta
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(other(x), layer(x))
    assert (other.codes.data_ptr() == layer.codes.data_ptr()) == assign


@pytest.mark.parametrize("name", CAST)
def test_a_layer_whose_dtype_was_changed_takes_that(name):
    form = FORMS[name]
    cast, layer = form.cast.dtype, layer_of(form)
    x = numbers(8, K, dtype=form.dtype)
    layer(x)  # what is kept of this call is not for the next
    layer.to(cast)
    on_cpu = layer_of(form, device="cpu").to(cast)
    found = layer(x.to(cast))
    assert found.dtype == cast
    assert_near(found.cpu(), exact(x.cpu().to(cast), on_cpu.weight, bias=on_cpu.bias), TOLERANCE[cast])
    with pytest.raises(TypeError, match=f"x: got dtype {form.dtype}, want {cast}"):
        layer(x)
    with pytest.raises(TypeError, match="scales: got dtype torch.float32, want torch.bfloat16 or torch.float16"):
        layer.float()(x.float())


def test_inputs_elsewhere_are_refused_by_name():
    layer, x = layer_of(FORMS["w4"]), numbers(8, K)
    layer(x)
    with pytest.raises(ValueError, match="x: got a tensor on cpu, want it on cuda:0, where the weight is"):
        layer(x.cpu())
    with pytest.raises(ValueError, match="x: got a tensor on cuda:0, want it on cpu, where the weight is"):
        layer.cpu()(x)


@all_forms
def test_a_compiled_layer_is_the_eager_one(form):
    layer = layer_of(form)
    step = compiled(layer)
    for m in ROWS:
        x = numbers(m, K, dtype=form.dtype, seed=m)
        assert torch.equal(step(x), layer(x))
    assert_one_graph_serves(layer, [(numbers(m, K, dtype=form.dtype, seed=m),) for m in MORE_ROWS], marks=False)


@all_forms
@pytest.mark.parametrize("m", ROWS)
def test_a_captured_layer_takes_new_inputs(form, m):
    layer = layer_of(form)
    inputs = [(numbers(m, K, dtype=form.dtype, seed=seed),) for seed in range(3)]
    for call in (layer, compiled(layer)):
        assert_replays(call, [inputs[0][0].clone()], inputs[1:])


def test_a_captured_layer_takes_weights_that_are_loaded_later():
    layer, other = layer_of(FORMS["w4"]), layer_of(FORMS["w4"], seed=1)
    x = numbers(8, K)
    graph, out = captured(layer, [x])
    layer.load_state_dict(other.state_dict())
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, other(x))


# -- quantize_model ----------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Llama's RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=BF16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Mlp(nn.Module):
    """Llama's, with the norm before and the residual after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(K)
        self.gate, self.up, self.down = dense_layer(N, K, 1), dense_layer(N, K, 2), dense_layer(K, N, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def quantised_mlp(bits: int, group: int | None, zero: bool, device: str = CUDA) -> nn.Module:
    """Quantised on the CPU and moved."""
    return quantize_model(Mlp(), bits=bits, group_size=group, zero_point=zero).to(device)


@dense_forms
def test_models_quantised_on_the_gpu_are_those_quantised_on_the_cpu(bits, group, zero):
    moved, told = quantised_mlp(bits, group, zero), []
    options: dict[str, Any] = {"bits": bits, "group_size": group, "zero_point": zero}
    made = quantize_model(Mlp().to(CUDA), **options, progress=lambda *step: told.append(step))
    put = quantize_model(Mlp(), **options, device=CUDA).to(CUDA)
    assert told == [("gate", 1, 3), ("up", 2, 3), ("down", 3, 3)]
    for model in (made, put):
        assert_same_state(model, moved)
        for m in ROWS:
            assert torch.equal(model(numbers(m, K, seed=m)), moved(numbers(m, K, seed=m)))


@dense_forms
def test_a_model_computes_what_its_dequantised_weights_do(bits, group, zero):
    model, dense = quantised_mlp(bits, group, zero), Mlp().double()
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            layer: Any = model.get_submodule(name)
            dense.get_parameter(f"{name}.weight").copy_(layer.weight.dequantize(torch.float64))
        for m in ROWS:
            x = numbers(m, K, seed=m)
            assert_near(model(x).cpu(), dense(x.cpu().double()), MODEL_TOLERANCE)


@dense_forms
def test_a_compiled_model_is_the_eager_one(bits, group, zero):
    model = quantised_mlp(bits, group, zero)
    step = compiled(model)
    for m in ROWS:
        x = numbers(m, K, seed=m)
        assert torch.equal(step(x), model(x))
    assert_one_graph_serves(model, [(numbers(m, K, seed=m),) for m in MORE_ROWS], marks=True)


@dense_forms
@pytest.mark.parametrize("m", ROWS)
def test_a_captured_model_takes_new_inputs(bits, group, zero, m):
    model = quantised_mlp(bits, group, zero)
    for call in (model, compiled(model)):
        assert_replays(call, [numbers(m, K)], [(numbers(m, K, seed=seed),) for seed in (1, 2)])
