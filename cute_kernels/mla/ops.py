"""Calls of MLA decode: a launch in eager mode, the reference on the CPU, registered operators under torch.compile.

The plan of a call is kept for later calls like it, so one look-up checks a repeated call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels import arguments
from cute_kernels.arguments import check_optional_positive
from cute_kernels.mla import checks
from cute_kernels.mla.arguments import EXTRA
from cute_kernels.mla.formats import V_DIM
from cute_kernels.mla.problem import DenseProblem, SparseExtras, SparseProblem
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from cute_kernels.runtime.operator import Operator, Plan, is_direct, launcher, route
from cute_kernels.runtime.plans import SCALE, TENSORS, identity, key_function

Results = tuple[torch.Tensor, torch.Tensor]
SparseResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# -- dense -------------------------------------------------------------------------------------------------------------


class DenseCall(NamedTuple):
    """The arguments of :func:`cute_kernels.mla.mla_decode`, in the operator's order."""

    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: str
    softmax_scale: float | None = None
    causal: bool = True
    out: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the call reads, by name."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    def problem(self) -> DenseProblem:
        """Returns the call's problem; raises TypeError or ValueError for arguments that are not supported."""
        return checks.dense_problem(**self.tensors, kv_format=self.kv_format, causal=self.causal)


def _dense_through_operator(call: DenseCall) -> Results:
    result, lse = _dense_operator(*call[:-1])
    return _copied(result, call.out), lse


def _dense_checked(call: DenseCall) -> tuple[DenseProblem, torch.Tensor | None]:
    problem = call.problem()
    checks.check_alignment(problem, q=call.q, cache=call.cache)
    _check_out(problem, call.out, **call.tensors)
    if arguments.DEBUG:
        checks.check_dense_values(problem, call.block_table, call.seq_lens)
    return problem, call.out


def _dense_plan(checked: tuple[DenseProblem, torch.Tensor | None]) -> Plan[[DenseCall], Results] | None:
    """Returns the plan for all calls with the checked call's shapes, strides, dtypes, device and options. Returns None
    if such calls launch nothing."""
    from cute_kernels.mla.plan import dense_plan  # the kernels' side

    problem, _ = checked
    if problem.is_empty:
        return None
    kernels, own_scale, wanted = dense_plan(problem), problem.head_dim**-0.5, _wanted_out(problem)

    def launch(call: DenseCall) -> Results:
        q, cache, block_table, seq_lens, _, softmax_scale, _, out = call
        if out is not None and identity(out) != wanted:
            raise ValueError(f"out: got {identity(out)}, want {wanted}")  # unless the checks say it in their words
        scale = own_scale if softmax_scale is None else float(softmax_scale)
        tokens = {"cache": cache.data_ptr(), "table": block_table.data_ptr(), "seq_lens": seq_lens.data_ptr()}
        return kernels.run(q, scale, tokens, out)

    return Plan(_index_of(problem), launch)


def _dense_here(call: DenseCall) -> Results:
    check_optional_positive("softmax_scale", call.softmax_scale)
    _check_out(call.problem(), call.out, **call.tensors)
    options: dict[str, Any] = {"kv_format": call.kv_format, "causal": call.causal}
    result, lse = mla_decode_reference(**call.tensors, softmax_scale=call.softmax_scale, **options)
    return _copied(result.to(call.q.dtype), call.out), lse


_dense_key = key_function(DenseCall, softmax_scale=SCALE, out="")
launch_dense = launcher(_dense_key, _dense_checked, _dense_plan, empty=lambda checked: _nothing(*checked))


def dense(call: DenseCall) -> Results:
    """Computes (out, lse) of :func:`cute_kernels.mla.mla_decode`, wherever the tensors are."""
    if is_direct(call.q, call.cache, call[2:4]):
        return launch_dense(call)
    return route(cuda=launch_dense, cpu=_dense_here, operator=_dense_through_operator, **call.tensors)(call)


# -- sparse ------------------------------------------------------------------------------------------------------------


class SparseCall(NamedTuple):
    """The arguments of :func:`cute_kernels.mla.sparse_mla_decode`. with_max: whether to return each query head's
    largest score."""

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    kv_format: str
    softmax_scale: float | None = None
    extras: SparseExtras = SparseExtras()
    with_max: bool = False
    out: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors that the call reads, by name; None for tensors that are not given."""
        return {"q": self.q, "cache": self.cache, "indices": self.indices, **self.extras._asdict()}

    def problem(self) -> SparseProblem:
        """Returns the call's problem; raises TypeError or ValueError for arguments that are not supported."""
        named: dict[str, Any] = self.tensors
        return checks.sparse_problem(**named, kv_format=self.kv_format)


def sparse(call: SparseCall) -> SparseResults:
    """Computes (out, lse, largest scaled scores) of :func:`cute_kernels.mla.sparse_mla_decode`, wherever the tensors
    are.

    The largest scores are fp32 [batch, q_len, num_heads] if ``with_max`` is set, else empty.
    """
    given = {name: tensor for name, tensor in call.tensors.items() if tensor is not None}
    return route(cuda=launch_sparse, cpu=_sparse_here, operator=_sparse_through_operator, **given)(call)


def _sparse_through_operator(call: SparseCall) -> SparseResults:
    result, lse, top = _sparse_operator(*call[:5], *call.extras, call.with_max)
    return _copied(result, call.out), lse, top


class CheckedSparse(NamedTuple):
    """A sparse call after its checks."""

    problem: SparseProblem
    with_max: bool
    out: torch.Tensor | None


def _sparse_checked(call: SparseCall) -> CheckedSparse:
    problem = call.problem()
    checks.check_alignment(problem, q=call.q, cache=call.cache, extra_cache=call.extras.extra_cache)
    _check_out(problem, call.out, **call.tensors)
    if arguments.DEBUG:
        _check_values(problem, call)
    return CheckedSparse(problem, call.with_max, call.out)


def _sparse_plan(checked: CheckedSparse) -> Plan[[SparseCall], SparseResults] | None:
    """Returns the plan of a checked sparse call; None if it launches nothing."""
    from cute_kernels.mla.plan import chosen, sparse_plan  # the kernels' side

    problem = checked.problem
    if problem.is_empty:
        return None
    kernels, own_scale, wanted = sparse_plan(problem), problem.head_dim**-0.5, _wanted_out(problem)

    def launch(call: SparseCall) -> SparseResults:
        q, cache, indices, _, softmax_scale, extras, with_max, out = call
        if out is not None and identity(out) != wanted:
            raise ValueError(f"out: got {identity(out)}, want {wanted}")  # unless the checks say it in their words
        scale = own_scale if softmax_scale is None else float(softmax_scale)
        top = q.new_empty(problem.out_shape[:3] if with_max else 0, dtype=torch.float32)
        tokens = chosen(cache, indices, extras.topk_length)
        if extras.extra_cache is not None and extras.extra_indices is not None:
            tokens |= chosen(extras.extra_cache, extras.extra_indices, extras.extra_topk_length, EXTRA)
        result, lse = kernels.run(q, scale, tokens, out, extras.sinks, top if with_max else None)
        return result, lse, top

    return Plan(_index_of(problem), launch)


def _sparse_nothing(checked: CheckedSparse) -> SparseResults:
    problem, with_max, out = checked
    result, lse = _nothing(problem, out)
    return result, lse, torch.full_like(lse, -torch.inf) if with_max else lse.new_empty(0)


_sparse_key = key_function(SparseCall, softmax_scale=SCALE, extras=TENSORS, with_max="", out="")
launch_sparse = launcher(_sparse_key, _sparse_checked, _sparse_plan, empty=_sparse_nothing)


def _sparse_here(call: SparseCall) -> SparseResults:
    check_optional_positive("softmax_scale", call.softmax_scale)
    problem = call.problem()
    _check_out(problem, call.out, **call.tensors)
    if arguments.DEBUG:
        _check_values(problem, call)
    options: dict[str, Any] = {**call.tensors, "kv_format": call.kv_format, "softmax_scale": call.softmax_scale}
    result, lse, top = sparse_mla_decode_reference(**options)
    return _copied(result.to(call.q.dtype), call.out), lse, (top if call.with_max else top.new_empty(0))


def _check_values(problem: SparseProblem, call: SparseCall) -> None:
    extras = call.extras
    checks.check_sparse_values("indices", problem.cache, call.indices, extras.topk_length)
    if problem.extra is not None and extras.extra_indices is not None:
        checks.check_sparse_values("extra_indices", problem.extra, extras.extra_indices, extras.extra_topk_length)


# -- both --------------------------------------------------------------------------------------------------------------


def _index_of(problem: DenseProblem | SparseProblem) -> int:
    """Returns the index of the device, -1 for the CPU, as `Tensor.get_device` does."""
    return -1 if problem.device.index is None else problem.device.index


def _wanted_out(problem: DenseProblem | SparseProblem) -> tuple[Any, ...]:
    """Returns the `identity` of an ``out`` on a GPU that passes the checks."""
    return problem.out_shape, problem.q_dtype, _index_of(problem), True, 0


def _check_out(problem: DenseProblem | SparseProblem, out: torch.Tensor | None, **read: torch.Tensor | None) -> None:
    if out is not None:
        checks.check_out(out, problem)
        arguments.check_apart("out", out, read)
        if out.is_cuda:
            checks.check_alignment(problem, out=out)


def _nothing(problem: DenseProblem | SparseProblem, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a call whose queries see no token: zeros and +inf. No kernel is launched."""
    if out is None:
        out = torch.empty(problem.out_shape, dtype=problem.q_dtype, device=problem.device)
    lse = torch.full(problem.out_shape[:3], torch.inf, dtype=torch.float32, device=problem.device)
    return out.zero_(), lse


def _copied(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)


# -- the operators -----------------------------------------------------------------------------------------------------


def _dense_on_meta(q, cache, block_table, seq_lens, kv_format, softmax_scale, causal):
    rows = q.shape[:3]
    return q.new_empty((*rows, V_DIM)), q.new_empty(rows, dtype=torch.float32)


def _sparse_on_meta(q, cache, indices, kv_format, softmax_scale, *others):
    rows = q.shape[:3]
    top = q.new_empty(rows if others[-1] else 0, dtype=torch.float32)
    return q.new_empty((*rows, V_DIM)), q.new_empty(rows, dtype=torch.float32), top


def _sparse_call(*given: Any) -> SparseCall:
    """Makes a call from the operator's arguments."""
    return SparseCall(*given[:5], extras=SparseExtras(*given[5:-1]), with_max=given[-1])


_dense_operator = Operator(
    "mla_decode(Tensor q, Tensor cache, Tensor block_table, Tensor seq_lens, str kv_format, float? softmax_scale, "
    "bool causal) -> (Tensor, Tensor)",
    cpu=lambda *given: _dense_here(DenseCall(*given)),
    cuda=lambda *given: launch_dense(DenseCall(*given)),
    meta=_dense_on_meta,
)
_sparse_operator = Operator(
    "sparse_mla_decode(Tensor q, Tensor cache, Tensor indices, str kv_format, float? softmax_scale, "
    "Tensor? topk_length, Tensor? sinks, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "bool with_max) -> (Tensor, Tensor, Tensor)",
    cpu=lambda *given: _sparse_here(_sparse_call(*given)),
    cuda=lambda *given: launch_sparse(_sparse_call(*given)),
    meta=_sparse_on_meta,
)
