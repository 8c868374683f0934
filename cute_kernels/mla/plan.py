"""Launching the CUDA kernels of the family on tensors that have been checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.mla.compile import CombineSpec, MlaSpec
from cute_kernels.mla.config import (
    COOPERATIVE_PARTS,
    FLAG_WORDS,
    PART_FLAGS,
    PART_WORDS,
    PARTIALS,
    STATE_WORDS,
    V_HEAD_DIM,
    CombineConfig,
    MlaConfig,
    fits_tma_tiles,
)
from cute_kernels.mla.few_heads.config import FewHeadsConfig
from cute_kernels.mla.schedule import STREAM_K, Workload, choose, choose_combine, count_ctas, fits_cooperative
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU, per_gpu
from layouts.kv.mla import MlaModel1

if TYPE_CHECKING:
    from cute_kernels.mla.problem import CacheShape, DenseProblem, SparseProblem

MAX_INDEX = 2**31 - 1
NO_CACHE = (0, 0, 0, 1, 0, 0, 0, 0)


@dataclass(frozen=True)
class MlaPlan:
    """What of a launch stays the same from call to call.

    Attributes:
        num_parts: of a row; STREAM_K for work ranges over all rows.
        num_ctas: of the launch.
        part_words: words of all partial results, or of what stream-K publishes; 0 if rows are not cut.
        flag_words: workspace words of stream-K, or of parts that are added up together, else 0.
        combine_row_bits: as the combining function takes it.
    """

    function: Callable[..., Any]
    combine: Callable[..., Any] | None
    num_parts: int
    num_ctas: int
    part_words: int
    flag_words: int = 0
    combine_row_bits: int = 0

    def run(
        self,
        q: torch.Tensor,
        softmax_scale: float,
        tokens: tuple[int, ...],
        out: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) on the current stream of q's device, which is the current one.

        tokens: the arguments of :meth:`DecodeEntry.sparse` or :meth:`DecodeEntry.paged` behind flags.
        """
        shape = q.shape[:3]
        if out is None:
            out = torch.empty((*shape, V_HEAD_DIM), dtype=q.dtype, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        partials = None
        if self.part_words:
            partials = torch.empty(self.part_words, dtype=torch.float32, device=q.device)
        addresses = lse.data_ptr(), _address(max_logits), _address(sink), _address(partials)
        flags, device = 0, q.get_device()
        if self.flag_words:
            flags = GPU.workspace(device, GPU.stream(device), self.flag_words)
        cut = self.num_parts, self.num_ctas, flags
        self.function(q, out.data_ptr(), *addresses, softmax_scale, *cut, *tokens)
        if self.combine is not None:
            self.combine(out, *addresses, self.num_parts, self.combine_row_bits)
        return out, lse


def dense(
    problem: DenseProblem,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [batch, q_len, num_heads, 512] in q's dtype, lse fp32 [batch, q_len, num_heads]) on the current stream.

    The arguments fit the problem and each other, and q's device is the current one.
    """
    plan = _plan("paged", problem.cache, problem.head_dim, problem.device, *dense_shape(problem))
    pages = (*_pages(problem.cache, cache), problem.cache.num_pages)
    table = block_table.data_ptr(), problem.table_stride, problem.max_pages, seq_lens.data_ptr(), int(problem.causal)
    return plan.run(q, softmax_scale, (*pages, *table), out)


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
    """As :func:`dense`; max_logits: fp32 [batch, q_len, num_heads], written unless None."""
    topk = problem.topk + problem.extra_topk
    plan = _plan(
        "sparse",
        problem.cache,
        problem.head_dim,
        problem.device,
        problem.batch * problem.q_len,
        problem.num_heads,
        topk,
    )
    main = _chosen(problem.cache, cache, indices, problem.topk, topk_length)
    extra = NO_CACHE
    if problem.extra is not None and extra_cache is not None and extra_indices is not None:
        extra = _chosen(problem.extra, extra_cache, extra_indices, problem.extra_topk, extra_topk_length)
    return plan.run(q, softmax_scale, (*main, *extra), out, attn_sink, max_logits)


def dense_shape(problem: DenseProblem) -> tuple[int, int, int]:
    """(rows, heads of a row, most tokens of a row) of a dense launch: the heads of all queries are side by side."""
    return problem.batch, problem.q_len * problem.num_heads, problem.max_pages * problem.cache.page_size


def _pages(shape: CacheShape, cache: torch.Tensor) -> tuple[int, int, int, int]:
    stride = MlaModel1.DATA_BYTES if shape.form.split_pages else shape.token_stride
    return cache.data_ptr(), shape.page_stride, stride, shape.page_size


def _chosen(
    shape: CacheShape, cache: torch.Tensor, indices: torch.Tensor, topk: int, lengths: torch.Tensor | None
) -> tuple[int, ...]:
    num_tokens = min(shape.num_pages * shape.page_size, MAX_INDEX)
    return *_pages(shape, cache), num_tokens, indices.data_ptr(), topk, _address(lengths)


@per_gpu
@lru_cache(maxsize=4096)
def _plan(
    tokens: str,
    cache: CacheShape,
    head_dim: int,
    device: torch.device,
    rows: int,
    num_heads: int,
    num_tokens: int,
) -> MlaPlan:
    num_sms = GPU.num_sms(device)
    tma_tiles = fits_tma_tiles(tokens, cache.form.name, cache.page_size)
    shape = Workload(rows, num_heads, num_tokens, num_sms, tma_tiles)
    config, num_parts = choose(tokens, cache.form.name, head_dim, shape)
    return make_plan(config, arch_of(device.index), shape, num_parts)


def make_plan(config: MlaConfig | FewHeadsConfig, arch: str, shape: Workload, num_parts: int) -> MlaPlan:
    """The plan of a launch that cuts each row into ``num_parts``, its cluster's if the parts of a row are one, or
    all of them into work ranges (STREAM_K)."""
    function = load(MlaSpec(config), arch)
    few = isinstance(config, FewHeadsConfig)
    cluster = config.cluster if few else 1
    if cluster > 1 and num_parts != cluster:
        raise ValueError(f"num_parts: got {num_parts}, want the cluster's {cluster}")
    num_ctas = 0 if few else count_ctas(shape, num_parts)
    if num_parts == STREAM_K:
        return MlaPlan(function, None, STREAM_K, num_ctas, num_ctas * STATE_WORDS, num_ctas * FLAG_WORDS)
    if not few and config.cooperative:
        if not fits_cooperative(shape, num_parts):
            raise ValueError(
                f"num_parts: got {num_parts}, {num_ctas} CTAs; want {COOPERATIVE_PARTS} and {shape.num_sms}"
            )
        return MlaPlan(function, None, num_parts, num_ctas, num_ctas * PART_WORDS, num_ctas * PART_FLAGS)
    if num_parts == cluster:
        return MlaPlan(function, None, num_parts, num_ctas, 0)
    form = PARTIALS[config.partials]
    words = shape.num_rows * shape.num_heads * num_parts * (form.row_bytes + form.stats_bytes) // 4
    slots, row_bits = choose_combine(shape)
    combine = load(CombineSpec(CombineConfig(config.layout.dtype, slots, config.partials)), arch)
    return MlaPlan(function, combine, num_parts, num_ctas, words, combine_row_bits=row_bits)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
