"""An engine's decode loop: KVCache owns the pages, sequences come and go, and each layer's step is one call.

python examples/decode_loop.py
"""

import torch

from cute_kernels import KVCache, Rope

device = "cuda" if torch.cuda.is_available() else "cpu"
num_layers, num_q_heads, num_kv_heads, head_dim = 2, 8, 2, 128
rope = Rope(rotary_dim=head_dim)
cache = KVCache(num_layers, 64, 16, num_kv_heads, head_dim, kv_format=("int8_token_head", "int4_g4"), device=device)
batch = cache.make_batch(max_batch=4)


def projections(tokens: int) -> list[torch.Tensor]:
    """q, k and v [tokens, heads, head_dim] of new tokens: random numbers in place of a model's."""
    heads = (num_q_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(tokens, h, head_dim, dtype=torch.bfloat16, device=device) for h in heads]


# Two prompts arrive. Prefill writes their K and V; attention among prompt tokens is whatever the engine uses for it.
prompts = {"a": 40, "b": 7}
for name, length in prompts.items():
    cache.allocate(name, length)
batch.update(list(prompts), list(prompts.values()))
for layer in range(num_layers):
    q, k, v = projections(sum(prompts.values()))
    cache.append(layer, batch, k, v, q=q, rope=rope)

running = ["a", "b"]
for step in range(8):
    if step == 3:  # "b" is done, a continuation of "a" shares its pages, and goes its own way from here
        cache.free("b")
        cache.fork("a", "c")
        running = ["a", "c"]
    cache.extend_all(running)  # pages for one token more of each
    batch.update(running)  # their addresses and lengths, to the device
    for layer in range(num_layers):
        q, k, v = (x.unsqueeze(1) for x in projections(len(running)))  # [batch, 1, heads, head_dim]
        out = cache.append_and_attend(layer, batch, q, k, v, rope=rope)
        assert out.shape == (len(running), 1, num_q_heads, head_dim)

print("tokens of each sequence:", {name: cache.seq_len(name) for name in running})
print(cache.memory_report())
