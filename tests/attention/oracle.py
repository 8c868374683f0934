"""Decode attention written out once more, in fp64 and without sparing: one request, one head, one matrix at a time.

It shares nothing with the package's reference but how a format decodes a row, and nothing of how that one goes about
it: rows are fetched token by token, the mask is a matrix made element by element, probabilities are a matrix.
"""

from __future__ import annotations

import itertools
import math

import torch

from cute_kernels.formats.kv import format_of
from tests.attention.cases import Call


def oracle(call: Call, softmax_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [batch, q_len, num_q_heads, v_head_dim], lse [batch, q_len, num_q_heads]) of a call on the CPU, fp64."""
    answers = [request(call, b, softmax_scale) for b in range(call.q.shape[0])]
    return torch.stack([out for out, _ in answers]), torch.stack([lse for _, lse in answers])


def request(call: Call, b: int, softmax_scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    q, length = call.q[b].double(), int(call.seq_lens[b])
    q_len, num_q_heads, head_dim = q.shape
    keys = tokens_of(call, b, length, 0, head_dim)
    v_head_dim = next(d for d in range(8, 513, 8) if row_size(call.format_names[1], d) == call.v_cache.shape[3])
    values = tokens_of(call, b, length, 1, v_head_dim)
    group = num_q_heads // keys.shape[1]
    first = length - q_len
    hidden = torch.zeros(q_len, length, dtype=torch.bool)
    distance = torch.zeros(q_len, length, dtype=torch.float64)
    for i, j in itertools.product(range(q_len), range(length)):
        hidden[i, j], distance[i, j] = not sees(call, first + i, j), j - (first + i)
    out, lse = q.new_zeros(q_len, num_q_heads, v_head_dim), q.new_zeros(q_len, num_q_heads)
    for h in range(num_q_heads):
        score = q[:, h] @ keys[:, h // group].T * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
        cap, slopes, bias = (call.options.get(name) for name in ("softcap", "alibi_slopes", "attn_bias"))
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        if slopes is not None:
            score = score + float(slopes[h]) * distance
        if bias is not None:
            aligned = bias.double()[(None,) * (4 - bias.dim())]
            row = aligned[b if aligned.shape[0] > 1 else 0, :, h if aligned.shape[2] > 1 else 0]
            score = score + (row[:, :length] if row.shape[1] > 1 else row)
        score = torch.where(hidden, -math.inf, score)
        lse[:, h] = score.logsumexp(dim=1)
        out[:, h] = probabilities(score, call.options.get("sinks"), h) @ values[:, h // group]
    return out, lse


def probabilities(score: torch.Tensor, sinks: torch.Tensor | None, h: int) -> torch.Tensor:
    """Softmax along dim 1 with the sink as one more column, which is then dropped; rows without a key are 0."""
    sink = -math.inf if sinks is None else float(sinks[h])
    if sink == math.inf:
        return torch.zeros_like(score)
    logits = torch.cat((score, score.new_full((score.shape[0], 1), sink)), dim=1)
    return torch.softmax(logits, dim=1).nan_to_num(nan=0.0)[:, :-1]


def sees(call: Call, p: int, j: int) -> bool:
    """Whether the query at position p sees the key at position j of its request."""
    window = call.options.get("window_size")
    if window is not None and not p - window < j <= p:
        return False
    return j <= p or not call.options.get("causal", True)


def tokens_of(call: Call, b: int, length: int, which: int, head_dim: int) -> torch.Tensor:
    """The first tokens of a request: fp64 [length, num_kv_heads, head_dim]; which: 0 for K, 1 for V.

    Rows that no query sees are 0 here.
    """
    form = format_of(call.format_names[which])
    cache, scale = (call.k_cache, call.v_cache)[which], call.options.get(("k_scale", "v_scale")[which])
    table, head_major = call.options.get("block_table"), call.options.get("cache_layout") == "HND"
    size = cache.shape[2] if head_major else cache.shape[1]
    rows = cache.new_zeros(length, cache.shape[1] if head_major else cache.shape[2], cache.shape[3])
    for t in range(length):
        if any(sees(call, length - call.q.shape[1] + i, t) for i in range(call.q.shape[1])):
            block = b if table is None else int(table[b, t // size])
            rows[t] = cache[block, :, t % size] if head_major else cache[block, t % size]
    if scale is None:
        return form.dequantize(rows, head_dim, torch.float64)
    codes = form.dequantize(rows, head_dim, torch.float64, torch.ones(()))
    factors = scale.double().reshape(-1, scale.shape[-1] if form.given_scale == "channel" else 1)
    return codes * factors


def row_size(name: str, head_dim: int) -> int:
    """Elements of a row by the table of docs/api.md."""
    if name in ("bf16", "fp16"):
        return head_dim
    groups = int(name.rsplit("_g", 1)[1]) if "_g" in name else 1 if name.endswith("token_head") else 0
    return head_dim // 2 + 4 * groups if name.startswith("int4") else head_dim + 4 * groups
