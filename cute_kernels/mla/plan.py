"""Launches the CUDA kernels of MLA decode on checked tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.mla.arguments import CHOSEN, COMBINE, EXTRA, arguments_of
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
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from layouts.kv.mla import MlaModel1

if TYPE_CHECKING:
    from cute_kernels.mla.problem import CacheShape, DenseProblem, SparseProblem

MAX_INDEX = 2**31 - 1
Tokens = dict[str, int]
"""The launch arguments that say which tokens are read, by name: `TABLE`, or `CHOSEN` of two caches."""

NO_CACHE: Tokens = {EXTRA + each.name: int(each.name == "page_size") for each in CHOSEN}
"""The launch arguments of the extra cache where there is none."""


@dataclass(frozen=True)
class MlaPlan:
    """The part of a launch that stays the same from call to call.

    Attributes:
        send: the compiled kernel; takes by name the launch arguments that differ between launches.
        combine: the compiled kernel of the second launch, which adds up parts; takes arguments by name. None if there
            is no second launch.
        num_parts: number of parts of a row; STREAM_K for work ranges over all rows.
        num_ctas: number of CTAs of the launch; 0 for the kernel for few heads.
        part_words: number of 4-byte words of all partial results; 0 if rows are not cut.
        flag_words: number of workspace words for flags, under stream-K or a cooperative combine; else 0.
    """

    send: Callable[..., Any]
    combine: Callable[..., Any] | None
    num_parts: int
    num_ctas: int
    part_words: int
    flag_words: int = 0

    def run(
        self,
        q: torch.Tensor,
        softmax_scale: float,
        tokens: Tokens,
        out: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches on the current stream of q's device, which must be the current device. Returns (out, lse)."""
        shape = tuple(q.shape[:3])
        if out is None:
            out = GPU.empty(*blank((*shape, V_HEAD_DIM), q.dtype))
        lse, partials, flags = GPU.empty(*blank(shape, torch.float32)), None, 0
        if self.part_words:
            partials = GPU.empty((self.part_words,), (1,), torch.float32)
        if self.flag_words:
            device = q.get_device()
            flags = GPU.workspace(device, GPU.stream(device), self.flag_words)
        lse_address, top, sinks, parts = lse.data_ptr(), _address(max_logits), _address(sink), _address(partials)
        self.send(
            q=q, out=out.data_ptr(), lse=lse_address, max_logits=top, sinks=sinks, partials=parts,
            softmax_scale=softmax_scale, flags=flags, **tokens,
        )  # fmt: skip
        if self.combine is not None:
            self.combine(out=out, lse=lse_address, max_logits=top, sinks=sinks, partials=parts)
        return out, lse


def dense_plan(problem: DenseProblem) -> MlaPlan:
    """Makes the plan of a problem's launches. A call adds the addresses of cache, table and seq_lens."""
    known = {
        **_pages(problem.cache),
        "num_pages": problem.cache.num_pages,
        "table_stride": problem.table_stride,
        "max_pages": problem.max_pages,
        "causal": int(problem.causal),
    }
    return _plan_of(problem, "paged", *dense_shape(problem), known)


def sparse_plan(problem: SparseProblem) -> MlaPlan:
    """Makes the plan of a sparse problem's launches. A call adds the addresses that :func:`chosen` returns."""
    known, extra = _pages(problem.cache) | {"num_tokens": _num_tokens(problem.cache), "topk": problem.topk}, NO_CACHE
    if problem.extra is not None:
        own = _pages(problem.extra) | {"num_tokens": _num_tokens(problem.extra), "topk": problem.extra_topk}
        extra = {EXTRA + name: number for name, number in own.items()}
    rows, topk = problem.batch * problem.q_len, problem.topk + problem.extra_topk
    return _plan_of(problem, "sparse", rows, problem.num_heads, topk, known | extra)


def dense_shape(problem: DenseProblem) -> tuple[int, int, int]:
    """Returns (number of rows, heads of a row, largest number of tokens of a row) of a dense launch. A row has the
    heads of all queries of a request.
    """
    return problem.batch, problem.q_len * problem.num_heads, problem.max_pages * problem.cache.page_size


def _pages(shape: CacheShape) -> Tokens:
    return {
        "page_stride": shape.page_stride,
        "token_stride": MlaModel1.DATA_BYTES if shape.form.split_pages else shape.token_stride,
        "page_size": shape.page_size,
    }


def _num_tokens(shape: CacheShape) -> int:
    return min(shape.num_pages * shape.page_size, MAX_INDEX)


def chosen(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, prefix: str = "") -> Tokens:
    """Returns the addresses of a sparse launch's cache, indices and lengths, by name. prefix: `EXTRA` for the extra
    cache."""
    addresses = {"cache": cache.data_ptr(), "indices": indices.data_ptr(), "topk_length": _address(lengths)}
    return {prefix + name: address for name, address in addresses.items()} if prefix else addresses


def _plan_of(
    problem: DenseProblem | SparseProblem, tokens: str, rows: int, num_heads: int, num_tokens: int, known: Tokens
) -> MlaPlan:
    cache, device = problem.cache, problem.device
    tma_tiles = fits_tma_tiles(tokens, cache.form.name, cache.page_size)
    shape = Workload(rows, num_heads, num_tokens, GPU.num_sms(device), tma_tiles)
    config, num_parts = choose(tokens, cache.form.name, problem.head_dim, shape)
    return make_plan(config, arch_of(device.index), shape, num_parts, known)


def make_plan(
    config: MlaConfig | FewHeadsConfig, arch: str, shape: Workload, num_parts: int, known: Tokens | None = None
) -> MlaPlan:
    """Makes the plan of launches that cut each row into ``num_parts`` parts. If a cluster computes the parts of a row,
    ``num_parts`` must be the cluster's size. With num_parts STREAM_K, all rows together are cut into work ranges.
    known: launch arguments that describe the tokens and are the same in all launches."""
    few = isinstance(config, FewHeadsConfig)
    cluster = config.cluster if few else 1
    if cluster > 1 and num_parts != cluster:
        raise ValueError(f"num_parts: got {num_parts}, want the cluster's {cluster}")
    num_ctas = 0 if few else count_ctas(shape, num_parts)
    fixed = {"num_parts": num_parts, "num_ctas": num_ctas, **(known or {})}
    send = arguments_of(config.tokens).bound(load(MlaSpec(config), arch), fixed)
    if num_parts == STREAM_K:
        return MlaPlan(send, None, STREAM_K, num_ctas, num_ctas * STATE_WORDS, num_ctas * FLAG_WORDS)
    if not few and config.cooperative:
        if not fits_cooperative(shape, num_parts):
            raise ValueError(
                f"num_parts: got {num_parts}, {num_ctas} CTAs; want {COOPERATIVE_PARTS} and {shape.num_sms}"
            )
        return MlaPlan(send, None, num_parts, num_ctas, num_ctas * PART_WORDS, num_ctas * PART_FLAGS)
    if num_parts == cluster:
        return MlaPlan(send, None, num_parts, num_ctas, 0)
    form = PARTIALS[config.partials]
    words = shape.num_rows * shape.num_heads * num_parts * (form.row_bytes + form.stats_bytes) // 4
    slots, row_bits = choose_combine(shape)
    combine = load(CombineSpec(CombineConfig(config.layout.dtype, slots, config.partials)), arch)
    fixed = {"num_parts": num_parts, "row_bits": row_bits}
    return MlaPlan(send, COMBINE.bound(combine, fixed), num_parts, num_ctas, words)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
