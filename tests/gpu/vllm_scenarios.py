"""Engines that serve a small random model, as data; and the kernels that they ask for.

    python -m tests.gpu.vllm_scenarios FILE [FAMILY ...]     # default: all families that need one GPU

writes the kernels as a list that `python -m cute_kernels aot build --list FILE` builds a bundle from, without a GPU and
without vLLM. `serve_vllm` runs scenarios, `test_vllm_serving` judges them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bench.e2e_cases import SEVERAL_GPUS
from cute_kernels.formats.kv import LayerFormats, format_pair
from cute_kernels.formats.weights import NVFP4, integers
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import TILE_TOKENS, RouterConfig, lane_experts_of
from cute_kernels.gemm.layer.call import configs_for, serves_rows
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.integrations import attention_kernels, expert_kernels, mla_kernels
from cute_kernels.integrations.ready import specs_beside_norm
from cute_kernels.integrations.vllm import kv_formats, prepare
from cute_kernels.integrations.vllm.environment import SEAMS
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import NormConfig, launch_shape
from cute_kernels.runtime import KernelSpec, wanted
from cute_kernels.runtime.gpu import Gpu, standing_in
from tests.gpu.specs import ARCH, NUM_SMS

VOCABULARY = 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": CONFIG["num_attention_heads"],
    "head_dim": None,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": CONFIG["num_hidden_layers"],  # no experts
}
"""Changes to CONFIG that make latent attention (MLA) of it."""

SHARED_CACHES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 100,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 64,
    "tie_word_embeddings": True,
}
GEMMA3N = {
    **SHARED_CACHES,
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
}
GEMMA4 = {
    **SHARED_CACHES,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "global_head_dim": 256,
}
"""Changes to CONFIG: models whose last two layers read the caches of the first two."""
HYBRID = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_chunk_size": 128,
}
"""Changes to CONFIG that put Mamba layers beside attention, whose state is larger than a page of 16 tokens."""
MODELS_OF_TRANSFORMERS = ("gemma3n_text", "gemma4_text", "falcon_h1")
"""Model types whose weights `serve_vllm` draws by the names that transformers gives them."""

MLA_QUERIES = 16  # of a request, at most
GROUP = 128  # inputs of a layer that share a scale
W4 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            }
        },
    }
}
"""Changes to CONFIG that make 4-bit weights of it."""
W4_BF16 = {**W4, "torch_dtype": "bfloat16"}
"""The same in bf16, in which products leave norms to the next ones."""
FP4 = {
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "tensor_group",
                    "group_size": NVFP4.group_size,
                },
            }
        },
    },
}
"""Changes to CONFIG that make NVFP4 weights of it."""
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "quantization_config": {**W4["quantization_config"], "ignore": ["lm_head", "re:.*mlp.gate$"]},
}
"""Changes to CONFIG that make experts of it. A token has all of them, so that rounding a logit changes none."""
GATE_IN_CODE = {
    **MIXTURE,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "head_dim": 64,
    "intermediate_size": MIXTURE["moe_intermediate_size"],
}
"""The same of a model whose own code multiplies by the gate."""


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        kv: what --kv-cache-dtype is given. kv_format: of this package, instead of it; empty for none; with semicolons
            between those of the layers.
        chunk: tokens of a step, at most.
        tokens: that the cache has room for.
        model: changes to CONFIG. engine: more arguments of the engine.
        leaves: the module of the plugin whose layers are left to vLLM, though their seam is replaced; empty for none.
        what: of `serve_vllm`'s functions of an engine and a scenario, the one that is called.
    """

    kv: str = "auto"
    kv_format: str = ""
    chunk: int = 512
    tokens: int = 12288
    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    what: str = "generate_twice"
    leaves: str = ""


BLOCK, MAX_REQUESTS, MAX_MODEL_LEN = 16, 32, 2048
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]}
"""No torch.compile: a model of this size gains nothing, and starts four times as fast."""

WIDE = 131072
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTING = {"method": "draft_model", "num_speculative_tokens": 3}
"""By the served model itself, whose drafts are right: a graph of several steps from vLLM 0.30 on."""


def drafting(tokens: int) -> dict[str, Any]:
    """An engine's arguments for so many drafted tokens, from 16 on more than a kernel of decode attention takes."""
    sizes = [(1 + tokens) * count for count in (1, 2, 4, 8, 16, 32)]
    return {
        "speculative_config": {**SPECULATION, "num_speculative_tokens": tokens},
        "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": sizes},
    }


MANY = {
    "max_num_seqs": 256,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    },
}
WIDE_MODEL, WIDE_ENGINE = {"max_position_embeddings": WIDE}, {"max_model_len": WIDE}
FLASHMLA = {"block_size": 64, "attention_backend": "FLASHMLA"}
COMPILED = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]}}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
SHARED = {**TWO, "decode_context_parallel_size": 2}
ONE_KV_HEAD = {**W4, "num_key_value_heads": 1, "intermediate_size": 1280}  # both GPUs have it; five groups of each MLP
WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}

SYNC = {"async_scheduling": False}
"""vLLM plans steps ahead, and how far depends on time; without that two runs have the same steps."""
LEFT = {"left": Scenario(engine=SYNC), "left-compiled": Scenario(engine={**COMPILED, **SYNC})}
"""Models without layers of ours."""

SCENARIOS: dict[str, dict[str, Scenario]] = {
    # A process of vLLM's for each of these, side by side; FAMILY.NAME is a scenario.
    "": {
        "theirs": Scenario(),
        "fp16": Scenario(kv_format="fp16"),
        "theirs-cut": Scenario(chunk=384),
        "fp16-cut": Scenario(kv_format="fp16", chunk=384),
        "fp16-sync": Scenario(kv_format="fp16", engine=SYNC),
    },
    "caches": {
        "fp8": Scenario("fp8"),
        "int4": Scenario(kv_format="int4_g4"),
        "int8": Scenario("int8_per_token_head"),
        "int4-rows": Scenario("int4_per_token_head"),
        "fp8-rows": Scenario("fp8_per_token_head"),
        "by-layer": Scenario(kv_format="int8_token_head;fp16;int8_token_head"),
    },
    "drafts": {
        "3": Scenario(kv_format="fp16", engine={"speculative_config": SPECULATION}),
        "model": Scenario(kv_format="fp16", engine={"speculative_config": DRAFTING}),
        **{f"{count}": Scenario(kv_format="fp16", chunk=1536, engine=drafting(count)) for count in (4, 10, 20, 31)},
    },
    "shapes": {
        "window-theirs": Scenario(model=WINDOW),
        "window": Scenario(kv_format="fp16", model=WINDOW),
        "many-theirs": Scenario(tokens=65536, engine=MANY, what="generate_many"),
        "many": Scenario(kv_format="fp16", tokens=65536, engine=MANY, what="generate_many"),
        "wide-theirs": Scenario("auto", "", 8192, WIDE + 4096, WIDE_MODEL, WIDE_ENGINE, "generate_wide"),
        "wide": Scenario("auto", "fp16", 8192, WIDE + 4096, WIDE_MODEL, WIDE_ENGINE, "generate_wide"),
    },
    "shared": {
        "gemma3n-theirs": Scenario(model=GEMMA3N),
        "gemma3n": Scenario(kv_format="fp16", model=GEMMA3N),
        # FlashAttention 4, which vLLM would take, is compiled as it is first asked for.
        "gemma4-theirs": Scenario(model=GEMMA4, engine={"attention_backend": "TRITON_ATTN"}),
        "gemma4": Scenario(kv_format="fp16", model=GEMMA4, engine={"attention_backend": "CUSTOM"}),
    },
    "hybrid": {
        "theirs": Scenario(model=HYBRID),
        "fp16": Scenario(kv_format="fp16", model=HYBRID),
        "int8": Scenario(kv_format="int8_token_head", model=HYBRID),
    },
    "latent": {
        "latent-theirs": Scenario(
            model=LATENT, engine={"block_size": 64, "attention_backend": "FLASH_ATTN_MLA"}, leaves="mla"
        ),
        "latent-left": Scenario(model=LATENT, engine=FLASHMLA, leaves="mla"),
        "latent": Scenario(model=LATENT, engine=FLASHMLA),
    },
    "w4": {
        "w4": Scenario(kv_format="fp16", model=W4),
        "w4-bf16": Scenario(kv_format="bf16", model=W4_BF16),
        "w4-int4-rows": Scenario("int4_per_token_head", model=W4),
        "w4-slept": Scenario(
            "int4_per_token_head", model=W4, engine={"enable_sleep_mode": True}, what="sleep_and_wake"
        ),
    },
    "fused": {
        "w4-fused": Scenario(kv_format="fp16", model=W4, engine=COMPILED),
        "w4-bf16-fused": Scenario(kv_format="bf16", model=W4_BF16, engine=COMPILED),
    },
    "floats": {
        "theirs": Scenario(model=FP4, engine={"linear_backend": "marlin"}),
        "nvfp4": Scenario(model=FP4),
        "nvfp4-fused": Scenario(model=FP4, engine=COMPILED),
    },
    "engines": {
        "long": Scenario(kv_format="int4_g4", what="serve_long", tokens=16384),
        "pair": Scenario(kv_format="fp16", engine=SYNC, what="beside_another"),
    },
    "invariant": {
        "theirs": Scenario(),
        "theirs-cut": Scenario(chunk=384),
        "whole": Scenario(kv_format="fp16"),
        "cut": Scenario(kv_format="fp16", chunk=384),
        "int4": Scenario(kv_format="int4_g4"),
        "int4-cut": Scenario(kv_format="int4_g4", chunk=384),
    },
    "left": LEFT,
    "off": LEFT,  # the plug-in is there and switched off
    "experts": {
        "theirs": Scenario(model=MIXTURE, leaves="routers"),
        "ours": Scenario(model=MIXTURE),
        "in-code-theirs": Scenario(model=GATE_IN_CODE, leaves="routers", engine=COMPILED),
        "in-code": Scenario(model=GATE_IN_CODE, engine=COMPILED),
    },
    "two": {
        "theirs": Scenario(),
        "theirs-cut": Scenario(chunk=384),
        "w4-fp8": Scenario("fp8", model=W4),
        "w4-int4": Scenario(kv_format="int4_g4", model=W4),
        "w4-one-head": Scenario("int8_per_token_head", model=ONE_KV_HEAD),
        "fp16-two": Scenario(kv_format="fp16", engine=TWO),
        "w4-fp8-two": Scenario("fp8", model=W4, engine=TWO),
        "w4-int4-two": Scenario(kv_format="int4_g4", model=W4, engine=TWO),
        "w4-one-head-two": Scenario("int8_per_token_head", model=ONE_KV_HEAD, engine=TWO),
        # Each GPU caches every other token of the head.
        "w4-one-head-shared": Scenario("int8_per_token_head", model=ONE_KV_HEAD, engine=SHARED),
    },
}
ENVIRONMENT = {"VLLM_DISABLE_COMPILE_CACHE": "1", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
"""Of every family: compiled graphs say what they fuse, and a dozen processes share the cores."""
ENVIRONMENTS = {
    "": {"CUTE_KERNELS_VLLM": ",".join(SEAMS)},
    "invariant": {"VLLM_BATCH_INVARIANT": "1"},
    "off": {"CUTE_KERNELS_VLLM": "0"},
    "two": SEVERAL_GPUS,
}


def named_format(kv_format: str, folder: Path) -> str:
    """What the environment names for a scenario's ``kv_format``: of formats by layer a file in the folder."""
    if ";" not in kv_format:
        return kv_format
    path = folder / "formats.json"
    LayerFormats(tuple(format_pair(name) for name in kv_format.split(";"))).save(path)
    return str(path)


def specs(families: Iterable[str]) -> list[KernelSpec]:
    """The kernels of families of scenarios on the GPU that is here, or on an H200."""
    other = Gpu(num_sms=lambda device: NUM_SMS)
    with nullcontext() if torch.cuda.is_available() else standing_in(other):
        found = (
            spec
            for family in families
            for spec in kernels_of(
                SCENARIOS[family].values(), invariant="VLLM_BATCH_INVARIANT" in ENVIRONMENTS.get(family, {})
            )
        )
        return list(dict.fromkeys(found))


def kernels_of(scenarios: Iterable[Scenario], *, invariant: bool) -> list[KernelSpec]:
    """The kernels that engines ask for."""
    found: dict[KernelSpec, None] = {}
    for scenario in {_kind(scenario): scenario for scenario in scenarios}.values():
        if "kv_lora_rank" in scenario.model:
            found.update(dict.fromkeys(_latent_kernels(scenario)))
        elif scenario.kv != "auto" or scenario.kv_format:
            found.update(dict.fromkeys(_attention_kernels(scenario, invariant)))
        if "quantization_config" in scenario.model:
            found.update(dict.fromkeys(_linear_kernels(scenario)))
            if scenario.engine == COMPILED:
                found.update(dict.fromkeys(_fused_kernels(scenario)))
        if "num_experts" in scenario.model:
            found.update(dict.fromkeys(_expert_kernels(scenario)))
    return list(found)


def _kind(scenario: Scenario) -> str:
    """What decides a scenario's kernels."""
    return repr((scenario.kv, scenario.kv_format, scenario.model, scenario.engine))


def _dtype(scenario: Scenario) -> torch.dtype:
    """Of a scenario's activations."""
    return getattr(torch, {**CONFIG, **scenario.model}["torch_dtype"])


def _heads(scenario: Scenario) -> tuple[dict[str, Any], int, int]:
    """A scenario's configuration, and the heads and KV heads of one of its GPUs."""
    config, ranks = {**CONFIG, **scenario.model}, scenario.engine.get("tensor_parallel_size", 1)
    return config, config["num_attention_heads"] // ranks, max(config["num_key_value_heads"] // ranks, 1)


def _kinds_of_layers(config: dict[str, Any]) -> list[tuple[int, int | None]]:
    """The head sizes and windows of a model's layers of attention."""
    window, full = config.get("sliding_window"), config.get("global_head_dim", config["head_dim"])
    return [(config["head_dim"], window), *([(full, None)] if "layer_types" in config else [])]


def _attention_kernels(scenario: Scenario, invariant: bool) -> list[KernelSpec]:
    config, heads, kv_heads = _heads(scenario)
    layers = []
    for own, (head_dim, window) in product(dict.fromkeys(scenario.kv_format.split(";")), _kinds_of_layers(config)):
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
            formats = kv_formats.formats_for(scenario.kv)
        layers.append(
            SimpleNamespace(
                formats=formats,
                head_size=head_dim,
                num_heads=heads,
                num_kv_heads=kv_heads,
                sliding_window=window,
                soft_cap=None,
                sinks=None,
                transform=kv_formats.transform_for(scenario.kv, kv_heads, head_dim),
            )
        )
    drafted = scenario.engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
    longest = scenario.engine.get("max_model_len", MAX_MODEL_LEN)
    batches = attention_kernels.batches_up_to(scenario.engine.get("max_num_seqs", MAX_REQUESTS))
    ranks = scenario.engine.get("decode_context_parallel_size", 1)
    step = batches, min(1 + drafted, 16), longest, BLOCK, _dtype(scenario), invariant, ranks
    decodes = attention_kernels.Decodes(*step)
    return attention_kernels.specs(layers, decodes, torch.device("cuda", 0))


def _latent_kernels(scenario: Scenario) -> list[KernelSpec]:
    _, heads, _ = _heads(scenario)
    batches = attention_kernels.batches_up_to(MAX_REQUESTS)
    page = scenario.engine["block_size"]
    decodes = mla_kernels.Decodes("mla_fp16", False, heads, batches, (1, MLA_QUERIES), MAX_MODEL_LEN, page)
    return mla_kernels.specs(decodes, NUM_SMS)


def _fused_kernels(scenario: Scenario) -> Iterator[KernelSpec]:
    """The norms of compiled graphs; in bf16 also products beside a norm, and the launch of a layer's products."""
    config, heads, kv_heads = _heads(scenario)
    hidden, dtype, columns = config["hidden_size"], _dtype(scenario), heads * config["head_dim"]
    for has_residual in (False, True):
        yield NormSpec(NormConfig("rms", DTYPES[dtype], *launch_shape(hidden), has_residual=has_residual))
    if dtype != torch.bfloat16:
        return
    middle, rows = config["intermediate_size"], _rows(scenario)
    sides: dict[tuple[int, int], DeferredKind] = {
        (columns + 2 * kv_heads * config["head_dim"], hidden): TAKES,
        (2 * middle, hidden): TAKES,
        (hidden, columns): GIVES,
        (hidden, middle): GIVES,
    }
    for (n, k), kind in sides.items():
        yield from specs_beside_norm(_problem(scenario, n, k), rows, kind)
    if scenario.model != FP4 and any(map(serves_rows, rows)):
        yield from (GemmSpec(one) for one in configs_for(max(hidden, middle))[:1])


def _linear_kernels(scenario: Scenario) -> Iterator[KernelSpec]:
    config, heads, kv_heads = _heads(scenario)
    ranks, hidden = scenario.engine.get("tensor_parallel_size", 1), config["hidden_size"]
    middle, columns = config["intermediate_size"] // ranks, heads * config["head_dim"]
    shapes = {(columns + 2 * kv_heads * config["head_dim"], hidden), (hidden, columns)}
    if "num_experts" not in config:
        shapes |= {(2 * middle, hidden), (hidden, middle)}
    rows = _rows(scenario)
    for n, k in sorted(shapes):
        for m in rows:
            yield from prepare.specs_for(_problem(scenario, n, k), m)


def _problem(scenario: Scenario, n: int, k: int) -> LinearProblem:
    """The product of a layer with one row of x."""
    form = NVFP4 if scenario.model == FP4 else integers(4, GROUP)
    return LinearProblem(1, n, k, k, form, DTYPES[_dtype(scenario)])


def _rows(scenario: Scenario) -> list[int]:
    """Numbers of rows that a scenario's engine runs."""
    captured = scenario.engine.get("compilation_config", GRAPHS)["cudagraph_capture_sizes"]
    return prepare.RowCounts(tuple(captured), scenario.chunk).all()


def _expert_kernels(scenario: Scenario) -> Iterator[KernelSpec]:
    config, form, dtype = {**CONFIG, **scenario.model}, integers(4, GROUP), _dtype(scenario)
    count, hidden, middle = config["num_experts"], config["hidden_size"], config["moe_intermediate_size"]
    gate_up = ExpertsForm(count, 2 * middle, hidden, hidden, form, dtype, 0)
    down = ExpertsForm(count, hidden, middle, middle, form, dtype, 0)
    tokens = expert_kernels.tokens_of(_rows(scenario), MAX_TOKENS)
    yield from expert_kernels.specs(gate_up, down, config["num_experts_per_tok"], tokens, False)
    for tile in TILE_TOKENS:
        yield RouterSpec(RouterConfig(DTYPES[dtype], lane_experts=lane_experts_of(count), tile_tokens=tile))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("families", nargs="*", choices=["", *SCENARIOS], default="", metavar="FAMILY")
    options = parser.parse_args(arguments)
    file: Path = options.file
    found = specs(options.families or [family for family in SCENARIOS if family != "two"])
    wanted.write(file, found, ARCH)
    print(f"{len(found)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
