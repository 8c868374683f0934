"""`quantize_model` says what it did, what it left and why, and changes no meaning: clamps, routers, hooks, Conv1D."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from cute_kernels import QuantizedLinear, QuantizedMoE, quantize_model
from cute_kernels.gemm.experts import ClampedSwiglu
from cute_kernels.gemm.experts.blocks import BLOCKS, EXPERTS, refusal
from cute_kernels.gemm.experts.module import QuantizedRoutedExperts
from cute_kernels.integrations import hf_quantizer as quantizer
from tests.moe import blocks

BF16 = torch.bfloat16
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def filled(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module.to(BF16).eval()


def reasons(model: Any) -> dict[str, str]:
    return {layer.name: layer.reason for layer in model.quantization_report.left}


# -- mixtures of experts of another meaning ----------------------------------------------------------------------------


def modules_of(model: str) -> tuple[Any, Any]:
    """A model's configuration and modeling modules; the oldest releases of transformers lack the newest models."""
    package = f"transformers.models.{model}"
    pytest.importorskip(package, reason=f"this release of transformers has no {model}")
    configuration, modeling = (f"{package}.{part}_{model}" for part in ("configuration", "modeling"))
    return importlib.import_module(configuration), importlib.import_module(modeling)


def deepseek_v4(kind: str) -> Any:
    configuration, modeling = modules_of("deepseek_v4")
    options: dict[str, Any] = {"num_local_experts": 8, "mlp_layer_types": [kind, "moe"]}
    config = configuration.DeepseekV4Config(
        hidden_size=64,
        moe_intermediate_size=96,
        num_experts_per_tok=2,
        n_routed_experts=8,
        num_hidden_layers=2,
        **options,
    )
    return filled(modeling.DeepseekV4SparseMoeBlock(config, 0))


def step3p7(limit: float | None) -> Any:
    configuration, modeling = modules_of("step3p7")
    config = configuration.Step3p7TextConfig(
        hidden_size=64, moe_intermediate_size=96, share_expert_dim=96, num_local_experts=8, num_experts_per_tok=2,
        num_hidden_layers=1, moe_router_scaling_factor=1.0,
    )  # fmt: skip
    config.swiglu_limits = None if limit is None else [limit]
    config.swiglu_limits_shared = None
    return filled(modeling.Step3p7SparseMoeBlock(config, 0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_clamp_that_small_inputs_do_not_reach_is_refused(device):
    with pytest.raises(ValueError, match="block: got .* that is not served: its experts, Step3p7Experts, have limits"):
        QuantizedMoE.from_block(step3p7(7.0).to(device))


def test_the_same_experts_without_their_clamp_are_served_whatever_the_inputs():
    experts, x = step3p7(None).experts, torch.randn(6, 64).to(BF16)
    layer = QuantizedRoutedExperts.from_experts(experts, bits=8, group_size=32)
    ids, shares = torch.tensor([[0, 2], [1, 3], [5, 7]]).repeat(2, 1), torch.rand(6, 2).to(BF16)
    for scale in (1, 30, 1000):
        with torch.no_grad():
            got, want = layer(scale * x, ids, shares), experts(scale * x, ids, shares)
        assert (got - want).float().norm() < 0.02 * want.float().norm()


def test_a_clamp_that_is_known_is_served_whatever_the_inputs():
    """Against the same weights: where gates and ups are beyond the limits, their signs alone decide."""
    block = deepseek_v4("moe")
    layer, x = QuantizedMoE.from_block(block, bits=8, group_size=32), torch.randn(1, 6, 64).to(BF16)
    rows = layer.gate_up.weight.dequantize(BF16)
    block.experts.gate_up_proj.data = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
    block.experts.down_proj.data = layer.down.weight.dequantize(BF16)
    assert layer.activation == ClampedSwiglu(1.0, 10.0, 0.0)
    for scale in (1, 30, 1000):
        with torch.no_grad():
            got, want = layer(scale * x), block(scale * x)
        assert (got - want).float().norm() < 0.01 * want.float().norm()


class InlineClamp(type(blocks.mixtral().experts)):
    """Clamps in its forward alone, where no function says so."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token in range(len(hidden_states)):
            for e, share in zip(top_k_index[token], top_k_weights[token], strict=True):
                gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2)
                hidden = nn.functional.silu(gate) * up.clamp(-self.bound, self.bound)
                out[token] += share * nn.functional.linear(hidden, self.down_proj[e])
        return out


def test_a_clamp_that_only_the_forward_knows_is_refused():
    block = blocks.mixtral()
    block.experts.__class__, block.experts.bound = InlineClamp, 12.0
    with pytest.raises(ValueError, match=r"the code of its experts, InlineClamp, is not known"):
        QuantizedMoE.from_block(block)


def named_alike(module: nn.Module, **methods: Any) -> None:
    """Makes a module one of a subclass that keeps its class's name, but not its code."""
    kind = type(module)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**named, **methods})


def test_a_subclass_that_keeps_a_known_name_but_not_its_code_is_refused():
    block, experts = blocks.mixtral(), deepseek_v4("moe").experts
    named_alike(block, forward=lambda self, x: x)
    with pytest.raises(ValueError, match="MixtralSparseMoeBlock is not known to add up"):
        QuantizedMoE.from_block(block)
    named_alike(experts, _apply_gate=lambda self, gate_up: gate_up.chunk(2, dim=-1)[0])
    assert refusal(experts) == "the code of its experts, DeepseekV4Experts, is not known"


def test_a_block_that_chooses_experts_by_a_method_of_its_own_is_refused():
    """As those of older releases do, whose routers give logits alone."""
    block = blocks.mixtral()
    assert refusal(block) is None
    block.route_tokens_to_experts = None
    assert "is not known to add up" in str(refusal(block))


def test_each_class_of_the_tables_is_one_of_transformers():
    """The newest models are in no older release, which then lacks their file."""
    for name in (*BLOCKS, *EXPERTS):
        file, kind = name.split(".")
        source = Path(tf.__file__).parent / "models" / file / f"modeling_{file}.py"
        assert not source.exists() or f"\nclass {kind}(" in source.read_text(), name


def test_a_hash_router_is_refused_by_name_and_left_by_quantize_model():
    block = deepseek_v4("hash_moe")
    with pytest.raises(ValueError, match="its router DeepseekV4HashRouter takes hidden_states, input_ids"):
        QuantizedMoE.from_block(block)
    model: Any = nn.ModuleDict({"mlp": block, "proj": nn.Linear(64, 64).to(BF16)})
    quantize_model(model, group_size=32)
    assert model.mlp is block and isinstance(model.proj, QuantizedLinear)
    assert isinstance(block.shared_experts.up_proj, QuantizedLinear)
    assert isinstance(block.experts, QuantizedRoutedExperts)
    assert block.experts.activation == ClampedSwiglu(1.0, 10.0, 0.0)
    assert "router" in reasons(model)["mlp.gate"]


def test_experts_in_a_block_that_does_more_are_swapped_alone():
    """A router of input ids, and a factor on what the experts say: the block's own forward goes on around them."""
    x, ids = torch.randn(1, 6, 64).to(BF16), torch.randint(0, 50, (1, 6))
    hashed, scaled = deepseek_v4("hash_moe"), step3p7(None)
    hashed.experts.limit, scaled.routed_scaling_factor = float("inf"), 2.5
    for block, inputs in ((hashed, (x, ids)), (scaled, (x,))):
        with pytest.raises(ValueError, match="block: got a .* that is not served"):
            QuantizedMoE.from_block(block)
        model: Any = nn.ModuleDict({"mlp": block})
        with torch.no_grad():
            want = block(*inputs)
            quantize_model(model, bits=8, group_size=32)
            got = block(*inputs)
        assert model.mlp is block and isinstance(block.experts, QuantizedRoutedExperts)
        assert (got - want).float().norm() < 0.03 * want.float().norm()
        assert "mlp.experts" in [layer.name for layer in model.quantization_report.quantized]


def test_minimax_m2_is_quantised_but_for_its_router():
    model, dense = minimax(), minimax()
    quantize_model(model, bits=8, group_size=32)
    assert isinstance(model.model.layers[0].mlp.experts, QuantizedRoutedExperts)
    assert set(reasons(model)) == {"model.embed_tokens", "lm_head", "model.layers.0.mlp.gate"}
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        got, want = model(ids).logits.float(), dense(ids).logits.float()
    assert (got - want).norm() < 0.05 * want.norm()


def test_experts_of_another_meaning_are_refused_by_themselves():
    with pytest.raises(TypeError, match="experts: got Linear, want gate_up_proj"):
        QuantizedRoutedExperts.from_experts(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="experts: got Step3p7Experts that are not served: .* limits"):
        QuantizedRoutedExperts.from_experts(step3p7(7.0).experts)


# -- whole models ------------------------------------------------------------------------------------------------------


def gpt_oss() -> Any:
    return filled(tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL)))


def minimax() -> Any:
    return filled(tf.MiniMaxM2ForCausalLM(tf.MiniMaxM2Config(**SMALL)))


def llama4_of_gelu() -> Any:
    config = tf.Llama4TextConfig(**SMALL, intermediate_size_mlp=96, moe_layers=[0], hidden_act="gelu")
    return filled(tf.Llama4ForCausalLM(config))


def test_experts_with_biases_are_quantised():
    model = gpt_oss()
    quantize_model(model, group_size=32)
    assert isinstance(model.model.layers[0].mlp.experts, QuantizedRoutedExperts)
    assert not [name for name in reasons(model) if name.endswith(".experts")]


def test_experts_that_stay_in_16_bits_are_warned_of_by_name():
    model = llama4_of_gelu()
    with pytest.warns(UserWarning, match=r"most of the weights, .*Experts model\.layers\.0\.[a-z_]+\.experts"):
        quantize_model(model, group_size=32)
    (name,) = [name for name in reasons(model) if name.endswith(".experts")]
    assert "gate_up_proj" in reasons(model)[name]
    routers = [name for name in reasons(model) if name.endswith((".router", ".gate"))]
    assert len(routers) == 1 and type(model.get_submodule(routers[0])) is not QuantizedLinear
    assert "experts" in str(model.quantization_report)


def test_gpt2s_transposed_layers_are_quantised():
    torch.manual_seed(0)
    dense: Any = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2))
    dense = dense.to(BF16).eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        want = dense(ids).logits.float()
        weight, bias = dense.transformer.h[0].mlp.c_fc.weight.T.clone(), dense.transformer.h[0].mlp.c_fc.bias.clone()
        quantize_model(dense, bits=8, group_size=32)
        got = dense(ids).logits.float()
    layers = [module for module in dense.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 8 and len(dense.quantization_report.quantized) == 8
    layer = dense.transformer.h[0].mlp.c_fc
    assert (layer.weight.dequantize() - weight).abs().max() < 0.01 * weight.abs().max() and torch.equal(
        layer.bias, bias
    )
    assert (got - want).norm() < 0.02 * want.norm()


def test_a_report_counts_bytes_and_names_each_layer_once():
    model = blocks.mixtral_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_model(model, bits=4, group_size=32)
    report = model.quantization_report
    assert {layer.kind for layer in report.quantized} == {"Linear", "MixtralSparseMoeBlock"}
    packed = sum(
        module.weight.nbytes for module in model.modules() if hasattr(module, "codes")
    )  # fmt: skip
    assert sum(layer.packed_nbytes for layer in report.quantized) == packed
    assert reasons(model)["lm_head"] == "skip names it" and reasons(model)["model.embed_tokens"] == "an embedding"
    assert report.warning is None and report.summary.startswith(f"quantised {len(report.quantized)} layers")


@pytest.mark.parametrize(
    ("form", "said"),
    [("mxfp4", "MXFP4"), ("fp8", "FP8 by rows"), ("w4g32z", "INT4 in groups of 32 with zero points")],
)
def test_a_report_says_the_format_and_the_products_of_each_layer(form, said):
    model = blocks.mixtral_model()
    quantize_model(model, format=form)
    found = {layer.note for layer in model.quantization_report.quantized}
    assert found == {f"{said}, 16-bit products"}
    assert f"Linear: {said}, 16-bit products" in str(model.quantization_report)


def test_a_model_whose_activations_a_format_does_not_take_is_refused_whole():
    model: Any = nn.Sequential(nn.Linear(64, 64).half())
    with pytest.raises(TypeError, match=r"^0: got weights in torch.float16, want bf16 for MXFP4"):
        quantize_model(model, format="mxfp4")
    assert isinstance(model[0], nn.Linear)
    quantize_model(model, format="fp8")
    assert model[0](torch.ones(1, 64).half()).dtype == torch.float16


def test_nothing_to_quantise_is_warned_of():
    with pytest.warns(UserWarning, match="nothing is quantised: it has no layers with weights"):
        quantize_model(nn.Sequential(nn.ReLU()))
    model: Any = nn.Sequential(nn.Bilinear(3, 4, 5), nn.Conv1d(3, 4, 5))
    with pytest.warns(UserWarning, match="nothing is quantised"):
        quantize_model(model)
    assert reasons(model) == {"0": "not an nn.Linear", "1": "a convolution"}
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    with pytest.warns(UserWarning, match="nothing is quantised: Linear 0 .*: skip names it"):
        quantize_model(model, skip=("*",))
    with pytest.warns(UserWarning, match="nothing is quantised: QuantizedLinear 0 .*: it is quantised already"):
        quantize_model(quantize_model(model))


# -- Linear layers that are more than a weight and a bias --------------------------------------------------------------


class Subclass(torch.Tensor):
    """A weight as other libraries' quantised tensors are."""


def with_weight(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(64, 64)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def with_parameter() -> nn.Linear:
    linear = nn.Linear(64, 64)
    linear.register_parameter("weight_scale", nn.Parameter(torch.ones(64)))
    return linear


def with_forward() -> nn.Linear:
    linear = nn.Linear(64, 64)
    linear.forward = linear.forward
    return linear


def with_backward_hook() -> nn.Linear:
    linear = nn.Linear(64, 64)
    linear.register_full_backward_hook(lambda *_: None)
    return linear


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (with_weight(torch.randn(64, 64).as_subclass(Subclass)), "its weight is a Subclass: quantised or distributed"),
        (with_weight(torch.zeros(64, 64).to(torch.float8_e4m3fn)), "its weight is of torch.float8_e4m3fn"),
        (with_parameter(), "it has weight_scale: quantised by another library"),
        (nn.utils.weight_norm(nn.Linear(64, 64)), "it has weight_g, weight_v"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "a subclass of nn.Linear"),
        (with_forward(), "its forward was replaced on the instance"),
        (with_backward_hook(), "it has backward_hooks, which a quantised layer cannot keep"),
    ],
    ids=["subclass", "float8", "scale", "weight_norm", "parametrised", "forward", "backward"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_linear_that_is_more_than_its_weight_is_left_and_named(linear, reason):
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ModuleDict({"odd": linear}))
    quantize_model(model, group_size=32)
    assert model[1].odd is linear and isinstance(model[0], QuantizedLinear)
    assert reasons(model)["1.odd"].startswith(reason)


class Reader(nn.Module):
    """Reads weights: for their numbers, behind flags, and for what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.flagged, self.asked, self.inner = (nn.Linear(64, 64) for _ in range(5))
        self.slices = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.asked.weight, torch.Tensor):
            x = x.to(self.asked.weight.dtype)
        if self.slices > 1 and x.dim() > 1:
            x = x @ self.flagged.weight
        if self.training:
            x = x @ self.called.weight
        return self.asked(self.flagged(self.called(x))) @ self.read.weight


class Outer(nn.Module):
    """Reads a weight of a module within."""

    def __init__(self, slices: int = 1) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([Reader()])
        self.blocks[0].slices = slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) @ block.inner.weight
        return x


@pytest.mark.parametrize("slices", [1, 2])
def test_a_layer_whose_weight_other_code_reads_is_left_and_named(slices):
    """Unless no number is wanted, or a flag that is off stands before it; layers are quantised to be evaluated."""
    model, x = Outer(slices).to(BF16), torch.randn(3, 64).to(BF16)
    wanted = {"blocks.0.read": "Reader.forward reads its weight", "blocks.0.inner": "Outer.forward reads its weight"}
    if slices > 1:
        wanted["blocks.0.flagged"] = "Reader.forward reads its weight"
    want = model.eval()(x)
    quantize_model(model.train(), bits=8, group_size=32)
    assert reasons(model) == wanted
    got = model.eval()(x)
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize(("name", "left"), [("Mamba", "MambaMixer"), ("Rwkv", "RwkvModel")])
def test_models_that_read_a_layers_weight_run_and_come_back(name, left, tmp_path):
    """RWKV halves weights as it comes to evaluation, so what comes back is another model, quantised or not."""
    quantizer.register()
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    model = getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**sizes)).to(BF16).eval()
    ids = torch.randint(0, 97, (2, 5))
    want = model(ids).logits
    quantize_model(model, bits=8, group_size=32)
    assert any(reason.startswith(f"{left}.") for reason in reasons(model).values())
    got = model(ids).logits
    assert (got - want).norm() <= 5e-2 * want.norm()
    if name == "Rwkv":
        return
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=BF16).eval()
    assert torch.equal(again(ids).logits, got)


def test_forward_hooks_go_on_and_can_be_removed():
    model: Any = nn.Sequential(nn.Linear(64, 64)).to(BF16)
    seen: list[str] = []
    before = model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    after = model[0].register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    quantize_model(model, group_size=32)
    x = torch.randn(3, 64).to(BF16)
    with_hook = model(x)
    after.remove()
    assert torch.equal(with_hook, model(x) + 1) and seen == ["before"] * 2
    before.remove()
    model(x)
    assert len(seen) == 2


def test_a_router_that_is_a_linear_layer_stays():
    gate = nn.Linear(64, 4, bias=False)
    experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    model: Any = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": gate, "experts": experts})})
    quantize_model(model, group_size=32)
    assert model.mlp.gate is gate and all(isinstance(expert, QuantizedLinear) for expert in experts)


def test_a_model_of_another_method_keeps_its_configuration_and_is_warned_of():
    model: Any = filled(tf.LlamaForCausalLM(tf.LlamaConfig(**{k: v for k, v in SMALL.items() if "expert" not in k})))
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.warns(UserWarning, match="has a quantization_config of 'torchao', which stays"):
        quantize_model(model, group_size=32)
    assert model.config.quantization_config == {"quant_method": "torchao"}


def test_a_release_of_transformers_that_converts_no_names_serves(monkeypatch):
    """As those before 5.0: a model's tensors are written as they are."""
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    monkeypatch.delitem(sys.modules, "cute_kernels.saved_names", raising=False)
    sizes: Any = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))
    quantize_model(model)
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert model.config.quantization_config["quant_method"] == quantizer.METHOD
