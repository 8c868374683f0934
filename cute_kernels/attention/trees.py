"""Decode attention for trees of drafted tokens. A tree mask says which of a request's new tokens each query sees."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.arguments import check_contiguous, check_shape, check_tensors
from cute_kernels.attention.extend import extend_attention

# Options of `decode_attention` that do not go with a tree's mask, and what one is called.
REFUSED = {"attn_bias": "a tensor", "q_shift": "a tensor", "transform": "one"}
REFUSED |= {"k_tail": "a tensor", "tail_slots": "a tensor"}


def attend_to_trees(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `decode_attention` with a tree's mask by calling `extend_attention`. Returns (out, lse).

    Args:
        q, out: [batch, q_len, num_q_heads, head_dim].
        k_cache, v_cache, seq_lens: as for `decode_attention`.
        tree_mask: int32 [batch, q_len, words].
        options: as for `extend_attention`; options in `REFUSED` are refused.

    Raises TypeError and ValueError, naming the argument, what came and what is wanted.
    """
    for name, what in REFUSED.items():
        if options.pop(name, None) is not None:
            raise ValueError(f"{name}: got {what} beside a tree_mask, want None: the mask of a tree is all there is")
    check_tensors(q=q, tree_mask=tree_mask)
    if q.dim() != 4:
        raise ValueError(f"q: got {q.dim()} dimensions, want 4: [batch, q_len, num_q_heads, head_dim]")
    batch, q_len = q.shape[:2]
    check_shape("tree_mask", tree_mask, batch, q_len, "words")
    if out is not None:
        check_tensors(out=out)
        check_shape("out", out, *q.shape, why=", that of q")
        check_contiguous("out", out)
    result, lse = extend_attention(
        q.reshape(batch * q_len, *q.shape[2:]),
        k_cache,
        v_cache,
        seq_lens,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len,
        tree_mask=tree_mask.reshape(batch * q_len, tree_mask.shape[2]),
        out=None if out is None else out.view(batch * q_len, *q.shape[2:]),
        return_lse=True,
        **options,
    )
    return (result.view(q.shape) if out is None else out), lse.view(q.shape[:3])
