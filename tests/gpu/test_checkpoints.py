"""Layers and models of checkpoints on a GPU: floating zero points, negative scales, directories that become models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import QuantizedLinear, quantize_activations, quantize_weight, quantized_linear
from cute_kernels.gemm.experts import ClampedSwiglu, QuantizedRoutedExperts
from cute_kernels.gemm.operands.fp8 import dequantize_activations
from cute_kernels.gemm.operands.fp8_config import x_group
from cute_kernels.integrations.checkpoints import load_model, load_safetensors
from tests.integrations.checkpoints import test_float_codes, test_gpt_oss, test_model
from tests.moe import test_clamped

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
N, K = 320, 1024
TOLERANCE = {BF16: 4e-3, FP16: 1e-3}  # of an output's norm: roundings of W and of the result


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((found.double() - want).norm() <= TOLERANCE[found.dtype] * want.norm())


def shifted(dtype: torch.dtype) -> tuple[QuantizedLinear, torch.Tensor]:
    """A layer with shifts as HQQ's, and its W in fp64."""
    torch.manual_seed(0)
    packed = quantize_weight((0.02 * torch.randn(N, K)).to("cuda", dtype), 4, 64)
    shifts = 0.004 * torch.randn(N, K // 64, device="cuda")
    layer = QuantizedLinear(packed, torch.randn(N, device="cuda"), shifts)
    return layer, packed.dequantize(torch.float64) + shifts.double().repeat_interleave(64, dim=1)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m", [1, 7, 24, 200])
def test_shifts_are_added_to_what_the_kernel_multiplies(dtype, m):
    layer, w = shifted(dtype)
    x = torch.randn(m, K, dtype=dtype, device="cuda")
    assert layer.bias is not None and near(layer(x), x.double() @ w.T + layer.bias.double())


def test_a_layer_with_shifts_is_captured_in_a_graph():
    layer, _ = shifted(BF16)
    x = torch.randn(8, K, dtype=BF16, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 4, 12, 24, 64, 300])
def test_negative_scales_are_scales(bits, m):
    """AutoRound's symmetric weights have them."""
    torch.manual_seed(bits)
    packed = quantize_weight((0.02 * torch.randn(N, K)).to("cuda", BF16), bits, 128)
    sign = torch.where(torch.rand_like(packed.scales.float()) < 0.5, -1.0, 1.0).to(BF16)
    odd = replace(packed, scales=packed.scales * sign)
    x = torch.randn(m, K, dtype=BF16, device="cuda")
    assert near(quantized_linear(x, odd), x.double() @ odd.dequantize(torch.float64).T)


@pytest.mark.parametrize(("kind", "form"), [("llama", "awq"), ("mixtral", "gptq"), ("minimax", "compressed-tensors")])
def test_a_directory_becomes_a_model_on_the_gpu(tmp_path, kind, form):
    pytest.importorskip("transformers")
    test_model.write(tmp_path / "packed", test_model.MAKERS[kind](), form)
    here: Any = load_model(tmp_path / "packed")
    there: Any = load_model(tmp_path / "packed", device="cuda")
    ids = test_model.IDS
    with torch.no_grad():
        want, got = here(ids).logits.double(), there(ids.cuda()).logits.double().cpu()
    assert (got - want).norm() < 0.03 * want.norm()
    there.save_pretrained(tmp_path / "ours")
    again: Any = load_model(tmp_path / "ours", device="cuda")
    with torch.no_grad():
        assert torch.equal(again(ids.cuda()).logits.double().cpu(), got)


@pytest.mark.parametrize("form", list(test_float_codes.FORMATS))
def test_a_layer_of_floats_is_its_formula_of_inputs_as_declared(tmp_path, form):
    make, config = test_float_codes.FORMATS[form]
    tensors, want = make(torch.Generator().manual_seed(0), 200, 416)
    path = test_float_codes.write_layer(tmp_path, tensors, config)
    ((_, layer),) = load_safetensors(path, device="cuda", activations="16bit")
    ((_, declared),) = load_safetensors(path, device="cuda")
    assert isinstance(declared, QuantizedLinear)
    for m in (1, 7, 24, 200):
        x = torch.randn(m, 416, dtype=BF16, device="cuda")
        assert near(layer(x), x.double() @ want.cuda().double().T)
        if declared.activations is None:
            assert torch.equal(declared(x), layer(x))
            continue
        group = x_group(declared.weight_format)
        rounded = dequantize_activations(*quantize_activations(x, group, scale=declared.activation_scale), group)
        assert near(declared(x), rounded.double() @ want.cuda().double().T)


@pytest.mark.parametrize("count", [1, 4, 37, 300])
def test_experts_with_biases_are_their_formula_and_are_captured(count):
    gate_up, down, biases = test_clamped.layer()
    module = QuantizedRoutedExperts(gate_up, down, biases, ClampedSwiglu()).cuda()
    x, weights, ids = test_clamped.tokens(count)
    want = test_clamped.exact(x, weights, ids)
    on_gpu = [each.cuda() for each in (x, ids, weights)]
    assert near(module(*on_gpu), want.cuda())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(*on_gpu)
    on_gpu[1].copy_(ids.flip(0))
    graph.replay()
    assert near(y, test_clamped.exact(x, weights, ids.flip(0)).cuda())


def test_a_directory_of_gpt_oss_becomes_a_model_on_a_gpu(tmp_path):
    test_gpt_oss.hugging_face(tmp_path)
    on_cpu, on_gpu = load_model(tmp_path), load_model(tmp_path, device="cuda")
    calls = []
    for cpu_layer, gpu_layer in zip(on_cpu.model.layers, on_gpu.model.layers, strict=True):
        gpu_layer.mlp.experts.register_forward_hook(
            lambda _, given, result, experts=cpu_layer.mlp.experts: calls.append((experts, given, result))
        )
    with torch.no_grad():
        logits = on_gpu(test_model.IDS.cuda()).logits
        assert logits.isfinite().all() and len(calls) == len(on_cpu.model.layers)
        # Layer by layer, of the same inputs: what is rounded before a router decides which experts a token has.
        for experts, given, result in calls:
            want = experts(*(value.cpu() for value in given)).double()
            assert (result.cpu().double() - want).norm() < 0.01 * want.norm()
