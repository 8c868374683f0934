"""Serves a small random model by vLLM and writes what came out: `python -m tests.gpu.serve_vllm SCENARIO RESULT`.

The engine has little room: prompts are prefilled in chunks and beside decoding requests, prefixes are shared, and there
are too few pages for all requests, so that some are preempted and begin again.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 2048
NEW_TOKENS = 24
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


def write_model(folder: Path) -> None:
    """A Llama with random fp16 weights. Its layers do not amplify what rounding does, so that runs can be compared."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, middle, heads, kv = 512, 1024, 8 * 128, 2 * 128

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain * columns**-0.5).half()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden).half(),
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
        for name, shape in shapes.items():
            tensors[f"{layer}.self_attn.{name}.weight"] = matrix(*shape)
        for name, shape in {
            "gate_proj": (middle, hidden),
            "up_proj": (middle, hidden),
            "down_proj": (hidden, middle),
        }.items():
            tensors[f"{layer}.mlp.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden).half()
    save_file(tensors, folder / "model.safetensors")


def prompts() -> list[list[int]]:
    """Prompts of 1 to 700 tokens; every third one begins like another."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(5, VOCABULARY, (300,), generator=generator).tolist()
    found = []
    for index, length in enumerate([1, 2, 15, 16, 17, 63, 64, 65, 130, 200, 257, 400, 511, 700] * 3):
        own = torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
        found.append(shared + own if index % 3 == 0 else own)
    return found


def serve(scenario: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Of each request twice, one run after the other: its tokens, their log-probabilities, and by how much each was the
    best."""
    import vllm

    config = {**CONFIG, **scenario.get("model", {})}
    (folder / "config.json").write_text(json.dumps(config))
    write_model(folder)
    llm = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=scenario.get("chunk", 512),
        num_gpu_blocks_override=scenario["tokens"] // scenario["block_size"],
        block_size=scenario["block_size"],
        gpu_memory_utilization=0.3,
        enable_prefix_caching=True,
        kv_cache_dtype=scenario["kv"],
        disable_log_stats=False,
        **scenario.get("engine", {}),
    )
    sampling = vllm.SamplingParams(
        max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=2
    )
    results = []
    for _ in range(2):  # the second time prefixes are in the cache
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)
        for output in outputs:
            result = output.outputs[0]
            best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in result.logprobs]
            results.append(
                {
                    "tokens": list(result.token_ids),
                    "logprobs": [first for first, *_ in best],
                    "margins": [first - second for first, second, *_ in best],
                }
            )
    from cute_kernels.integrations.vllm import plugin

    return {"results": results, "replaced": [[one.seam, one.reason] for one in plugin.outcomes()]}


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(arguments[1]).write_text(json.dumps(serve(json.loads(arguments[0]), Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1:])
