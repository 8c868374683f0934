"""Launching the CUDA kernels of the family on tensors that have been checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.mla.compile import CombineSpec, SparseSpec
from cute_kernels.mla.config import V_HEAD_DIM, CombineConfig, SparseConfig
from cute_kernels.mla.schedule import SparseShape, choose_parts
from cute_kernels.mla.work import STATS_BYTES
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of

if TYPE_CHECKING:
    from cute_kernels.mla.problem import CacheShape, DenseProblem, SparseProblem

MAX_INDEX = 2**31 - 1
NO_CACHE = (0, 0, 1, 0, 0, 0, 0)


@dataclass(frozen=True)
class SparsePlan:
    """What of a launch stays the same from call to call."""

    function: Callable[..., Any]
    combine: Callable[..., Any] | None
    num_parts: int
    part_words: int  # fp32 of all partial results


def dense(
    problem: DenseProblem,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decode has no kernel yet."""
    raise NotImplementedError(f"mla_decode of {problem} has no CUDA kernel yet")


def sparse(
    problem: SparseProblem,
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    max_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out bf16 [batch, q_len, num_heads, 512], lse fp32 [batch, q_len, num_heads]) on the current stream.

    The arguments fit the problem and each other. Raises NotImplementedError for formats without a kernel, and for
    max_logits.
    """
    if q.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return sparse(
                problem, q, cache, indices, softmax_scale, out, topk_length, attn_sink, extra_cache, extra_indices,
                extra_topk_length, max_logits,
            )  # fmt: skip
    if max_logits is not None:
        raise NotImplementedError("max_logits is not written by any CUDA kernel yet")
    plan = _sparse_plan(problem)
    shape = q.shape[:3]
    if out is None:
        out = torch.empty((*shape, V_HEAD_DIM), dtype=q.dtype, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    partials = None
    if plan.part_words:
        partials = torch.empty(plan.part_words, dtype=torch.float32, device=q.device)
    addresses = out.data_ptr(), lse.data_ptr(), _address(attn_sink), _address(partials)
    main = _cache_arguments(problem.cache, cache, indices, problem.topk, topk_length)
    extra = NO_CACHE
    if problem.extra is not None and extra_cache is not None and extra_indices is not None:
        extra = _cache_arguments(problem.extra, extra_cache, extra_indices, problem.extra_topk, extra_topk_length)
    plan.function(q, *addresses, *main, *extra, softmax_scale, plan.num_parts)
    if plan.combine is not None:
        plan.combine(out, *addresses[1:], plan.num_parts)
    return out, lse


def _cache_arguments(
    shape: CacheShape, cache: torch.Tensor, indices: torch.Tensor, topk: int, lengths: torch.Tensor | None
) -> tuple[int, ...]:
    num_tokens = min(shape.num_pages * shape.page_size, MAX_INDEX)
    numbers = shape.page_stride, shape.page_size, num_tokens
    return cache.data_ptr(), *numbers, indices.data_ptr(), topk, _address(lengths)


@lru_cache(maxsize=4096)
def _sparse_plan(problem: SparseProblem) -> SparsePlan:
    if problem.cache.form.name != "mla_fp8":
        raise NotImplementedError(f"sparse_mla_decode over {problem.cache.form.name} has no CUDA kernel yet")
    properties = torch.cuda.get_device_properties(problem.device)
    num_rows = problem.batch * problem.q_len
    topk = problem.topk + problem.extra_topk
    num_parts = choose_parts(SparseShape(num_rows, problem.num_heads, topk, properties.multi_processor_count))
    return make_plan(arch_of(problem.device), num_rows * problem.num_heads, num_parts)


def make_plan(arch: str, num_query_rows: int, num_parts: int, config: SparseConfig | None = None) -> SparsePlan:
    """The plan of a launch over so many (row of queries, head) pairs, cut into ``num_parts``."""
    function = load(SparseSpec(config or SparseConfig()), arch)
    if num_parts == 1:
        return SparsePlan(function, None, 1, 0)
    words = num_query_rows * num_parts * (V_HEAD_DIM + STATS_BYTES // 4)
    return SparsePlan(function, load(CombineSpec(CombineConfig()), arch), num_parts, words)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
