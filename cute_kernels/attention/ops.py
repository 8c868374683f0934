"""Calling the kernel: schedule, workspace and launch in eager mode; the registered operator under torch.compile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.compiler import is_compiling

from cute_kernels.attention.call import NO_OPTIONS, AttentionCall, CallOptions, check_device_values, make_call
from cute_kernels.attention.checks import (
    Q_DTYPES,
    check_out,
    check_positive,
    check_tensors,
    format_pair,
    head_dim_of_row,
)
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.config import KEEP_PARTIALS, WRITE_LSE, DecodeConfig
from cute_kernels.attention.reference import attention_of
from cute_kernels.attention.schedule import Problem, Schedule, head_blocks, make_schedule
from cute_kernels.kv_formats import ByteFormat, format_of
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.workspace import EMPTY, POOL

# Read once: looking at the environment would cost a call 0.7 us.
DEBUG = os.environ.get("CUTE_KERNELS_DEBUG", "") not in ("", "0")
_BYTES = 16  # alignment of bulk copies and tensor maps
_MAX_PLANS = 4096  # a cache that grows by a token a step makes a plan a step
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # of optional arguments: sinks often are parameters
_PLAIN = _PLAIN_TENSORS | {type(None), str, bool, int, float}


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that does not change between calls of the same shape."""

    function: Callable[..., Any]
    schedule: Schedule
    device_index: int
    softmax_scale: float
    num_words: int  # of workspace, 0 if there is nothing to combine


_plans: dict[tuple[Any, ...], Plan] = {}


def launch(
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
    """Decode attention on CUDA tensors: (out, lse or None). ``options`` is None for a call that uses none.

    A call's schedule is kept by what decides it. The checks that a repeated call has passed before are left to the
    compiled function, which compares every tensor's shape, strides, dtype, alignment and device with what it was
    compiled for, in native code, before it launches; when it refuses, the checks here say why in the caller's terms.
    """
    offset = (k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES
    # The cache's dtypes, because signed bytes would pass for unsigned ones.
    key = (
        q.shape,
        k_cache.shape,
        q.dtype,
        k_cache.dtype,
        v_cache.dtype,
        q.get_device(),
        kv_format,
        num_splits,
        offset,
        None if options is None else options_key(options),
    )
    try:
        plan = _plans.get(key)
    except TypeError:  # something unhashable, which no argument may be: the checks say which
        plan = None
    if softmax_scale is not None:
        check_positive("softmax_scale", softmax_scale)
    if plan is None or DEBUG:
        call = _checked(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out, options)
        if plan is None:
            refuse_missing(call)
            if not k_cache.numel():
                return _without_tokens(q, out)
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            plan = _plans[key] = _make_plan(q, k_cache, call.k.form.name, num_splits, not offset)
    result = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    scale = plan.softmax_scale if softmax_scale is None else softmax_scale
    try:
        _run(plan, q, k_cache, v_cache, seq_lens, result, lse, scale)
    except (TypeError, ValueError, RuntimeError):
        refuse_missing(_checked(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out, options))
        raise
    return result, lse


def options_key(options: CallOptions) -> tuple[Any, ...]:
    """What of complete options (see `NO_OPTIONS`) decides a plan: of tensors everything but their place and contents,
    of the others the value.

    Not every part needs a plan of its own; together they are all that the checks of a repeated call would look at.
    """
    values: list[Any] = list(options.values())
    for index, value in enumerate(values):
        if type(value) in _PLAIN_TENSORS:
            values[index] = value.shape, value.stride(), value.dtype, value.get_device()
    return tuple(values)


def refuse_missing(call: AttentionCall) -> None:
    """Raises NotImplementedError naming what of a call the kernels cannot do yet."""
    features = call.features
    missing = [name for name in ("causal", "window", "soft_cap", "sinks", "alibi") if getattr(features, name)]
    wanted = {
        f"q_len {call.q_len}": call.q_len > 1,
        f"bias in {features.bias}": features.bias is not None,
        "block_table": features.paged,
        "cache_layout 'HND'": features.head_major,
        f"kv_format {(call.k.form.name, call.v.form.name)}": call.k.form is not call.v.form,
        f"head_dim {call.head_dim}": call.head_dim not in (64, 128, 256),
        f"head_dim {call.v.head_dim} of V beside {call.head_dim} of K": call.v.head_dim != call.head_dim,
    } | {f"kv_format {form.name!r}": isinstance(form, ByteFormat) for form in (call.k.form, call.v.form)}
    missing += [name for name, is_wanted in wanted.items() if is_wanted]
    if missing:
        raise NotImplementedError(f"decode_attention on a GPU: got {', '.join(missing)}, which its kernels lack so far")


def _checked(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out, options) -> AttentionCall:
    """Everything that can be said of a call without waiting for the device, and in debug mode lengths and pages."""
    call = make_call(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, num_splits=num_splits, out=out, **(options or {})
    )
    _check_alignment(q, k_cache, v_cache, out)
    if DEBUG:
        check_device_values(call)
    return call


def _without_tokens(q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for an empty batch or an empty cache, which no kernel is launched for."""
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    return torch.zeros_like(q) if out is None else out.zero_(), lse


def _run(plan: Plan, q, k_cache, v_cache, seq_lens, out, lse: torch.Tensor | None, scale: float) -> None:
    index = plan.device_index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            _run(plan, q, k_cache, v_cache, seq_lens, out, lse, scale)
        return
    partials = 0
    if plan.num_words:
        partials = POOL.get(index, torch._C._cuda_getCurrentRawStream(index), plan.num_words)
    plan.function(
        q,
        k_cache,
        v_cache,
        seq_lens,
        out,
        lse.data_ptr() if lse is not None else 0,
        partials,
        scale,
        plan.schedule.num_splits,
        WRITE_LSE if lse is not None else 0,
    )


def _make_plan(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str, num_splits: int | None, aligned: bool) -> Plan:
    problem = problem_of(q, k_cache, kv_format, aligned)
    return _plan_of(make_schedule(problem, num_splits), problem, q.device)


def _plan_of(schedule: Schedule, problem: Problem, device: torch.device) -> Plan:
    rows = problem.batch * problem.num_q_heads * schedule.num_splits
    return Plan(
        function=load(DecodeSpec(schedule.config), arch_of(device.index)),
        schedule=schedule,
        device_index=device.index,
        softmax_scale=problem.head_dim**-0.5,
        num_words=rows * schedule.config.partial_words if schedule.num_splits > 1 else 0,
    )


def problem_of(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str, aligned: bool = True) -> Problem:
    """What the schedule needs to know of a call."""
    request_bytes = k_cache[0].numel() * k_cache.element_size() if k_cache.shape[0] else 0
    return Problem(
        batch=q.shape[0],
        max_seq_len=k_cache.shape[1],
        num_q_heads=q.shape[2],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[3],
        kv_format=kv_format,
        q_dtype=Q_DTYPES[q.dtype],
        aligned=aligned and request_bytes % _BYTES == 0,
        num_sms=_num_sms(q.device),
    )


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_alignment(q, k_cache, v_cache, out) -> None:
    tensors = {"q": q} if out is None else {"q": q, "out": out}
    if k_cache.dtype != torch.uint8:
        tensors |= {"k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in tensors.items():
        if tensor.data_ptr() % _BYTES:
            raise ValueError(
                f"{name}: got a tensor that starts {tensor.data_ptr() % _BYTES} bytes past a multiple of {_BYTES}, "
                f"want it aligned to {_BYTES} bytes"
            )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.data_ptr() % 4:
            raise ValueError(f"{name}: got a tensor that does not start on a multiple of 4 bytes, want it to")


# -- other ways in ----------------------------------------------------------------------------------------------------


def schedule_for(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str) -> Schedule:
    """The configuration and splits that a call with these tensors uses."""
    return make_schedule(problem_of(q, k_cache, kv_format))


def bind_config(
    config: DecodeConfig,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    num_splits: int | None = None,
) -> Callable[[], torch.Tensor]:
    """A launch of a given configuration, for experiments; planned once, so that repeating it costs the launch alone.

    The splits are those that the schedule chooses for these tensors unless given. The tensors are taken to be right.
    """
    problem = problem_of(q, k_cache, config.kv_format)
    splits = make_schedule(problem).num_splits if num_splits is None else num_splits
    plan = _plan_of(Schedule(config, splits, head_blocks(problem, config)), problem, q.device)

    def call() -> torch.Tensor:
        _run(plan, q, k_cache, v_cache, seq_lens, out, None, plan.softmax_scale)
        return out

    return call


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
    check_positive("softmax_scale", softmax_scale)
    refuse_missing(_checked(q, k_cache, v_cache, seq_lens, kv_format, num_splits, None, None))
    batch, _, heads, head_dim = q.shape
    if not k_cache.numel():
        split_out = torch.zeros((batch, num_splits, heads, head_dim), dtype=torch.float32, device=q.device)
        split_sum = torch.zeros_like(split_out[..., 0])
        return torch.zeros_like(q), split_out, torch.full_like(split_sum, float("-inf")), split_sum
    aligned = not (k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES
    plan = _make_plan(q, k_cache, kv_format, num_splits, aligned)
    out = torch.empty_like(q)
    words = torch.full(
        (batch, heads, num_splits, plan.schedule.config.partial_words), EMPTY, dtype=torch.int32, device=q.device
    )
    scale = plan.softmax_scale if softmax_scale is None else softmax_scale
    with torch.cuda.device(q.device):
        plan.function(
            q,
            k_cache,
            v_cache,
            seq_lens,
            out,
            0,
            words.data_ptr(),
            scale,
            num_splits,
            KEEP_PARTIALS,
        )
    empty = words[..., head_dim] == EMPTY  # splits without tokens
    values = words.view(torch.float32)
    partial = values[..., :head_dim].masked_fill(empty.unsqueeze(-1), 0.0)
    maximum = values[..., head_dim].masked_fill(empty, float("-inf"))
    total = values[..., head_dim + 1].masked_fill(empty, 0.0)
    normalised = partial / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    ln2 = 0.6931471805599453  # the kernel's maxima are in powers of two
    return out, normalised.transpose(1, 2), (maximum * ln2).transpose(1, 2), total.transpose(1, 2)


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


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "DEF")
_library.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, str k_format, str v_format, *, "
    "float? softmax_scale=None, int? num_splits=None, Tensor? block_table=None, str cache_layout='NHD', "
    "Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, int? window=None, float? soft_cap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? bias=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    scalars = {"softmax_scale": softmax_scale, "num_splits": num_splits}
    result, lse = torch.ops.cute_kernels.decode_attention(
        q, k_cache, v_cache, seq_lens, *formats, **scalars, **(options or {})
    )
    if out is None:
        return result, lse
    check_out(out, q, result.shape[3])
    return out.copy_(result), lse


def _on_cpu(q, k_cache, v_cache, seq_lens, k_format, v_format, *, softmax_scale=None, num_splits=None, **options):
    formats = k_format, v_format
    return reference(q, k_cache, v_cache, seq_lens, formats, softmax_scale, num_splits, True, None, _complete(options))


def _on_cuda(q, k_cache, v_cache, seq_lens, k_format, v_format, *, softmax_scale=None, num_splits=None, **options):
    formats = k_format if k_format == v_format else (k_format, v_format)
    return launch(q, k_cache, v_cache, seq_lens, formats, softmax_scale, num_splits, True, None, _complete(options))


def _complete(options: dict[str, Any]) -> CallOptions | None:
    """Options as an implementation gets them: those that differ from the schema's defaults, and maybe others."""
    return cast(CallOptions, {**NO_OPTIONS, **options}) if options else None


def _on_meta(q, k_cache, v_cache, seq_lens, k_format, v_format, **options):
    v_head_dim = head_dim_of_row(format_of(v_format), v_cache.shape[3])
    return q.new_empty((*q.shape[:3], v_head_dim)), q.new_empty(q.shape[:3], dtype=torch.float32)


_library.impl("decode_attention", _on_cpu, "CPU")
_library.impl("decode_attention", _on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::decode_attention", _on_meta, lib=_library)


def path_of(q: Any, k_cache: Any, v_cache: Any, seq_lens: Any, options: CallOptions | None) -> Callable[..., Any]:
    """Which of :func:`launch`, :func:`reference` and :func:`dispatch` serves a call; they are called alike.

    The operator is for calls that are being traced and for tensors that are not plain ones. Raises TypeError for an
    argument that is no tensor at all.
    """
    if is_compiling():
        return dispatch
    if type(q) is type(k_cache) is type(v_cache) is type(seq_lens) is torch.Tensor:
        if options is not None:
            for value in options.values():
                if type(value) not in _PLAIN and isinstance(value, torch.Tensor):
                    return dispatch
        return launch if q.is_cuda else reference if q.is_cpu else dispatch
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    return dispatch
