"""Models whose layers read masks as eager attention does, whatever attn_implementation is: some compute attention
themselves beside others that ask for it, some ask with a mask that they have changed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from cute_kernels.integrations import transformers as ck
from cute_kernels.integrations.transformers.known_code import may_add_masks, supports_sdpa
from tests.integrations.architectures import VOCABULARY

IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :3] = 0
LONG, LONG_PADDED = IDS.repeat(1, 3), torch.cat((LEFT_PADDED, torch.ones(2, 18, dtype=torch.long)), dim=1)
HAS_DEEPSEEK_V4 = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV4Config"), reason="not in this release of transformers"
)
FAR_FROM_UNIFORM = 20.0
"""Factor of queries: random models would hide a wrong mask else."""


def sharpened(model: Any) -> Any:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query.weight" in name or "q_proj.weight" in name:
                weight.mul_(FAR_FROM_UNIFORM)
    return model.eval()


def git() -> Any:
    """An image encoder that asks for attention, text layers that do not."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    config = transformers.GitConfig(
        vision_config=vision, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return sharpened(transformers.GitForCausalLM(config))


def bigbird_pegasus() -> Any:
    """An encoder of layers that compute attention themselves, a decoder of layers that ask."""
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, attention_type="original_full",
        max_position_embeddings=64,
    )  # fmt: skip
    return sharpened(transformers.BigBirdPegasusModel(config))


def deepseek_v4() -> Any:
    """Its layers append columns to the mask that they ask with, as to one that is added."""
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, q_lora_rank=64, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, sliding_window=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return sharpened(model)


def outputs(model: Any, implementation: str, ids: torch.Tensor = IDS, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, **inputs)[0]


@pytest.fixture(autouse=True)
def registered() -> None:
    ck.register()
    transformers.logging.set_verbosity_error()


def assert_as_eager(model: Any, **inputs: Any) -> None:
    want, got = (outputs(model, name, **inputs) for name in ("eager", ck.ATTENTION_NAME))
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("mask", [None, LEFT_PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_text_beside_images_is_causal(images, mask):
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)} if images else {}
    assert_as_eager(git(), attention_mask=mask, **pixels)


@HAS_DEEPSEEK_V4
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_columns_that_a_layer_adds_to_its_mask_are_honoured(padded):
    assert_as_eager(deepseek_v4(), ids=LONG, attention_mask=LONG_PADDED if padded else None)


def test_padding_of_an_encoder_is_not_seen():
    assert_as_eager(bigbird_pegasus(), attention_mask=LEFT_PADDED, decoder_input_ids=IDS)
    assert_as_eager(bigbird_pegasus(), attention_mask=None, decoder_input_ids=IDS)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_is_not_in_a_cache_is_not_seen(cache):
    model, found = git(), []
    options: Any = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for name in ("eager", ck.ATTENTION_NAME):
        model.set_attn_implementation(name)
        try:
            found.append(model.generate(IDS, attention_mask=LEFT_PADDED, cache_implementation=cache, **options))
        except (RuntimeError, TypeError) as error:
            if found:
                raise
            pytest.skip(f"not in this release of transformers: {error}")
    want, got = found
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_layers_that_read_a_cache_themselves_are_refused_by_name():
    model = git().bfloat16()
    with pytest.raises(ValueError, match="whose GitSelfAttention computes attention itself, want kv_format=None"):
        ck.accelerate(model, kv_format="bf16")
    assert model.config._attn_implementation != ck.ATTENTION_NAME
    model.set_attn_implementation(ck.ATTENTION_NAME)
    with pytest.raises(AttributeError, match="GitSelfAttention offers no choice: it computes attention itself"):
        model(IDS, past_key_values=ck.DecodeCache("bf16"))
    ck.accelerate(model, kv_format=None)


# -- while torch.compile traces, there is a configuration but no module ---------------------------------------------


@pytest.mark.parametrize(
    ("make", "padded"),
    [
        (git, False),
        (git, True),
        (bigbird_pegasus, False),
        (bigbird_pegasus, True),
        pytest.param(deepseek_v4, False, marks=HAS_DEEPSEEK_V4),  # takes as long as the others together
    ],
)
def test_a_compiled_model_gets_the_mask_that_its_layers_read(make, padded):
    torch.compiler.reset()
    model = make()
    inputs: Any = {"attention_mask": LONG_PADDED if padded else None, "use_cache": False}
    if make is bigbird_pegasus:
        inputs["decoder_input_ids"] = IDS
    want = outputs(model, "eager", LONG, **inputs)
    model.set_attn_implementation(ck.ATTENTION_NAME)
    counter = CompileCounter()
    with torch.no_grad():
        got = torch.compile(model.forward, fullgraph=True, backend=counter)(LONG, **inputs)[0]
    assert counter.frame_count == 1
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_a_configuration_tells_who_may_add_masks():
    git()

    class Kin(transformers.GitConfig):
        model_type = "kin"

    assert not supports_sdpa(transformers.GitConfig) and may_add_masks(transformers.GitConfig)
    assert may_add_masks(Kin)  # the models of its nearest base class
    transformers.LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=0, num_attention_heads=1))
    assert supports_sdpa(LlamaConfig) and not may_add_masks(LlamaConfig)
    assert supports_sdpa(type(None)) and not may_add_masks(type(None))


def test_a_model_that_asks_with_its_texts_configuration_counts():
    class TextConfig(PreTrainedConfig):
        pass

    class Text(PreTrainedModel):
        config_class = TextConfig
        _supports_sdpa = True

    assert Text.config_class is TextConfig and not may_add_masks(TextConfig)

    class BothConfig(PreTrainedConfig):
        sub_configs: ClassVar[Any] = {"text_config": TextConfig, "vision_config": AutoConfig}  # Auto: of any model

    class Both(PreTrainedModel):
        config_class = BothConfig
        _supports_sdpa = False

    assert Both.config_class is BothConfig and may_add_masks(BothConfig) and may_add_masks(TextConfig)
