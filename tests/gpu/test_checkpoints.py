"""Layers and models of checkpoints on a GPU: shifts, negative scales, directories that become running models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import QuantizedLinear, quantize_weight, quantized_linear
from cute_kernels.integrations.checkpoints import load_model
from tests.integrations.checkpoints import test_model

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
