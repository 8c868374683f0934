"""What holds of INT4 layers holds of every format that has a name, and of floating zero points: tensor-parallel parts,
adapters, batch invariance, saved models; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cute_kernels import QuantizedLinear, grouped_linear, quantize_experts, quantize_model, quantized_linear
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import slice_inputs, slice_outputs

NAMED = ("mxfp4", "nvfp4", "fp8", "fp8_block", "fp8_block_e8m0", "mxfp8", "w4f_g64", "w8f_g32")
BF16 = torch.bfloat16
N, K = 200, 416  # tails of tiles, blocks and groups
every_format = pytest.mark.parametrize("name", NAMED)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def layer_of(name: str) -> QuantizedLinear:
    dense = nn.Linear(K, N, dtype=BF16)
    dense.weight.data, dense.bias.data = numbers(N, K, seed=1), numbers(N, seed=2)
    return QuantizedLinear.from_linear(dense, format=name)


@every_format
def test_rows_with_a_single_1_are_the_weights(name):
    weight = layer_of(name).weight
    assert torch.equal(quantized_linear(torch.eye(K, dtype=BF16), weight), weight.dequantize().T)


@every_format
def test_shares_of_ranks_are_the_layer(name):
    """Cut where groups and tiles end and where they do not; FP4 with scales of 16 or 32 inputs at those alone."""
    weight, x = layer_of(name).weight, numbers(3, K)
    whole = quantized_linear(x, weight, out_dtype=torch.float32)
    columns = [quantized_linear(x, slice_outputs(weight, *cut), out_dtype=torch.float32) for cut in ((0, 77), (77, N))]
    cuts = ((0, 192), (192, K)) if weight_format(name).group_size else ((0, 100), (100, K))
    parts = [quantized_linear(x[:, a:b], slice_inputs(weight, a, b), out_dtype=torch.float32) for a, b in cuts]
    for found in (torch.cat(columns, dim=1), sum(parts)):
        assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


@every_format
def test_an_adapter_has_the_gradient_of_the_dense_layer(name):
    layer, x, of_y = layer_of(name), numbers(2, 5, K), numbers(2, 5, N, seed=3)
    down, up = (numbers(*shape, seed=4).requires_grad_() for shape in ((4, K), (N, 4)))
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    dense = layer.weight.dequantize()
    assert layer.bias is not None
    (layer(found) + found @ down.T @ up.T).backward(of_y)
    own = [tensor.grad for tensor in (down, up)]
    down.grad = up.grad = None
    (wanted @ dense.T + layer.bias + wanted @ down.T @ up.T).backward(of_y)
    for ours, theirs in zip([found.grad, *own], [wanted.grad, down.grad, up.grad], strict=True):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs.double()).norm() <= 0.01 * theirs.double().norm()


@every_format
def test_a_row_is_the_same_in_every_batch(name):
    weight, x = layer_of(name).weight, numbers(40, K)
    whole = quantized_linear(x, weight, batch_invariant=True)
    experts = quantize_experts(torch.stack([numbers(N, K, seed=1), numbers(N, K, seed=5)]), format=name)
    offsets = torch.tensor([0, 25, 40], dtype=torch.int32)
    grouped = grouped_linear(x, experts, offsets, batch_invariant=True)
    for row in (0, 7, 39):
        one = x[row : row + 1]
        assert torch.equal(quantized_linear(one, weight, batch_invariant=True)[0], whole[row])
        alone = grouped_linear(one, experts, (offsets > row).int(), batch_invariant=True)
        assert torch.equal(alone[0], grouped[row])


@every_format
def test_a_saved_model_comes_back(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from cute_kernels.integrations.checkpoints import load_model
    from cute_kernels.integrations.transformers import accelerate
    from tests.integrations.llamas import small_llama

    model: Any = small_llama(hidden_size=128, intermediate_size=96, head_dim=64)
    quantize_model(model, format=name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert isinstance(loaded, transformers.PreTrainedModel)
    found, wanted = loaded.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    form = weight_format(name)
    layers = [layer for layer in loaded.modules() if isinstance(layer, QuantizedLinear)]
    assert layers and {layer.weight_format for layer in layers} == {form}
    notes = {layer.note for layer in model.quantization_report.quantized}
    assert notes == {f"{form.title}, 16-bit products"}
    said = str(accelerate(model, weights=None))
    assert f"Linear: {form.title}, 16-bit products" in said and "left: Embedding model.embed_tokens" in said
