"""From an AWQ checkpoint to text: load the directory, accelerate, generate, save it for a faster start.

pip install ".[compiler,transformers]"         # in a checkout
python examples/awq_checkpoint.py [DIRECTORY]    # any that AutoAWQ wrote; without one, a small random one is made
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cute_kernels.integrations import transformers as ck
from cute_kernels.integrations.checkpoints import load_model

GROUP = 128


def make_checkpoint(folder: Path) -> Path:
    """A directory as AutoAWQ writes it: config.json, and of each Linear [N, K] but the output layer qweight, qzeros and
    scales; random codes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tensors = {name: x.bfloat16() for name, x in model.state_dict().items()}
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, torch.nn.Linear):
            n, k = tensors.pop(f"{name}.weight").shape
            words = {"qweight": (k, n // 8), "qzeros": (k // GROUP, n // 8)}
            for own, shape in words.items():
                tensors[f"{name}.{own}"] = torch.randint(-(2**31), 2**31, shape).int()
            tensors[f"{name}.scales"] = torch.rand(k // GROUP, n).half() / 200
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    about = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": about}))
    return folder


parser = argparse.ArgumentParser()
parser.add_argument("directory", nargs="?", type=Path)
given = parser.parse_args().directory
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
folder = Path(tempfile.mkdtemp())
checkpoint = given or make_checkpoint(folder)

# 1. The directory becomes a model whose layers are packed; codes are moved, never changed.
model = load_model(checkpoint, device=device)
# 2. Attention, cache and steps by the kernels; the layers stay as the checkpoint has them.
print(ck.accelerate(model, kv_format=("int8_token_head", "int4_g4"), weights=None))
# 3. transformers' generate, as always. With a tokenizer: inputs = tokenizer("...", return_tensors="pt").to(device)
inputs = {
    "input_ids": torch.arange(3, 19, device=device)[None],
    "attention_mask": torch.ones(1, 16, device=device).long(),
}
tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
print("tokens", tokens[0, 16:].tolist())
# 4. Saved as ours, `from_pretrained` loads the packed bytes as they are, once `register` was called.
model.save_pretrained(folder / "packed")
ck.register()
again = type(model).from_pretrained(folder / "packed").to(device)
ck.accelerate(again, kv_format=("int8_token_head", "int4_g4"))
assert torch.equal(again.generate(**inputs, max_new_tokens=8, do_sample=False), tokens)
print("the same tokens from", folder / "packed")
