"""What a hybrid's log-probabilities lose by rows of a cache: `python -m tests.gpu.emulate_rows [FORMAT]`, on a CPU.

The served scenario's model runs in fp32, over K and V as they are and as the format returns them, for every query: an
engine reads a prompt's first chunk as it is, so it loses less. What comes out bounds `test_vllm_serving`'s hybrid.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cute_kernels.kv_cache import dequantize_kv, quantize_kv
from cute_kernels.names import KvFormatName
from tests.gpu.serve_vllm import NEW_TOKENS, prompts, write_model_of_transformers
from tests.gpu.vllm_scenarios import CONFIG, HYBRID

PARTS = (0.5, 0.9, 0.99)  # as `test_vllm_serving.Bound` has them


class Attention:
    """Attention of a model of transformers over rows of a format; of None over K and V as they are."""

    kv_format: KvFormatName | None = None

    def __call__(self, module: Any, q: Any, k: Any, v: Any, mask: object, scaling: float, **_: Any) -> tuple[Any, None]:
        k, v = (self.stored(x) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        if self.kv_format is None:
            return x
        rows = quantize_kv(x.half().transpose(1, 2).contiguous(), kv_format=self.kv_format)
        return dequantize_kv(rows, kv_format=self.kv_format, head_dim=x.shape[-1], dtype=x.dtype).transpose(1, 2)


@torch.no_grad()
def losses(kv_format: KvFormatName) -> list[float]:
    """How far the log-probability of each step's best token is from that of exact K and V, in ascending order."""
    attention, generator = Attention(), torch.Generator().manual_seed(2)
    ALL_ATTENTION_FUNCTIONS.register("emulated", attention)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps({**CONFIG, **HYBRID}))
        write_model_of_transformers(Path(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="emulated").eval()
    found = []
    for ids in prompts():
        more = torch.randint(5, CONFIG["vocab_size"], (NEW_TOKENS - 1,), generator=generator).tolist()
        results = []
        for attention.kv_format in (None, kv_format):
            logits = model(torch.tensor([ids + more]), use_cache=False).logits[0, len(ids) - 1 :]
            results.append(logits.log_softmax(-1))
        best = results[0].argmax(-1, keepdim=True)
        found += (results[0] - results[1]).gather(1, best).abs().flatten().tolist()
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kv_format", nargs="?", default="int8_token_head", metavar="FORMAT")
    ordered = losses(parser.parse_args(arguments).kv_format)
    print(*(f"{ordered[int(len(ordered) * part)]:.4f}" for part in PARTS), f"{ordered[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
