"""A layer of experts with 4-bit weights, as a router calls it.

python examples/moe_layer.py
"""

import torch

from cute_kernels import fused_moe, quantize_experts

device = "cuda" if torch.cuda.is_available() else "cpu"
experts, topk, hidden, inner, tokens = 8, 2, 256, 512, 5


def weights(rows: int, columns: int) -> torch.Tensor:
    return columns**-0.5 * torch.randn(experts, rows, columns, dtype=torch.bfloat16, device=device)


# A checkpoint's gate_up_proj has all rows of gate, then all of up; the kernel wants them in turn.
gate_up_proj, down_proj = weights(2 * inner, hidden), weights(hidden, inner)
gate_up = quantize_experts(gate_up_proj, group_size=128, halves_in_turn=True)
down = quantize_experts(down_proj, group_size=128)

x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
logits = torch.randn(tokens, experts, device=device)  # a router's
topk_weights, topk_ids = logits.softmax(dim=-1).topk(topk)
y = fused_moe(x, gate_up, down, topk_weights, topk_ids)

exact = torch.zeros_like(x, dtype=torch.float32)
for token in range(tokens):
    for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
        gate, up = (gate_up_proj[expert] @ x[token]).chunk(2)
        exact[token] += weight * (down_proj[expert] @ (torch.nn.functional.silu(gate) * up)).float()
error = ((y.float() - exact).norm() / exact.norm()).item()
print(f"{gate_up}\n{down}\nrelative difference from 16 bits: {error:.3f}")
assert error < 0.25
