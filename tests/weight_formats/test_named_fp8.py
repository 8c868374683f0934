"""What holds of INT4 layers holds of products in FP8, folded ones too: tensor-parallel parts, adapters, batch
invariance, state dicts, saved models; on the CPU, whose reference rounds x as the kernels do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from cute_kernels import QuantizedLinear, fused_moe, grouped_linear, quantize_experts, quantize_model, quantized_linear
from cute_kernels.formats.weights import registered_formats, weight_format
from cute_kernels.gemm import slice_inputs, slice_outputs
from cute_kernels.gemm.experts.module import QuantizedRoutedExperts
from cute_kernels.gemm.operands.fp8 import fp8_rows
from cute_kernels.gemm.operands.fp8_config import check_activations, fp8_problem
from tests.weight_formats.test_named import K, N, layer_of, numbers

BF16, FP32 = torch.bfloat16, torch.float32
W4A8, W8A8 = ("mxfp4", "w4g128", "w4g32", "w4gchannel"), ("fp8", "fp8_block", "fp8_block_e8m0", "mxfp8")
FOLDED = ("mxfp4",)  # powers of two of groups, into the numbers
every_format = pytest.mark.parametrize("name", (*W8A8, *W4A8))


def rounding(name: str) -> QuantizedLinear:
    layer = layer_of(name)
    layer.activations = "fp8"
    return layer


def experts_of(name: str, seed: int) -> QuantizedRoutedExperts:
    gate_up, down = numbers(2, 192, K, seed=seed), numbers(2, K, 96, seed=seed)
    layer = QuantizedRoutedExperts(quantize_experts(gate_up, format=name), quantize_experts(down, format=name))
    layer.activations = "fp8"
    return layer


def test_these_are_all_the_formats_whose_products_may_be_in_fp8():
    names = {weight_format(name).codes_name for name in (*W8A8, *W4A8)}
    assert names == {form.codes_name for form in registered_formats() if fp8_problem(form) is None}
    decoders = {name: weight_format(name).e4m3_decoder() for name in (*W8A8, *W4A8)}
    assert {name for name, decoder in decoders.items() if decoder is not None and decoder.folds} == {*FOLDED}


def test_zero_points_which_products_in_fp8_would_ignore_are_refused():
    without: Any = weight_format("mxfp8")
    kind: Any = type("WithZeros", (type(without),), {"has_zeros": True})
    form = kind(**{field.name: getattr(without, field.name) for field in fields(without)})
    message = "activations: got 'fp8' for weights in .*, want None .*, or weights with no zero points"
    with pytest.raises(ValueError, match=message):
        check_activations("fp8", None, form)


@every_format
def test_shares_of_output_features_are_the_layer_bit_by_bit(name):
    weight, x = layer_of(name).weight, numbers(3, K)
    whole = quantized_linear(x, weight, activations="fp8", out_dtype=FP32)
    parts = [slice_outputs(weight, *cut) for cut in ((0, 77), (77, N))]
    found = torch.cat([quantized_linear(x, part, activations="fp8", out_dtype=FP32) for part in parts], dim=1)
    assert (found - whole).abs().max() <= 1e-6 * whole.abs().max()


@every_format
def test_shares_of_inputs_add_up_to_the_layer_that_rounds_each_share(name):
    """A rank's scale is that of its own inputs; a static one is the same for all, and so are the sums."""
    weight, x = layer_of(name).weight, numbers(3, K)
    cuts = ((0, 192), (192, K)) if weight.group_size else ((0, 140), (140, K))
    shares = [(x[:, a:b], slice_inputs(weight, a, b)) for a, b in cuts]
    found = sum(quantized_linear(own, part, activations="fp8", out_dtype=FP32) for own, part in shares)
    rounded = [fp8_rows(own, part.format).double() for own, part in shares]
    wanted = torch.cat(rounded, dim=1) @ weight.dequantize(torch.float64).T
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    options: dict[str, Any] = {"activations": "fp8", "activation_scale": torch.tensor(0.01), "out_dtype": FP32}
    whole = quantized_linear(x, weight, **options)
    found = sum(quantized_linear(own, part, **options) for own, part in shares)
    assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_share_whose_groups_are_too_small_for_fp8_says_so():
    weight = slice_inputs(layer_of("w4g128").weight, 208, K)
    assert weight.group_size == 16
    with pytest.raises(ValueError, match=r"activations: got 'fp8' for weights in w4g16, want .* groups of at least 32"):
        quantized_linear(numbers(3, K - 208), weight, activations="fp8")


@every_format
def test_an_adapter_beside_a_layer_has_the_gradient_of_the_dense_layer(name):
    """Rounding passes gradients on as they are."""
    layer, x, of_y = rounding(name), numbers(2, 5, K), numbers(2, 5, N, seed=3)
    down, up = (numbers(*shape, seed=4).requires_grad_() for shape in ((4, K), (N, 4)))
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    own = layer(found)
    assert torch.equal(own, layer(x)) and not torch.equal(own, layer_of(name)(x))
    (own + found @ down.T @ up.T).backward(of_y)
    grads = [found.grad, down.grad, up.grad]
    down.grad = up.grad = None
    (wanted @ layer.dequantize().T + wanted @ down.T @ up.T).backward(of_y)
    for ours, theirs in zip(grads, [wanted.grad, down.grad, up.grad], strict=True):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs.double()).norm() <= 0.01 * theirs.double().norm()


@every_format
def test_a_row_is_the_same_in_every_batch(name):
    options: dict[str, Any] = {"batch_invariant": True, "activations": "fp8"}
    weight, x = layer_of(name).weight, numbers(40, K)
    whole = quantized_linear(x, weight, **options)
    experts = quantize_experts(torch.stack([numbers(N, K, seed=1), numbers(N, K, seed=5)]), format=name)
    down = quantize_experts(torch.stack([numbers(K, N // 2, seed=6), numbers(K, N // 2, seed=7)]), format=name)
    offsets, ids = torch.tensor([0, 25, 40], dtype=torch.int32), torch.arange(40).remainder(2)[:, None]
    grouped, shares = grouped_linear(x, experts, offsets, **options), torch.ones(40, 1)
    layer = fused_moe(x, experts, down, shares, ids, **options)
    for row in (0, 7, 39):
        one, own = x[row : row + 1], slice(row, row + 1)
        assert torch.equal(quantized_linear(one, weight, **options)[0], whole[row])
        assert torch.equal(grouped_linear(one, experts, (offsets > row).int(), **options)[0], grouped[row])
        assert torch.equal(fused_moe(one, experts, down, shares[own], ids[own], **options)[0], layer[row])


@every_format
def test_a_layer_computes_the_same_from_its_state_dict(name):
    layer, x = rounding(name), numbers(3, K)
    other = QuantizedLinear.from_linear(nn.Linear(K, N, dtype=BF16), format="w4g128")
    other.activations = "fp8"
    other.load_state_dict(layer.state_dict())
    assert other.weight_format is layer.weight_format and torch.equal(other(x), layer(x))
    experts, into = experts_of(name, 1), experts_of("w4g128", 2)
    into.load_state_dict(experts.state_dict())
    routed = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    assert torch.equal(into(x, *routed), experts(x, *routed))


@every_format
def test_a_saved_model_comes_back(name, tmp_path):
    pytest.importorskip("transformers")
    from cute_kernels.integrations.checkpoints import load_model
    from tests.integrations.llamas import small_llama

    model: Any = small_llama(hidden_size=128, intermediate_size=160, head_dim=64)
    quantize_model(model, format=name, activations="fp8")
    model.save_pretrained(tmp_path)
    loaded, tokens = load_model(tmp_path), torch.arange(12).view(1, 12)
    model.model.rotary_emb = loaded.model.rotary_emb  # of fp32, not rounded with the model
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        assert not torch.equal(load_model(tmp_path, activations="16bit")(tokens).logits, model(tokens).logits)
    title = weight_format(name).title
    assert {layer.note for layer in model.quantization_report.quantized} == {f"{title}, FP8 products as asked"}
    assert {layer.note for layer in loaded.quantization_report.quantized} == {f"{title}, FP8 products as declared: FP8"}
