"""Calling MLA decode: launch in eager mode, reference on the CPU, registered operators under torch.compile.

What decides a call (its problem) is kept for the next one like it, so that a repeated call is checked by one look-up.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.arguments import DEBUG, needs_dispatch
from cute_kernels.attention.checks import check_positive
from cute_kernels.mla import checks
from cute_kernels.mla.formats import V_DIM
from cute_kernels.mla.problem import DenseProblem, SparseExtras, SparseProblem
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from cute_kernels.runtime.plans import identity, keep

_dense_problems: dict[tuple[Any, ...], DenseProblem] = {}
_sparse_problems: dict[tuple[Any, ...], SparseProblem] = {}


# -- dense -------------------------------------------------------------------------------------------------------------


def dense(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    kv_format: str,
    softmax_scale: float | None,
    causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of :func:`cute_kernels.mla.mla_decode`, wherever the tensors are."""
    arguments = (q, cache, block_table, seq_lens, kv_format, softmax_scale, causal)
    if needs_dispatch(q=q, cache=cache, block_table=block_table, seq_lens=seq_lens):
        result, lse = torch.ops.cute_kernels.mla_decode(*arguments)
        return _copied(result, out), lse
    return (_launch_dense if q.is_cuda else _dense_here)(*arguments, out)


def _launch_dense(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    causal: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from cute_kernels.mla import plan  # the kernels' side

    tensors = (q, cache, block_table, seq_lens)
    key = (kv_format, causal, *map(identity, tensors))
    problem = _dense_problems.get(key)
    if problem is None:
        problem = checks.dense_problem(*tensors, kv_format=kv_format, causal=causal)
        checks.check_alignment(problem, q=q, cache=cache)
        keep(_dense_problems, key, problem)
    scale = _scale_of(problem, softmax_scale)
    _check_out(problem, out)
    if DEBUG:
        checks.check_dense_values(problem, block_table, seq_lens)
    if problem.is_empty:
        return _nothing(problem, out)
    return plan.dense(problem, q, cache, block_table, seq_lens, scale, out)


def _dense_here(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    causal: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_positive("softmax_scale", softmax_scale)
    problem = checks.dense_problem(q, cache, block_table, seq_lens, kv_format=kv_format, causal=causal)
    _check_out(problem, out)
    result, lse = mla_decode_reference(
        q, cache, block_table, seq_lens, kv_format=kv_format, softmax_scale=softmax_scale, causal=causal
    )
    return (result.to(q.dtype) if out is None else out.copy_(result)), lse


# -- sparse ------------------------------------------------------------------------------------------------------------


def sparse(
    q: Any,
    cache: Any,
    indices: Any,
    kv_format: str,
    softmax_scale: float | None,
    extras: SparseExtras,
    out: torch.Tensor | None,
    with_max: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, greatest scaled scores) of :func:`cute_kernels.mla.sparse_mla_decode`, wherever the tensors are.

    The greatest scores, fp32 [batch, q_len, num_heads], are empty unless asked for.
    """
    given = {name: tensor for name, tensor in extras._asdict().items() if tensor is not None}
    if needs_dispatch(q=q, cache=cache, indices=indices, **given):
        result, lse, top = torch.ops.cute_kernels.sparse_mla_decode(
            q, cache, indices, kv_format, softmax_scale, *extras, with_max
        )
        return _copied(result, out), lse, top
    work = _launch_sparse if q.is_cuda else _sparse_here
    return work(q, cache, indices, kv_format, softmax_scale, extras, with_max, out)


def _launch_sparse(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    extras: SparseExtras,
    with_max: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from cute_kernels.mla import plan  # the kernels' side

    key = (kv_format, *map(identity, (q, cache, indices)), *[None if x is None else identity(x) for x in extras])
    problem = _sparse_problems.get(key)
    if problem is None:
        problem = checks.sparse_problem(q, cache, indices, kv_format=kv_format, **extras._asdict())
        checks.check_alignment(problem, q=q, cache=cache, extra_cache=extras.extra_cache)
        keep(_sparse_problems, key, problem)
    scale = _scale_of(problem, softmax_scale)
    _check_out(problem, out)
    if DEBUG:
        _check_values(problem, indices, extras)
    top = q.new_empty(problem.out_shape[:3] if with_max else 0, dtype=torch.float32)
    if problem.is_empty:
        return *_nothing(problem, out), top.fill_(-torch.inf)
    result, lse = plan.sparse(problem, q, cache, indices, scale, out, *extras, top if with_max else None)
    return result, lse, top


def _sparse_here(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    extras: SparseExtras,
    with_max: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_positive("softmax_scale", softmax_scale)
    options: dict[str, Any] = {"kv_format": kv_format, **extras._asdict()}
    problem = checks.sparse_problem(q, cache, indices, **options)
    _check_out(problem, out)
    if DEBUG:
        _check_values(problem, indices, extras)
    result, lse, top = sparse_mla_decode_reference(q, cache, indices, softmax_scale=softmax_scale, **options)
    return (result.to(q.dtype) if out is None else out.copy_(result)), lse, (top if with_max else top.new_empty(0))


def _check_values(problem: SparseProblem, indices: torch.Tensor, extras: SparseExtras) -> None:
    checks.check_sparse_values("indices", problem.cache, indices, extras.topk_length)
    if problem.extra is not None and extras.extra_indices is not None:
        checks.check_sparse_values("extra_indices", problem.extra, extras.extra_indices, extras.extra_topk_length)


# -- both --------------------------------------------------------------------------------------------------------------


def _scale_of(problem: DenseProblem | SparseProblem, softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return problem.head_dim**-0.5
    check_positive("softmax_scale", softmax_scale)
    return float(softmax_scale)


def _check_out(problem: DenseProblem | SparseProblem, out: torch.Tensor | None) -> None:
    if out is not None:
        checks.check_out(out, problem)
        if out.is_cuda:
            checks.check_alignment(problem, out=out)


def _nothing(problem: DenseProblem | SparseProblem, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result where no query can see anything, which no kernel is launched for."""
    if out is None:
        out = torch.empty(problem.out_shape, dtype=problem.q_dtype, device=problem.device)
    lse = torch.full(problem.out_shape[:3], torch.inf, dtype=torch.float32, device=problem.device)
    return out.zero_(), lse


def _copied(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)


# -- the operators -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "mla_decode(Tensor q, Tensor cache, Tensor block_table, Tensor seq_lens, str kv_format, float? softmax_scale, "
    "bool causal) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "sparse_mla_decode(Tensor q, Tensor cache, Tensor indices, str kv_format, float? softmax_scale, "
    "Tensor? topk_length, Tensor? sinks, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "bool with_max) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dense_on_meta(q, cache, block_table, seq_lens, kv_format, softmax_scale, causal):
    rows = q.shape[:3]
    return q.new_empty((*rows, V_DIM)), q.new_empty(rows, dtype=torch.float32)


def _sparse_on_meta(q, cache, indices, kv_format, softmax_scale, *others):
    rows = q.shape[:3]
    top = q.new_empty(rows if others[-1] else 0, dtype=torch.float32)
    return q.new_empty((*rows, V_DIM)), q.new_empty(rows, dtype=torch.float32), top


def _sparse_on_cpu(q, cache, indices, kv_format, softmax_scale, *others):
    return _sparse_here(q, cache, indices, kv_format, softmax_scale, SparseExtras(*others[:-1]), others[-1], None)


def _sparse_on_cuda(q, cache, indices, kv_format, softmax_scale, *others):
    return _launch_sparse(q, cache, indices, kv_format, softmax_scale, SparseExtras(*others[:-1]), others[-1], None)


_library.impl("mla_decode", _dense_here, "CPU")
_library.impl("mla_decode", _launch_dense, "CUDA")
torch.library.register_fake("cute_kernels::mla_decode", _dense_on_meta, lib=_library)
_library.impl("sparse_mla_decode", _sparse_on_cpu, "CPU")
_library.impl("sparse_mla_decode", _sparse_on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::sparse_mla_decode", _sparse_on_meta, lib=_library)
