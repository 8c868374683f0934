"""Computes calls of attention: by plan and launch in eager mode, by the reference on a CPU, by registered operators
under torch.compile.

Decode and extend attention share this path. A call of extend attention has ``cu_seqlens_q``, a call of decode attention
has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.attention import few_queries
from cute_kernels.attention import options as schemas
from cute_kernels.attention.call import AttentionCall, Given, make_call, make_extend_call
from cute_kernels.attention.checks import check_out, head_dim_of_row
from cute_kernels.attention.device_values import check_device_values
from cute_kernels.attention.extend_checks import MAX_ROWS, PIECE
from cute_kernels.attention.options import NO_EXTEND_OPTIONS, NO_OPTIONS
from cute_kernels.attention.plan import check_alignment, make_plan
from cute_kernels.attention.reference import attention_of
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.formats.scores import flattened, restored
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, Plan, as_kernels, launcher, on_device_of, written
from cute_kernels.runtime.plans import ALIGNMENT, identity
from cute_kernels.runtime.workspace import EMPTY

_VALUES = frozenset({type(None), str, bool, int, float})  # of optional arguments that are no tensors
_PLAIN = _VALUES | {torch.Tensor, torch.nn.Parameter}  # sinks often are parameters
ROWS_OF_QUERIES = ("new_k", "new_v", "tree_mask")  # options that have a row for each query
_NOT_IN_KEYS = dict.fromkeys((*ROWS_OF_QUERIES, "max_seq_len"))


def _key(given: Given) -> tuple[Any, ...]:
    """Returns the key of a call's plan.

    K's shape is left out, since it follows from V's and q's. Strides of elements are left out, since the compiled
    function compares them. The caches' dtypes are part of the key, since kernels take signed bytes as unsigned bytes.
    The caches' strides are part of it, since the plan has chosen copies for them. With several queries q's strides are
    part of it, since they decide whether key rows support the call.
    """
    q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, _, out, options, cu_seqlens_q = given
    if softmax_scale is not None:
        arguments.check_optional_positive("softmax_scale", softmax_scale)
    if cu_seqlens_q is not None:
        return _extend_key(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out, options, cu_seqlens_q)
    shape = q.shape
    return (
        shape,
        v_cache.shape,
        q.dtype,
        shape[1] == 1 or q.is_contiguous() or q.stride(),
        k_cache.dtype,
        v_cache.dtype,
        q.get_device(),
        kv_format,
        num_splits,
        (k_cache.data_ptr() | v_cache.data_ptr()) % ALIGNMENT,
        strides_key(k_cache, v_cache),
        out if out is None else out is not q and out.is_contiguous(),
        None if options is None else options_key(options),
    )


def _extend_key(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out, options, cu_seqlens_q) -> tuple[Any, ...]:
    """Returns the key of a plan of extend attention.

    The key contains neither the number of queries nor the longest length, which change from step to step. It has two
    bits about the number of queries: whether it is 0, and whether it may make the checks refuse the call. A refused
    call has no plan.
    """
    if options["max_seq_len"] is not None:
        arguments.check_optional_count("max_seq_len", options["max_seq_len"])
    of_queries = {name: options[name] for name in ROWS_OF_QUERIES if options[name] is not None}
    num_queries, heads, head_dim = q.shape
    stride, *strides = q.stride()
    odd = num_queries * heads > MAX_ROWS or any(x.shape[:1] != (num_queries,) for x in of_queries.values())
    return (
        heads,
        head_dim,
        num_queries == 0,
        odd,
        q.dtype,
        q.get_device(),
        q.data_ptr() % ALIGNMENT,
        *strides,
        stride % PIECE,
        identity(k_cache),
        identity(v_cache),
        identity(seq_lens),
        identity(cu_seqlens_q),
        kv_format,
        num_splits,
        out if out is None else out is not q,
        *[(name, x.shape[1:], *identity(x)[1:]) for name, x in of_queries.items()],
        options_key(options | _NOT_IN_KEYS),
    )


def strides_key(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the caches' strides for a plan's key; None if both caches are contiguous."""
    dense = k_cache.is_contiguous() and v_cache.is_contiguous()
    return None if dense else (k_cache.stride(), v_cache.stride())


def options_key(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the options' part of a plan's key. options: all options, with defaults. For a tensor, the key has every
    property except the contents; alignment is included. For any other option, it has the value.

    Options that change no plan are in the key, too, since a call with a known key is not checked again.
    """
    return tuple([x if x is None or type(x) in _VALUES else _key_of(x) for x in options.values()])


def _key_of(value: Any) -> Any:
    """Returns the part of a plan's key that an option's value decides. The value is a tensor, tensors by name, or
    anything else."""
    if isinstance(value, torch.Tensor):
        return identity(value)
    return (*value, options_key(value)) if type(value) is dict else value


def _call_of(given: Given) -> AttentionCall:
    """Makes the checked call of the arguments ``given``."""
    named = {name: getattr(given, name) for name in ("kv_format", "softmax_scale", "num_splits", "out")}
    named |= given.options or {}
    if given.cu_seqlens_q is None:
        return make_call(*given[:4], **named)
    return make_extend_call(*given[:4], cu_seqlens_q=given.cu_seqlens_q, **named)


def _checked(given: Given) -> AttentionCall:
    """Returns the checked call of the arguments ``given``. The checks do not wait for the device. In debug mode,
    lengths and pages are checked as well.
    """
    call = _call_of(given._replace(softmax_scale=None))
    check_alignment(call)
    if arguments.DEBUG:
        check_device_values(call)
    return call


def _plan_of(call: AttentionCall) -> Plan | None:
    if not (call.batch and call.q.shape[0] and call.has_keys):
        return None
    if call.blocks is not None:
        return make_plan(call.in_pages())
    few = few_queries.plan_of(call) if not call.extends and call.q_len > 1 else None
    return make_plan(call) if few is None else few


def without_tokens(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of a call without requests, queries or cached tokens, for which no kernel is launched."""
    lse = torch.full(call.out_shape[:-1], float("-inf"), dtype=torch.float32, device=call.q.device)
    result = call.q.new_zeros(call.out_shape)
    return result if call.out is None else written(call.out, result, call.cu_seqlens_q), lse


launch = launcher(_key, _checked, _plan_of, without_tokens)
"""Computes attention on CUDA tensors: (out, lse or None). ``options`` of decode attention is None for a call that uses
none."""


@as_kernels
def reference(given: Given) -> tuple[torch.Tensor, Any]:
    """Computes attention on CPU tensors. Returns (out in q's dtype, lse in fp32, even without ``return_lse``)."""
    call = _call_of(given)
    check_device_values(call)
    result, lse = attention_of(call)
    return (result.to(given.q.dtype) if given.out is None else written(given.out, result, given.cu_seqlens_q)), lse


# -- each split by itself ----------------------------------------------------------------------------------------------


def launch_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches attention with fixed splits. Returns the results of ``decode_attention_splits``."""
    arguments.check_optional_positive("softmax_scale", softmax_scale)
    given = Given(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits)
    call = _checked(given)
    batch, q_len, heads, head_dim = call.out_shape
    if q_len != 1:
        raise ValueError(f"q: got q_len {q_len}, want 1")
    if not k_cache.numel():
        split_out = torch.zeros((batch, num_splits, heads, head_dim), dtype=torch.float32, device=q.device)
        split_sum = torch.zeros_like(split_out[..., 0])
        return q.new_zeros(call.out_shape), split_out, torch.full_like(split_sum, float("-inf")), split_sum
    plan = make_plan(call)
    partial_words = plan.products[0].partial_words
    workspace = torch.full((batch, num_splits, heads, partial_words), EMPTY, dtype=torch.int32, device=q.device)
    out, _ = on_device_of(plan, given, partials=workspace)
    empty = workspace[..., head_dim] == EMPTY  # splits without tokens
    values = workspace.view(torch.float32)
    partial = values[..., :head_dim].masked_fill(empty.unsqueeze(-1), 0.0)
    maximum = values[..., head_dim].masked_fill(empty, float("-inf"))
    total = values[..., head_dim + 1].masked_fill(empty, 0.0)
    nothing = total == 0  # a request without tokens has a split with none
    maximum = maximum.masked_fill(nothing, float("-inf"))
    normalised = partial / torch.where(nothing, 1.0, total).unsqueeze(-1)
    ln2 = 0.6931471805599453  # the kernel's maxima are in powers of two
    return out, normalised, maximum * ln2, total


# -- the operators ----------------------------------------------------------------------------------------------------


def dispatch(given: Given) -> tuple[torch.Tensor, Any]:
    """Calls the registered operator, which always returns (out, lse)."""
    out, ends = given.out, given.cu_seqlens_q
    operator = _decode if ends is None else _extend
    named = flattened(given.options or {}) | {"softmax_scale": given.softmax_scale, "num_splits": given.num_splits}
    result, lse = operator(*given.tensors.values(), *format_pair(given.kv_format), **named)
    if out is None:
        return result, lse
    check_out(out, given.q, result.shape[-1])
    return written(out, result, ends), lse


def _implementation(path: Callable[[Given], Any], defaults: Mapping[str, Any], ragged: bool) -> Callable[..., Any]:
    """Returns an operator's implementation on one device. path: :func:`launch` or :func:`reference`."""

    def run(q, k_cache, v_cache, seq_lens, *others, softmax_scale=None, num_splits=None, **options):
        k_format, v_format = others[-2:]
        formats = k_format if k_format == v_format else (k_format, v_format)
        complete = {**defaults, **restored(options)} if options or ragged else None
        own = (softmax_scale, num_splits, True, None, complete, others[0] if ragged else None)
        return path(Given(q, k_cache, v_cache, seq_lens, formats, *own))

    return run


def _on_meta(q, k_cache, v_cache, seq_lens, *others, **options):
    v_head_dim = head_dim_of_row(format_of(others[-1]), v_cache.shape[3]) if q.dim() == 4 else q.shape[2]
    return q.new_empty((*q.shape[:-1], v_head_dim)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _operator_of(name: str, more: str, of_it: str, defaults: Mapping[str, Any]) -> Operator:
    """Returns the operator of decode attention or of extend attention. more: the schema of tensors that only this
    operator has. of_it: the schema of options that only this operator has.
    """
    return Operator(
        f"{name}(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens{more}, str k_format, str v_format, *, "
        f"{', '.join((schemas.OF_NUMBERS, schemas.OF_BOTH, of_it, schemas.OF_SCORES, schemas.OF_BLOCKS))}) "
        "-> (Tensor, Tensor)",
        cpu=_implementation(reference, defaults, bool(more)),
        cuda=_implementation(launch, defaults, bool(more)),
        meta=_on_meta,
    )


_decode = _operator_of("decode_attention", "", f"{schemas.OF_BIAS}, {schemas.OF_DECODE}", NO_OPTIONS)
_extend = _operator_of("extend_attention", ", Tensor cu_seqlens_q", schemas.OF_EXTEND, NO_EXTEND_OPTIONS)


def are_plain(values: Iterable[Any]) -> bool:
    """Returns whether all tensors among ``values`` are plain ones (torch.Tensor or Parameter). Tensors of other classes
    need the registered operator."""
    kinds = [*map(type, values)]
    return _PLAIN.issuperset(kinds) or not any(issubclass(kind, torch.Tensor) for kind in {*kinds} - _PLAIN)


def path_of(given: Given) -> Callable[[Given], tuple[torch.Tensor, Any]]:
    """Returns the function that computes a call: :func:`launch`, :func:`reference` or :func:`dispatch`.

    :func:`dispatch` is for calls that are being traced, and for tensors of other classes than torch.Tensor. Raises
    TypeError for an argument that has to be a tensor and is not.
    """
    if is_compiling():
        return dispatch
    q, k_cache, v_cache, seq_lens, _, _, _, _, _, options, ends = given
    if type(q) is type(k_cache) is type(v_cache) is type(seq_lens) is torch.Tensor and (
        ends is None or type(ends) is torch.Tensor
    ):
        if options is not None:
            scores = options.get("score_options")
            if not are_plain(options.values()) or (scores and not are_plain(scores.values())):
                arguments.check_given_tensors(options)
                return dispatch
        if q.is_cuda or (q.is_cpu and GPU.takes_cpu):
            return launch
        if q.is_cpu:
            return reference
        arguments.check_together(**given.tensors)
        return dispatch
    arguments.check_tensors(**given.tensors)
    return dispatch
