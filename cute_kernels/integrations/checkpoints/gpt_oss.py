"""Names of gpt-oss's tensors: Hugging Face's files and the original ones, mapped to those of transformers' models.

| files | the experts' first projection |
|---|---|
| Hugging Face | `mlp.experts.gate_up_proj_blocks`, `_scales`, `_bias` |
| original | `mlp.mlp1_weight.blocks`, `.scales`, `mlp.mlp1_bias` |
| here | `mlp.experts.gate_up_proj.blocks`, `.scales`, `.bias` |

All other tensors of original files are renamed, too, and `attn.qkv` is split by rows into q, k and v. The original
config.json has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cute_kernels.integrations.checkpoints.headers import Entry, Headers

_HUGGING_FACE = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)_(blocks|scales|bias)")
_BLOCK = re.compile(r"block\.(\d+)\.(.*)")
_EXPERTS = "mlp.experts"
_OF_BLOCKS = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "attn.sinks": "self_attn.sinks",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    **{
        f"mlp.{theirs}_{own}": f"{_EXPERTS}.{ours}.{ending}"
        for theirs, ours in (("mlp1", "gate_up_proj"), ("mlp2", "down_proj"))
        for own, ending in (("weight.blocks", "blocks"), ("weight.scales", "scales"), ("bias", "bias"))
    },
}
_OTHERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
_SETTINGS = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
_SAME_SETTINGS = (
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim",
    "num_attention_heads", "num_key_value_heads", "sliding_window",
)  # fmt: skip
_ROPE = {  # of YaRN
    "rope_theta": "rope_theta",
    "rope_scaling_factor": "factor",
    "rope_ntk_beta": "beta_fast",
    "rope_ntk_alpha": "beta_slow",
    "initial_context_length": "original_max_position_embeddings",
}


def is_original(settings: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is that of gpt-oss's original files."""
    return "model_type" not in settings and settings.keys() >= {*_SETTINGS, *_ROPE}


def common_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the settings of an original config.json to those of transformers' GptOssConfig.

    Raises:
        ValueError: the file lacks a setting; the message names it.
    """
    for name in _SAME_SETTINGS:
        if name not in settings:
            raise ValueError(f"config.json: got no {name}, want it beside num_experts, as gpt-oss's original files do")
    rope = {theirs: settings[own] for own, theirs in _ROPE.items()}
    positions = int(rope["original_max_position_embeddings"] * rope["factor"])
    return {
        **{name: settings[name] for name in _SAME_SETTINGS},
        **{theirs: settings[own] for own, theirs in _SETTINGS.items()},
        "rope_parameters": {"rope_type": "yarn", "truncate": False, **rope},
        "max_position_embeddings": positions,
        "dtype": "bfloat16",
    }


def with_common_names(entries: Headers) -> Headers:
    """Renames gpt-oss's tensors as the module's table says; tensors of other models keep their names.

    Raises:
        ValueError: original files have a tensor that gpt-oss does not have.
    """
    original = any(_BLOCK.fullmatch(key) and key.endswith(".mlp.mlp1_weight.blocks") for key in entries)
    found = Headers()
    found.metadata = entries.metadata
    for key, entry in entries.items():
        if original:
            found.update(_from_original(key, entry, entries))
        else:
            match = _HUGGING_FACE.fullmatch(key)
            found[f"{match[1]}.{match[2]}" if match and f"{match[1]}_blocks" in entries else key] = entry
    return found


def _from_original(key: str, entry: Entry, entries: Headers) -> Iterator[tuple[str, Entry]]:
    block = _BLOCK.fullmatch(key)
    if block is None:
        if key not in _OTHERS:
            raise ValueError(f"{key}: got a tensor of that name, want those of gpt-oss's original files")
        yield _OTHERS[key], entry
        return
    layer, own = f"model.layers.{block[1]}", block[2]
    if own in _OF_BLOCKS:
        yield f"{layer}.{_OF_BLOCKS[own]}", entry
        return
    out = entries.get(f"block.{block[1]}.attn.out.weight")
    if not own.startswith("attn.qkv.") or out is None or len(out.shape) != 2:
        raise ValueError(f"{key}: got a tensor of that name, want those of gpt-oss's original files")
    queries = out.shape[1]
    keys = (entry.shape[0] - queries) // 2
    ends = (0, queries, queries + keys, entry.shape[0])
    for name, (start, stop) in zip("qkv", pairwise(ends), strict=True):
        part = replace(entry, shape=(stop - start, *entry.shape[1:]), rows=(start, stop))
        yield f"{layer}.self_attn.{name}_proj.{own.rpartition('.')[2]}", part
