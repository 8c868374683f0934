"""The reference of MLA decode in PyTorch. CPU tensors run it, and tests compare kernels with it.

After DeepSeek-V2's absorption of the up-projections, decode is multi-query attention over one head of cached tokens
(DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). All of a token is the key, its first 512 columns are the value. Tokens
are dequantised exactly (code * scale in fp32). Scores, softmax and accumulators are in ``compute_dtype``.

LSE is FlashMLA's: the natural log of the sum of exp(softmax_scale * q . k). A query that sees no token has LSE +inf and
output 0. A sink is one more logit in the softmax's denominator without a value. It makes the output out * exp(lse) /
(exp(lse) + exp(sink)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels import blocks
from cute_kernels.mla import checks
from cute_kernels.mla.formats import V_DIM
from cute_kernels.mla.problem import CacheShape, DenseProblem, SparseExtras, SparseProblem

_BLOCK_ELEMENTS = 2**27  # of tokens, or scores, that are held at a time


def mla_decode_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = None,
    causal: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes dense decode; arguments as :func:`cute_kernels.mla.mla_decode`.

    compute_dtype: float32, or float64 for use as a yardstick.

    Returns out [batch, q_len, num_heads, 512] and lse [batch, q_len, num_heads], both in `compute_dtype`. Works on CPU
    and CUDA; reads lengths on the host.

    Raises TypeError and ValueError as `mla_decode`, also for lengths out of range and pages outside the cache.
    """
    problem = checks.dense_problem(q, cache, block_table, seq_lens, kv_format=kv_format, causal=causal)
    checks.check_dense_values(problem, block_table, seq_lens)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(problem.out_shape, dtype=compute_dtype, device=q.device)
    lse = torch.full(problem.out_shape[:3], torch.inf, dtype=compute_dtype, device=q.device)
    for request, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        keys_at = torch.arange(length, device=q.device)
        pages = block_table[request, keys_at // problem.cache.page_size].to(torch.int64)
        slots = pages * problem.cache.page_size + keys_at % problem.cache.page_size
        tokens = problem.cache.form.fetch(cache, slots, problem.head_dim, compute_dtype)
        for first, stop in _blocks(problem.q_len, problem.num_heads * length):
            here = slice(first, stop)
            seen = _seen_by(problem, length, keys_at, here)
            state = attend(q[request, here], tokens.expand(stop - first, -1, -1), seen, scale)
            out[request, here], lse[request, here] = state.out, state.lse
    return out, lse


def _seen_by(problem: DenseProblem, length: int, keys_at: torch.Tensor, queries: slice) -> torch.Tensor:
    """Returns which tokens each query sees, bool [queries, tokens]. The queries are the last tokens of a request."""
    at = torch.arange(queries.start, queries.stop, device=keys_at.device) + (length - problem.q_len)
    if not problem.causal:
        return torch.ones((at.shape[0], length), dtype=torch.bool, device=keys_at.device)
    return keys_at <= at[:, None]


def sparse_mla_decode_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
    **optional: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes sparse decode; arguments as :func:`cute_kernels.mla.sparse_mla_decode`, ``compute_dtype`` as
    `mla_decode_reference`. optional: fields of `SparseExtras`, by name.

    Returns out [batch, q_len, num_heads, 512], lse and the largest scaled score, both [batch, q_len, num_heads], all
    in `compute_dtype`. A query that sees nothing has out 0, lse +inf and largest score -inf. Works on CPU and CUDA.

    Raises TypeError and ValueError as `sparse_mla_decode`.
    """
    problem = checks.sparse_problem(q, cache, indices, kv_format=kv_format, **optional)
    topk_length, sinks, extra_cache, extra_indices, extra_topk_length = SparseExtras(**optional)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    sources = [_Source(problem.cache, cache, *_slots_of(problem.cache, indices, topk_length))]
    if problem.extra is not None and extra_cache is not None and extra_indices is not None:
        found = _slots_of(problem.extra, extra_indices, extra_topk_length)
        sources.append(_Source(problem.extra, extra_cache, *found))
    out, lse, top = _attend_to_chosen(problem, q, sources, scale, compute_dtype)
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return out, lse, top


@dataclass(frozen=True)
class _Source:
    """A cache and the slots that queries chose, int64 [queries, topk]. ``seen`` is True for the slots that are used."""

    shape: CacheShape
    cache: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor

    def fetch(self, queries: slice, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns tokens [queries, topk, head_dim], with 0 for slots that are not used, as the cache may hold NaN
        there.
        """
        slots, seen = self.slots[queries], self.seen[queries]
        if not self.shape.num_pages:
            return torch.zeros((*slots.shape, head_dim), dtype=dtype, device=slots.device)
        tokens = self.shape.form.fetch(self.cache, slots, head_dim, dtype)
        return tokens.masked_fill(~seen.unsqueeze(-1), 0)


def _slots_of(
    shape: CacheShape, indices: torch.Tensor, length: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (slots int64 [batch * q_len, topk], clamped to the cache; bool of the same shape: which slots are
    used).
    """
    seen = (indices >= 0) & (indices < shape.num_slots)
    if length is not None:
        seen &= torch.arange(indices.shape[2], device=indices.device) < length[:, None, None]
    slots = indices.to(torch.int64).clamp(0, max(shape.num_slots - 1, 0))
    return slots.flatten(0, 1), seen.flatten(0, 1)


def _attend_to_chosen(
    problem: SparseProblem, q: torch.Tensor, sources: list[_Source], scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out without sinks, lse, largest score) over all sources together."""
    queries = q.flatten(0, 1)
    out = torch.zeros((*queries.shape[:2], V_DIM), dtype=dtype, device=q.device)
    lse = torch.full(out.shape[:2], torch.inf, dtype=dtype, device=q.device)
    top = torch.full_like(lse, -torch.inf)
    topk = problem.topk + problem.extra_topk
    for first, stop in _blocks(queries.shape[0] if topk else 0, topk * max(problem.head_dim, problem.num_heads)):
        here = slice(first, stop)
        tokens = torch.cat([source.fetch(here, problem.head_dim, dtype) for source in sources], dim=1)
        seen = torch.cat([source.seen[here] for source in sources], dim=1)
        state = attend(queries[here], tokens, seen, scale)
        out[here], lse[here], top[here] = state.out, state.lse, state.max
    rows = problem.out_shape[:3]
    return out.view(*rows, V_DIM), lse.view(rows), top.view(rows)


# -- one block ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The attention of some queries.

    out: [queries, num_heads, 512]; lse, max (the largest scaled score): [queries, num_heads]. A query that sees no
    token has out 0, lse +inf and max -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max: torch.Tensor


def attend(q: torch.Tensor, tokens: torch.Tensor, seen: torch.Tensor, scale: float) -> State:
    """Computes attention of each query over its own tokens, in the tokens' dtype.

    Args:
        q: [queries, num_heads, head_dim].
        tokens: [queries, topk, head_dim], topk at least 1.
        seen: bool [queries, topk].
    """
    scores = (q.to(tokens.dtype) @ tokens.transpose(1, 2)) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    top = scores.amax(dim=-1)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1))
    total = weights.sum(dim=-1)
    empty = total == 0
    out = weights @ tokens[..., :V_DIM] / total.masked_fill(empty, 1).unsqueeze(-1)
    return State(out, torch.where(empty, torch.inf, top + total.log()), top)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Returns out * exp(lse) / (exp(lse) + exp(sink)). out: [..., num_heads, 512]; lse: [..., num_heads], +inf for
    queries that see no token.
    """
    kept = torch.sigmoid(lse - sinks.to(lse.dtype)).masked_fill(lse == torch.inf, 0)  # inf - inf would be NaN
    return out * kept.unsqueeze(-1)


def _blocks(count: int, elements: int) -> list[tuple[int, int]]:
    """Returns ranges (first, stop) that cover ``count`` items of ``elements`` elements each. A range has at most
    `_BLOCK_ELEMENTS` elements."""
    step = max(1, blocks.elements(_BLOCK_ELEMENTS) // max(elements, 1))
    return [(first, min(first + step, count)) for first in range(0, count, step)]
