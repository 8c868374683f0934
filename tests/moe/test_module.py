"""QuantizedMoE: transformers' blocks with quantised experts, their state dicts, and what `quantize_model` swaps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from cute_kernels import PackedExperts, QuantizedLinear, QuantizedMoE, quantize_model
from cute_kernels.gemm.experts import call as moe_call
from tests.moe import blocks
from tests.observed import calls_of

BF16 = torch.bfloat16


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)


def dequantised(block: nn.Module, layer: QuantizedMoE) -> nn.Module:
    """The block with dense experts of the quantised values, gates first."""
    dense: Any = copy.deepcopy(block)
    rows = layer.gate_up.weight.dequantize(BF16)
    dense.experts.gate_up_proj.data = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
    dense.experts.down_proj.data = layer.down.weight.dequantize(BF16)
    return dense


@pytest.mark.parametrize("make", blocks.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("bits, zero_point", [(4, False), (4, True), (8, False)])
def test_it_computes_what_the_block_does_with_the_same_weights(make, bits, zero_point):
    block = make()
    layer = QuantizedMoE.from_block(block, bits, 32, zero_point)
    x = numbers(2, 5, blocks.HIDDEN)
    with torch.no_grad():
        got, want = layer(x), dequantised(block, layer)(x)
    assert got.shape == want.shape and got.dtype == BF16
    assert (got - want).float().norm() <= 0.02 * want.float().norm()
    error = (got - block(x)).float().norm() / block(x).float().norm()
    assert error < (0.25 if bits == 4 else 0.03)
    assert isinstance(layer.gate_up.weight, PackedExperts) and layer.gate is block.gate


def test_no_tokens_and_one():
    layer = QuantizedMoE.from_block(blocks.mixtral())
    assert layer(numbers(1, 0, blocks.HIDDEN)).shape == (1, 0, blocks.HIDDEN)
    assert layer(numbers(blocks.HIDDEN)).shape == (blocks.HIDDEN,)


@pytest.mark.parametrize("make", blocks.ALL, ids=lambda make: make.__name__)
def test_its_state_comes_back_through_a_safetensors_file(tmp_path, make):
    layer = QuantizedMoE.from_block(make(), 4, 32, zero_point=True)
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = QuantizedMoE.from_block(make(seed=5), 8, 64)
    result = other.load_state_dict(safetensors.torch.load_file(tmp_path / "layer.safetensors"))
    assert not result.missing_keys and not result.unexpected_keys
    assert other.gate_up.weight.bits == 4 and other.down.weight.zeros is not None
    x = numbers(3, blocks.HIDDEN)
    assert torch.equal(other(x), layer(x))


def test_loading_copies_into_the_tensors_that_are_there_unless_it_is_told_to_assign():
    loaded, layer = (QuantizedMoE.from_block(blocks.mixtral(seed=seed)) for seed in (1, 2))
    codes, weight = layer.down.codes, layer.down.weight
    layer.load_state_dict(loaded.state_dict())
    assert layer.down.codes is codes and torch.equal(codes, loaded.down.codes)
    assert torch.equal(weight.codes, layer.down.weight.codes)
    layer.load_state_dict(loaded.state_dict(), assign=True)
    assert layer.down.codes.data_ptr() == loaded.down.codes.data_ptr() == layer.down.weight.codes.data_ptr()


def test_a_tensor_that_takes_another_ones_place_is_computed_with():
    part = QuantizedMoE.from_block(blocks.mixtral()).gate_up
    before = part.weight
    assert part.weight is before
    part.scales = part.scales * 2
    assert part.weight.scales is part.scales and torch.equal(part.weight[0].scales, before[0].scales * 2)


def test_a_layer_on_the_meta_device_takes_on_what_it_loads():
    loaded = QuantizedMoE.from_block(blocks.mixtral(seed=1))
    layer = QuantizedMoE.from_block(blocks.mixtral(seed=2)).to("meta")
    layer.load_state_dict(loaded.state_dict(), assign=True)
    x = numbers(3, blocks.HIDDEN)
    assert torch.equal(layer(x), loaded(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down.scales": None}, 'Missing key.*"down.scales"'),
        ({"down.qweight": torch.zeros(1)}, 'Unexpected key.*"down.qweight"'),
        ({"down.scales": torch.zeros(1).half()}, "down.scales: got shape"),
        ({"gate_up.format": torch.tensor([1, 64, 64, 4, 128, 2])}, "gate_up.codes: got"),
    ],
)
def test_a_state_that_does_not_fit_is_reported_by_name_and_changes_nothing(change, message):
    layer = QuantizedMoE.from_block(blocks.mixtral())
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state = {**QuantizedMoE.from_block(blocks.mixtral(seed=3)).state_dict(), **change}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})
    part = next(iter(change)).split(".")[0]
    after = {name: tensor for name, tensor in layer.state_dict().items() if name.startswith(part)}
    if "qweight" not in next(iter(change)):
        assert all(torch.equal(before[name], after[name]) for name in after)


def test_it_compiles_without_graph_breaks():
    layer = QuantizedMoE.from_block(blocks.mixtral())
    x = numbers(3, blocks.HIDDEN)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_compiled_once(dynamic):
    """Whatever is kept of eager calls; as few tokens as the weights have tiles are like any others."""
    layer = QuantizedMoE.from_block(blocks.mixtral())
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
    with torch.no_grad():
        for tokens in (2, 3, 5, 8) if dynamic else (3, 3):
            assert torch.equal(compiled(numbers(tokens, blocks.HIDDEN)), layer(numbers(tokens, blocks.HIDDEN)))
    assert counter.frame_count == 1


class Halved(type(blocks.mixtral())):
    """Has all parts of a block and computes something else."""

    def forward(self, hidden_states):
        return 0.5 * super().forward(hidden_states)


def test_a_block_of_another_meaning_is_refused():
    block = blocks.mixtral()
    block.__class__ = Halved
    with pytest.raises(ValueError, match="block: got a Halved that is not served: Halved is not known to add up"):
        QuantizedMoE.from_block(block)
    gelu = blocks.mixtral()
    gelu.experts.act_fn = nn.GELU()
    for other in (gelu, nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4))):
        with pytest.raises(TypeError, match=f"block: got {type(other).__name__}, want one with a router"):
            QuantizedMoE.from_block(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": None}, "gate: got NoneType, want an nn.Module"),
        ({"gate_up": "w"}, "gate_up: got str, want PackedExperts"),
        ({"down": None}, "down: got NoneType, want PackedExperts"),
        ({"shared": [nn.SiLU()]}, "shared: got list, want None or a dict of modules"),
        ({"shared": {"expert": nn.SiLU()}}, "shared: got 'expert', want shared_experts, shared_expert"),
        ({"shared": {"shared_expert": 3}}, "shared: got int as shared_expert, want an nn.Module"),
        (
            {"shared": {"shared_expert": nn.SiLU(), "shared_experts": nn.SiLU()}},
            "shared: got both shared_experts and shared_expert, want one of them",
        ),
    ],
)
def test_parts_that_make_no_layer_are_refused_by_name(changes, message):
    layer = QuantizedMoE.from_block(blocks.mixtral())
    parts = {"gate": layer.gate, "gate_up": layer.gate_up.weight, "down": layer.down.weight}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        QuantizedMoE(**(parts | changes))


@pytest.mark.parametrize("make", blocks.MODELS, ids=lambda make: make.__name__)
def test_quantize_model_swaps_blocks_with_progress(make):
    model = make()
    seen: list[tuple[str, int, int]] = []
    quantize_model(model, bits=8, group_size=32, progress=lambda *step: seen.append(step))
    layers = [name for name, module in model.named_modules() if isinstance(module, QuantizedMoE)]
    assert len(layers) == 2 and {name for name, _, _ in seen} >= {*layers}
    assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1)) and {total for *_, total in seen} == {
        len(seen)
    }
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert linears == [model.lm_head]
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    want = make()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        got, dense = model(ids).logits.float(), want(ids).logits.float()
    assert (got - dense).norm() <= 0.1 * dense.norm()


def test_whether_tokens_may_depend_on_each_other_is_passed_on():
    model = quantize_model(blocks.mixtral_model(), bits=8, group_size=32, batch_invariant=True)
    layers = [module for module in model.modules() if isinstance(module, QuantizedMoE)]
    assert len(layers) == 2 and all(layer.batch_invariant for layer in layers)
    assert not any("invariant" in name for name in model.state_dict())
    with calls_of(moe_call.check_moe) as calls:
        model(torch.arange(6).view(1, 6))
        layers[0].batch_invariant = False
        model(torch.arange(6).view(1, 6))
    assert [call.arguments["call"].batch_invariant for call in calls] == [True, True, False, True]


def test_blocks_that_are_skipped_stay():
    model = blocks.mixtral_model()
    quantize_model(model, bits=8, group_size=32, skip=("lm_head", "model.layers.0.mlp"))
    kinds = [isinstance(model.get_submodule(f"model.layers.{i}.mlp"), QuantizedMoE) for i in range(2)]
    assert kinds == [False, True]


def test_a_bad_weight_is_named():
    model = blocks.mixtral_model()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp: "):
        quantize_model(model)


def test_a_block_itself_is_no_model():
    with pytest.raises(TypeError, match="model: got a mixture of experts itself"):
        quantize_model(blocks.mixtral())
