"""A Hugging Face model decodes with 4-bit weights and a cache of INT8 keys and INT4 values.

An import and a call; `generate` is called as before.

pip install ".[compiler,transformers]"    # in a checkout
python examples/transformers_model.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cute_kernels.integrations import transformers as ck

device = "cuda" if torch.cuda.is_available() else "cpu"
# Any model that generates would do; this one is small, and random.
config = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
prompt = torch.randint(0, 256, (2, 20), device=device)

print(ck.accelerate(model, kv_format=("int8_token_head", "int4_g4"), weights="w4g128"))
tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)

assert tokens.shape == (2, 30)
