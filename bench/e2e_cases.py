"""Starts of an engine as data: which model, weights, cache and plug-in, and what follows from that for any engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench import e2e_mixed
from bench.e2e_models import MODELS
from bench.environment import ROOT

ENTRY_POINTS = """[vllm.general_plugins]
cute_kernels = cute_kernels.integrations.vllm:register
[sglang.srt.plugins]
cute_kernels = cute_kernels.integrations.sglang:register
"""
WEIGHTS = ("bf16", "fp8", "fp8_block", "w4", "w8", "mxfp4", "nvfp4")
GRAMMAR = "MODEL:WEIGHTS:KV:PLUGIN[:KV_FORMAT][/PAGE][-tpGPUS][@B,B or @mixed]"
SEVERAL_GPUS = {
    # No addresses are looked up, and nothing is sent by NVLink's multicast, which not every machine lends.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",  # of the norms that it fuses; by itself it prefers multicast
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""The environment of engines that share a model out among GPUs."""


@dataclass(frozen=True)
class Case:
    """One start of the engine.

    Attributes:
        model: one of MODELS. weights: one of WEIGHTS. Integers have a scale for each group of 128; FP8 has one for each
            channel, and its activations one for each token; FP8 in blocks is DeepSeek's; NVFP4 has activations in 16
            bits; gpt-oss has experts in MXFP4.
        kv: what --kv-cache-dtype is given.
        plugin: "off", "on", or a list of seams as CUTE_KERNELS_VLLM takes it. With float_linear among them, activations
            stay in 16 bits.
        kv_format: of this package, instead of what ``kv`` says; empty for none.
        batches: requests at a time. context: tokens of a prompt.
        beside: whether other engines have memory on the same GPU: the cache has room for the largest batch alone.
        kernels: whether the kernels of a step are recorded, too.
        block_size: tokens of a page of the cache; 0 for what the engine chooses.
        engine: "vllm" or "sglang", a module of this folder each: `bench.e2e_sglang` says what the names mean there.
        mixed: whether it is served `bench.e2e_mixed`'s load instead of batches, with vLLM alone.
        gpus: that share the model out (tensor parallelism).
    """

    model: str
    weights: str
    kv: str
    plugin: str
    kv_format: str = ""
    batches: tuple[int, ...] = (1, 32)
    context: int = 8192
    beside: bool = False
    kernels: bool = False
    block_size: int = 0
    engine: str = "vllm"
    mixed: bool = False
    gpus: int = 1

    @property
    def name(self) -> str:
        seams = self.plugin.replace(",", "+")
        name = ":".join((self.model, self.weights, self.kv, seams, *([self.kv_format] if self.kv_format else [])))
        name = f"{name}/{self.block_size}" if self.block_size else name
        name = f"{name}-tp{self.gpus}" if self.gpus > 1 else name
        return f"{name}@mixed" if self.mixed else name

    def chosen(self) -> dict[str, Any]:
        """The fields that are not the usual ones, which a checkout from before the others has, too."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, usual) in found.items() if value != usual}


def case_of(text: str) -> Case:
    """A case from its name, as GRAMMAR has it.

    Raises:
        ValueError: a part of it is unknown.
    """
    name, _, batches = text.partition("@")
    mixed, batches = batches == "mixed", str(e2e_mixed.REQUESTS) if batches == "mixed" else batches
    cut = re.fullmatch(r"([^/]*?)(?:/(\d+))?(?:-tp(\d+))?", name)
    parts = cut[1].split(":") if cut else []
    known = len(parts) in (4, 5) and parts[0] in MODELS and parts[1] in WEIGHTS
    known = known and (parts[0] == "gpt-oss-20b" or parts[1] != "mxfp4") and re.fullmatch("[a-z_+]+", parts[3])
    if cut is None or not known:
        raise ValueError(f"case: got {text!r}, want {GRAMMAR}, of {', '.join(MODELS)} and {', '.join(WEIGHTS)}")
    gpus = int(cut[3] or 1)
    if not gpus or MODELS[parts[0]]["num_attention_heads"] % gpus:
        raise ValueError(f"case: got {text!r}, want heads of {parts[0]} that so many GPUs can share out")
    model, weights, kv, plugin, *kv_format = parts
    counts = tuple(int(count) for count in batches.split(",")) if batches else Case.batches
    seams, tokens = plugin.replace("+", ","), int(cut[2] or 0)
    return Case(model, weights, kv, seams, *kv_format, batches=counts, block_size=tokens, mixed=mixed, gpus=gpus)


def environment_of(case: Case, folder: Path, tree: Path = ROOT) -> dict[str, str]:
    """The environment of a case's process. The plugin of ``tree`` is found as vLLM finds an installed one."""
    packages = folder / "packages"
    info = packages / "cute_kernels_checkout-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-kernels-checkout\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = [str(packages), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "CUTE_KERNELS_VLLM": {"off": "0", "on": "1"}.get(case.plugin, case.plugin),
        "CUTE_KERNELS_VLLM_KV_FORMAT": case.kv_format,
        **({"CUTE_KERNELS_VLLM_ACTIVATIONS": "16bit"} if "float_linear" in case.plugin.split(",") else {}),
        "CUTE_KERNELS_SGLANG": "0" if case.plugin == "off" else "1",
        **({"VLLM_CACHE_ROOT": str(folder / "cache")} if case.beside else {}),  # no two write the same graphs
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **(SEVERAL_GPUS if case.gpus > 1 else {}),
    }


def model_folder(case: Case, folder: Path) -> Path:
    """A folder with the configuration of a case's model."""
    config: dict[str, Any] = {
        **MODELS[case.model],
        "max_position_embeddings": case.context + 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if case.weights == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    elif case.weights == "fp8":
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**fp8, "strategy": "channel", "dynamic": False}
        config["quantization_config"] = _compressed(
            "float-quantized", weights=weights, input_activations={**fp8, "strategy": "token", "dynamic": True}
        )
    elif case.weights == "fp8_block":
        block = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", **block}
    elif case.weights == "nvfp4":
        fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        config["quantization_config"] = _compressed("nvfp4-pack-quantized", weights=fp4)
    elif case.weights != "bf16":
        weights = {"num_bits": int(case.weights[1:]), "type": "int", "symmetric": True, "strategy": "group"}
        config["quantization_config"] = _compressed("pack-quantized", weights={**weights, "group_size": 128})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _compressed(packing: str, **schemes: Mapping[str, object]) -> dict[str, object]:
    """What a configuration says of layers that compressed-tensors packed so, but for the head and routers."""
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], **schemes}},
    }


def cache_tokens(case: Case) -> int:
    """Tokens of a cache with room for the largest batch."""
    return max(case.batches) * (case.context + 256) + 4096  # pages that are not full, and the one that is never used


def cache_bytes(case: Case) -> int:
    """Of a GPU's cache with room for the largest batch."""
    from cute_kernels.formats.kv import format_of

    model = MODELS[case.model]
    forms = {"auto": "bf16", "fp8": "e4m3_tensor", "int8_per_token_head": "int8_token_head"}
    forms["int4_per_token_head"] = "int4_g1"
    names = (case.kv_format or forms[case.kv]).split(",")
    head_dim = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    row = sum(format_of(name).row_bytes(head_dim) for name in (names[0], names[-1]))
    heads = max(model["num_key_value_heads"] // case.gpus, 1)
    return cache_tokens(case) * model["num_hidden_layers"] * heads * row


def prompts_of(case: Case) -> dict[int, list[list[int]]]:
    """Tokens of the prompts of each batch, drawn once for all of them: no two batches share one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        batch: [torch.randint(5, 4000, (case.context,), generator=generator).tolist() for _ in range(batch)]
        for batch in case.batches
    }


def warm_up_prompt(case: Case) -> list[int]:
    """Tokens of a prompt before those that are timed: engines compile kernels at their first one."""
    return [5 + token % 3000 for token in range(case.context)]
