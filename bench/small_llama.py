"""A small model of Llama's architecture, trained here for minutes on real text, and a view into its attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Say = Callable[[str], None]
VOCABULARY = 256  # bytes
ATTENTION_NAME = "bench_accuracy"
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Scale:
    """How large the model is, and how it is trained: for ``seconds``, or ``max_steps`` if that comes first."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int
    learning_rate: float
    seconds: float
    max_steps: int = 1_000_000


ON_GPU = Scale(512, 1408, 8, 8, 2, 128, context=1024, batch=64, learning_rate=1e-3, seconds=150)
ON_CPU = Scale(128, 352, 3, 4, 2, 64, context=256, batch=16, learning_rate=3e-3, seconds=60)
QUICK = Scale(64, 128, 2, 2, 1, 64, context=64, batch=8, learning_rate=3e-3, seconds=3600, max_steps=20)


def llama_config(scale: Any, **others: Any) -> Any:
    """The `LlamaConfig` of a scale's dimensions, without tokens of its own for beginning, end and padding."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=scale.hidden_size,
        intermediate_size=scale.intermediate_size,
        num_hidden_layers=scale.num_layers,
        num_attention_heads=scale.num_q_heads,
        num_key_value_heads=scale.num_kv_heads,
        head_dim=scale.head_dim,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        vocab_size=VOCABULARY,
        **others,
    )


def make_model(scale: Scale, device: torch.device) -> Any:
    """The model with random fp32 weights, the same in every run."""
    from transformers import LlamaForCausalLM

    config = llama_config(scale, max_position_embeddings=scale.context, tie_word_embeddings=True)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def train(model: Any, text: torch.Tensor, scale: Scale, say: Say) -> dict[str, float]:
    """Trains on windows of ``text`` (uint8 [bytes]) drawn at random; returns steps, tokens, seconds and last loss."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    text = text.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=scale.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
    )
    generator = torch.Generator(device=device).manual_seed(0)
    model.train()
    begin = last_said = time.perf_counter()
    step, loss = 0, torch.zeros(())
    while (progress := max((time.perf_counter() - begin) / scale.seconds, step / scale.max_steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = scale.learning_rate * _schedule(step, progress)
        windows = draw(text, scale.batch, scale.context, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = model(windows[:, :-1], use_cache=False).logits
        loss = token_losses(logits, windows).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0 and cuda:
            torch.cuda.synchronize()  # the clock is the host's, which would run ahead
        if time.perf_counter() - last_said > 10:
            last_said = time.perf_counter()
            say(f"training: {100 * progress:3.0f} %, step {step}, loss {loss.item() / math.log(2):.3f} bits per byte")
    model.eval()
    seconds = time.perf_counter() - begin
    tokens = step * scale.batch * scale.context
    return {"steps": step, "tokens": tokens, "seconds": round(seconds, 1), "loss": round(loss.item(), 4)}


def draw(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Windows from anywhere in the text: int64 [count, context + 1], the last column only to be predicted."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(context + 1, device=text.device)].long()


def spread(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Windows evenly over the text: int64 [count, context + 1]."""
    starts = torch.arange(count) * (len(text) - context - 1) // max(count - 1, 1)
    return text[starts[:, None] + torch.arange(context + 1)].long()


def token_losses(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of each next byte, nats, fp32 [windows, context]."""
    losses = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return losses.reshape(logits.shape[:2])


def _schedule(step: int, progress: float) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


# -- attention seen from inside ---------------------------------------------------------------------------------------

# (layer, q [batch, num_q_heads, tokens, head_dim], k and v [batch, num_kv_heads, tokens, head_dim], after RoPE) to the
# attention's output [batch, tokens, num_q_heads, head_dim].
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def attention_through(model: Any, attention: Attention):
    """Within the block, the model's attention is ``attention``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def forward(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any):
        return attention(module.layer_idx, query, key, value), None

    AttentionInterface.register(ATTENTION_NAME, forward)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *arguments, **options: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What `Attention` returns for plain causal attention."""
    group = q.shape[1] // k.shape[1]  # repeated, because torch's fast fp32 kernel does not share heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).contiguous()
