"""What loading takes beside the model: one layer of the file, counted tensor by tensor on the CPU.

Everything is counted that lives at once, read and packed, so it bounds what a GPU needs, where read tensors go as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GptOssConfig, GptOssForCausalLM

from cute_kernels.gemm.experts import QuantizedRoutedExperts
from cute_kernels.integrations.checkpoints import load_model

LAYERS, EXPERTS = 6, 16
# gpt-oss-120b has 36 layers of 128 experts of 2880 x 2880, 45 times these.
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 192,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations took or made, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


def random_directory(path: Path, sizes: dict[str, Any] = SIZES) -> int:
    """Writes one of gpt-oss's shapes; returns the bytes of a layer's experts."""
    path.mkdir()
    config = GptOssConfig(**sizes, dtype="bfloat16", architectures=["GptOssForCausalLM"])
    with torch.device("meta"):
        skeleton = GptOssForCausalLM(config)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for key, tensor in skeleton.state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = torch.randn(tensor.shape, generator=generator).bfloat16()
            continue
        experts, k, n = tensor.shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": torch.full(blocks.shape[:3], 120, dtype=torch.uint8)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(settings))
    return sum(t.nbytes for key, t in tensors.items() if ".layers.0." in key and key.endswith(("_blocks", "_scales")))


def test_loading_gpt_oss_takes_its_packed_weights_and_one_layer(tmp_path):
    layer = random_directory(tmp_path / "random")
    told: list[tuple[str, int, int]] = []
    with LiveBytes() as found:
        model = load_model(tmp_path / "random", device="cpu", progress=lambda *step: told.append(step))
    blocks = [module for module in model.modules() if isinstance(module, QuantizedRoutedExperts)]
    packed = sum(part.weight.nbytes for block in blocks for part in (block.gate_up, block.down))
    assert len(blocks) == LAYERS and packed >= LAYERS * layer
    assert packed < found.peak <= 1.1 * packed + layer
    assert [done for _, done, total in told] == list(range(1, 2 * LAYERS + 1)) and {total for *_, total in told} == {12}
