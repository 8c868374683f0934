"""A Hugging Face model decodes with an INT4 KV cache: three lines more than without.

pip install "cute-kernels[transformers]"
python examples/transformers_model.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cute_kernels.integrations import transformers as ck

device = "cuda" if torch.cuda.is_available() else "cpu"
# Any Llama would do; this one is small, and random.
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
model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
prompt = torch.randint(0, 256, (2, 20), device=device)

ck.register()
model.set_attn_implementation("cute_kernels")
cache = ck.DecodeCache("int4_g4", max_seq_len=64)
tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=10, do_sample=False)

assert tokens.shape == (2, 30)
print(f"{cache.num_bytes} bytes of K and V for {cache.get_seq_length()} tokens of 2 requests")
