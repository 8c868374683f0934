"""Calling the kernel: schedule, workspace and launch in eager mode; the registered operator under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import check_given_tensors, check_optional_positive, check_tensors, check_together
from cute_kernels.attention import few_queries
from cute_kernels.attention.call import (
    NO_OPTIONS,
    AttentionCall,
    CallOptions,
    check_device_values,
    complete_options,
    make_call,
)
from cute_kernels.attention.checks import (
    check_cache,
    check_formats,
    check_layout,
    check_out,
    check_query,
    head_dim_of_row,
)
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.decode_schedule import DecodeSchedule, make_schedule
from cute_kernels.attention.plan import DecodePlan, check_alignment, make_plan, problem_of
from cute_kernels.attention.reference import attention_of
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform
from cute_kernels.formats.scores import flattened, restored
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, Plan, launcher, on_device_of
from cute_kernels.runtime.plans import ALIGNMENT, identity
from cute_kernels.runtime.workspace import EMPTY

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # of optional arguments: sinks often are parameters
_PLAIN = _PLAIN_TENSORS | {type(None), str, bool, int, float}


def _key(
    q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out, options=None
) -> tuple[Any, ...]:
    """What decides a plan. K's cache has V's blocks where the compiled function looks, and its row is that of q's
    head_dim, so the key leaves its shape out; not the dtypes of the caches, for signed bytes pass as unsigned ones, nor
    their strides, for which the plan has chosen how to copy. It has the strides of several queries, by which kernels of
    few queries are told apart, not whether ``out`` is contiguous: compiled functions compare the strides of rows and
    their elements alone."""
    if softmax_scale is not None:
        check_optional_positive("softmax_scale", softmax_scale)
    return (
        q.shape,
        v_cache.shape,
        q.dtype,
        q.shape[1] == 1 or q.is_contiguous() or q.stride(),
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


def strides_key(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[Any, ...] | None:
    """What of the caches' strides decides a plan; None where there are no gaps."""
    dense = k_cache.is_contiguous() and v_cache.is_contiguous()
    return None if dense else (k_cache.stride(), v_cache.stride())


def options_key(options: CallOptions) -> tuple[Any, ...]:
    """What of complete options (see `NO_OPTIONS`) decides a plan: of tensors everything but their contents and, beyond
    its alignment, their place; of the others the value.

    Not every part needs a plan of its own; together they are all that the checks of a repeated call would look at.
    """
    (table, layout, k_scale, v_scale, causal, window, soft_cap, sinks, slopes, bias, shift, tail, slots,
     *more) = options.values()  # fmt: skip
    return (
        None if table is None else identity(table),
        layout,
        None if k_scale is None else identity(k_scale),
        None if v_scale is None else identity(v_scale),
        causal,
        window,
        soft_cap,
        None if sinks is None else identity(sinks),
        None if slopes is None else identity(slopes),
        None if bias is None else identity(bias),
        None if shift is None else identity(shift),
        None if tail is None else identity(tail),
        None if slots is None else identity(slots),
        tuple((name, identity(tensor)) for given in cast("list[Any]", more) for name, tensor in given.items())
        if more
        else None,
    )


def _checked(
    q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out, options=None
) -> AttentionCall:
    """Everything that can be said of a call without waiting for the device, and in debug mode lengths and pages."""
    call = make_call(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, num_splits=num_splits, out=out, **(options or {})
    )
    check_alignment(call)
    if arguments.DEBUG:
        check_device_values(call)
    return call


def _plan_of(call: AttentionCall) -> DecodePlan | Plan | None:
    if not (call.k.cache.numel() and call.max_seq_len and call.batch):
        return None
    few = few_queries.plan_of(call) if call.q_len > 1 and call.k.form.is_coded else None
    return make_plan(call) if few is None else few


def without_tokens(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for an empty batch or an empty cache, which no kernel is launched for."""
    lse = torch.full(call.out_shape[:3], float("-inf"), dtype=torch.float32, device=call.q.device)
    return call.q.new_zeros(call.out_shape) if call.out is None else call.out.zero_(), lse


launch = launcher(_key, _checked, _plan_of, without_tokens)
"""Decode attention on CUDA tensors: (out, lse or None). ``options`` is None for a call that uses none."""


# -- other ways in ----------------------------------------------------------------------------------------------------


def schedule_for(
    q: torch.Tensor, k_cache: torch.Tensor, kv_format: str | tuple[str, str], v_cache: torch.Tensor | None = None
) -> DecodeSchedule:
    """The configuration and splits that a plain call with these tensors uses; V is as K if not given."""
    seq_lens = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    v_cache = k_cache if v_cache is None else v_cache
    options = _scales_for(kv_format, k_cache)
    return make_schedule(problem_of(make_call(q, k_cache, v_cache, seq_lens, kv_format=kv_format, **options)))


def _scales_for(kv_format: str | tuple[str, str], cache: torch.Tensor) -> dict[str, Any]:
    """Scales of the shapes that the formats want, where only shapes matter."""
    wanted = {"tensor": (), "head": (cache.shape[2],), "channel": (cache.shape[2], cache.shape[3])}
    granularities = [format_of(name).given_scale for name in format_pair(kv_format)]
    return {
        name: torch.ones(wanted[granularity], dtype=torch.float32, device=cache.device)
        for name, granularity in zip(("k_scale", "v_scale"), granularities, strict=True)
        if granularity is not None
    }


def bind_config(
    config: DecodeConfig,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    num_splits: int | None = None,
    kv_format: str | tuple[str, str] | None = None,
    **options: Any,
) -> Callable[[], torch.Tensor]:
    """A launch of a given configuration, for experiments; planned once, so that repeating it costs the launch alone.

    The splits are those that the schedule chooses for these tensors unless given. ``kv_format``: where it is not what
    the configuration says (formats that share a kernel).
    """
    formats = kv_format or (config.k_format, config.v_format)
    call = make_call(q, k_cache, v_cache, seq_lens, kv_format=formats, out=out, **options)
    plan = make_plan(call, config, num_splits)
    given = cast(CallOptions, {**NO_OPTIONS, **options}) if options else None

    def run() -> torch.Tensor:
        on_device_of(plan, q, k_cache, v_cache, seq_lens, formats, None, num_splits, False, out, given)
        return out

    return run


def launch_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`launch` with fixed splits, and each split's own result; see ``decode_attention_splits``."""
    check_optional_positive("softmax_scale", softmax_scale)
    call = _checked(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, False, None)
    batch, q_len, heads, head_dim = call.out_shape
    if q_len != 1:
        raise ValueError(f"q: got q_len {q_len}, want 1")
    if not k_cache.numel():
        split_out = torch.zeros((batch, num_splits, heads, head_dim), dtype=torch.float32, device=q.device)
        split_sum = torch.zeros_like(split_out[..., 0])
        return q.new_zeros(call.out_shape), split_out, torch.full_like(split_sum, float("-inf")), split_sum
    plan = make_plan(call)
    partial_words = plan.schedule.config.partial_words
    workspace = torch.full((batch, num_splits, heads, partial_words), EMPTY, dtype=torch.int32, device=q.device)
    tensors = (q, k_cache, v_cache, seq_lens)
    out, _ = on_device_of(plan, *tensors, kv_format, softmax_scale, num_splits, False, None, None, workspace)
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


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str | tuple[str, str],
    softmax_scale: float | None,
    num_splits: int | None,
    return_lse: bool,
    out: torch.Tensor | None,
    options: CallOptions | None = None,
) -> tuple[torch.Tensor, Any]:
    """Decode attention on CPU tensors: (out in q's dtype, lse fp32, asked for or not)."""
    call = make_call(
        q,
        k_cache,
        v_cache,
        seq_lens,
        kv_format=kv_format,
        softmax_scale=softmax_scale,
        num_splits=num_splits,
        out=out,
        **(options or {}),
    )
    check_device_values(call)
    result, lse = attention_of(call)
    return (result.to(q.dtype) if out is None else out.copy_(result)), lse


# -- caches that are transformed ---------------------------------------------------------------------------------------


def checked_transform(transform: object) -> CacheTransform | None:
    """The transform of a call; None for one that changes nothing. Raises TypeError for what is none."""
    check_transform("transform", transform)
    checked = cast("CacheTransform", transform)
    return None if checked.kind is None else checked


def transform_query(
    transform: CacheTransform,
    q: torch.Tensor,
    q_shift: torch.Tensor | None,
    caches: tuple[torch.Tensor, torch.Tensor],
    kv_format: object,
    layout: str,
    sees_shift: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q', its shift or None) of a q that is not transformed yet; ``sees_shift``: whether the result depends on it.

    Raises:
        TypeError, ValueError: the transform does not fit the caches, or q has been through one.
    """
    k_cache, v_cache = caches
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q_shift is not None:
        raise ValueError("q_shift: got a tensor together with transform, which makes it; want one of them")
    forms = check_formats(kv_format)
    check_layout(layout)
    for name, cache, form in zip(("k_cache", "v_cache"), caches, forms, strict=True):
        check_cache(name, cache, form, "[num_pages or batch, ..., row]")
    check_query(q, forms)
    transform.validate(
        k_cache.shape[1 if layout == "HND" else 2], q.shape[3], head_dim_of_row(forms[1], v_cache.shape[3])
    )
    if transform.device not in (None, q.device):
        raise ValueError(f"transform: got one on {transform.device}, want it on {q.device}, where q is")
    shift = transform.shift(q) if sees_shift else None
    return transform.queries(q), shift


def restore(transform: CacheTransform, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result over V of one over the transformed V, in ``out`` if there is one."""
    restored = transform.restore(result)
    return restored if out is None else out.copy_(restored)


# -- the operator -----------------------------------------------------------------------------------------------------


def dispatch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str | tuple[str, str],
    softmax_scale: float | None,
    num_splits: int | None,
    return_lse: bool,
    out: torch.Tensor | None,
    options: CallOptions | None = None,
) -> tuple[torch.Tensor, Any]:
    """Decode attention through the registered operator: (out, lse, asked for or not)."""
    formats = format_pair(kv_format)
    given = flattened(options or {}) | {"softmax_scale": softmax_scale, "num_splits": num_splits}
    result, lse = _operator(q, k_cache, v_cache, seq_lens, *formats, **given)
    if out is None:
        return result, lse
    check_out(out, q, result.shape[3])
    return out.copy_(result), lse


def _on_cpu(q, k_cache, v_cache, seq_lens, k_format, v_format, *, softmax_scale=None, num_splits=None, **options):
    formats = k_format, v_format
    given = complete_options(restored(options))
    return reference(q, k_cache, v_cache, seq_lens, formats, softmax_scale, num_splits, True, None, given)


def _on_cuda(q, k_cache, v_cache, seq_lens, k_format, v_format, *, softmax_scale=None, num_splits=None, **options):
    formats = k_format if k_format == v_format else (k_format, v_format)
    given = complete_options(restored(options))
    return launch(q, k_cache, v_cache, seq_lens, formats, softmax_scale, num_splits, True, None, given)


def _on_meta(q, k_cache, v_cache, seq_lens, k_format, v_format, **options):
    v_head_dim = head_dim_of_row(format_of(v_format), v_cache.shape[3])
    return q.new_empty((*q.shape[:3], v_head_dim)), q.new_empty(q.shape[:3], dtype=torch.float32)


_operator = Operator(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, str k_format, str v_format, *, "
    "float? softmax_scale=None, int? num_splits=None, Tensor? block_table=None, str cache_layout='NHD', "
    "Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, int? window_size=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? attn_bias=None, Tensor? q_shift=None, "
    "Tensor? k_tail=None, Tensor? tail_slots=None, "
    "str score_names='', Tensor[]? score_tensors=None) -> (Tensor, Tensor)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    meta=_on_meta,
)


def are_plain(values: Iterable[Any]) -> bool:
    """Whether no optional argument is a tensor of a class that only an operator can take."""
    return not any(type(value) not in _PLAIN and isinstance(value, torch.Tensor) for value in values)


def path_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    options: CallOptions | None,
) -> Callable[..., Any]:
    """Which of :func:`launch`, :func:`reference` and :func:`dispatch` serves a call; they are called alike.

    The operator is for calls that are being traced and for tensors that are not plain ones. Raises TypeError for an
    argument that is no tensor at all.
    """
    if is_compiling():
        return dispatch
    if type(q) is type(k_cache) is type(v_cache) is type(seq_lens) is torch.Tensor:
        if options is not None and not are_plain((*options.values(), *(options.get("score_options") or {}).values())):
            check_given_tensors(options)
            return dispatch
        if not (q.is_cuda or q.is_cpu):
            check_together(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
            return dispatch
        return launch if q.is_cuda or GPU.takes_cpu else reference
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    return dispatch
