"""Loading layers of gpt-oss-120b's shapes to a GPU: what it takes there beside the packed weights, and how long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from cute_kernels.gemm.experts import QuantizedRoutedExperts
from cute_kernels.integrations.checkpoints import load_model
from tests.integrations.checkpoints.test_loading_memory import random_directory

LAYERS, ALL_LAYERS, MOST_SECONDS = 3, 36, 120
SIZES: dict[str, Any] = {  # of gpt-oss-120b, but for a small vocabulary: experts are 60.9 of its 65.3 GB
    "num_hidden_layers": LAYERS,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def test_layers_of_gpt_oss_120b_take_their_packed_weights_one_layer_and_their_share_of_two_minutes(tmp_path: Path):
    layer = random_directory(tmp_path / "random", SIZES)
    told: list[str] = []
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = load_model(tmp_path / "random", device="cuda", progress=lambda name, *_: told.append(name))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before
    blocks = [module for module in model.modules() if isinstance(module, QuantizedRoutedExperts)]
    packed = sum(part.weight.nbytes for block in blocks for part in (block.gate_up, block.down))
    print(f"{seconds:.1f} s, peak {peak / 1e9:.2f} GB, packed {packed / 1e9:.2f} GB, a layer {layer / 1e9:.2f} GB")
    assert len(blocks) == LAYERS and len(told) == 2 * LAYERS
    others = sum(p.nbytes for p in model.parameters())
    assert peak <= 1.1 * packed + layer + others
    assert seconds <= MOST_SECONDS * LAYERS / ALL_LAYERS
