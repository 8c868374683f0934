"""The call of append and attention as one step: plan and launches in eager mode, and the registered operator.

Some steps are one launch (:mod:`.step_plan`), others are two: an append, then attention as its programmatic dependent.
Attention starts when all CTAs of the append have let it start. It waits for the append's end only before it reads
appended data (`RingFiller.await_append`). The append itself begins only when all earlier launches have ended, so
attention may read their results before its wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cute_kernels import arguments
from cute_kernels.arguments import (
    check_contiguous,
    check_given_tensors,
    check_optional_positive,
    check_shape,
    check_tensors,
    needs_dispatch,
    shape_of,
)
from cute_kernels.attention import ops as attention_ops
from cute_kernels.attention import plan as attention_plan
from cute_kernels.attention.call import AttentionCall, Given
from cute_kernels.attention.call import make_call as make_attention_call
from cute_kernels.attention.checks import check_out, head_dim_of_row
from cute_kernels.attention.device_values import check_device_values
from cute_kernels.attention.launches import even_bounds
from cute_kernels.attention.options import NO_OPTIONS, OF_BIAS, OF_BOTH, OF_NUMBERS
from cute_kernels.attention.reference import attention_of
from cute_kernels.attention.transformed import restore
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.formats.kv.transforms import (
    PART_NAMES,
    TRANSFORM_SCHEMA,
    check_transform,
    named_parts_of,
    transform_of,
)
from cute_kernels.formats.scores.features import WIDEST_RESTORED
from cute_kernels.kv_cache import plan as append_plan
from cute_kernels.kv_cache import step_plan
from cute_kernels.kv_cache.call import AppendCall, check_append
from cute_kernels.kv_cache.reference import append_kv_reference
from cute_kernels.kv_cache.rope import rope_of
from cute_kernels.kv_cache.step_plan import Extras, Results, Step
from cute_kernels.kv_cache.values import check_append_values
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Operator, Plan, as_kernels, launcher, new_call
from cute_kernels.runtime.plans import ALIGNMENT, identity

EXTRA_NAMES = ("position_ids", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
NO_EXTRAS: Extras = (None,) * len(EXTRA_NAMES)
NO_STEP_OPTIONS = ("q_shift", "k_tail", "tail_slots")
"""Options of append or attention that a step does not take. A step computes q_shift itself, and does not support caches
with a tail."""


def _key(step: Step) -> tuple[Any, ...]:
    """Returns the key of a step's plan. The key has every property for which attention's kernel could refuse a call:
    such a refusal would come after the append's launch. The append's compiled function checks the properties that the
    key leaves out, as `cute_kernels.runtime.operator.launcher` says.
    """
    (q, k, v, k_cache, v_cache, seq_lens, kv_format, rope, norm_eps, extras,
     softmax_scale, num_splits, _, out, options, transform) = step  # fmt: skip
    if softmax_scale is not None:
        check_optional_positive("softmax_scale", softmax_scale)
    return (
        q.shape,
        k.shape,
        v.shape,
        k_cache.shape,
        v_cache.shape,
        seq_lens.shape,
        q.dtype,
        step_plan.lie_well(q),
        k_cache.dtype,
        v_cache.dtype,
        attention_ops.strides_key(k_cache, v_cache),
        (k_cache.data_ptr() | v_cache.data_ptr()) % ALIGNMENT,
        q.get_device(),
        kv_format,
        None if rope is None else rope.text,
        norm_eps,
        num_splits,
        None if out is None else (out is not q, identity(out)),
        None if extras is None else tuple([None if x is None else identity(x) for x in extras]),
        None if options is None else attention_ops.options_key(options),
        None if transform is None else (transform.kind, step.sees_shift),
    )


def make_plan(append: AppendCall, attention: AttentionCall) -> Plan[[Step], Results]:
    """Makes the plan of a checked step that has tokens. If the step takes two launches, both are on the current stream,
    one directly after the other."""
    assert append.q is not None
    alone = step_plan.make_plan(append, attention)
    if alone is not None:
        return alone
    first = append_plan.make_plan(append, leads=True)
    second = attention_plan.decode_plan(attention, after_append=True)
    launch_append, launch_attention = first.launch, second.launch
    q_shape, of_q, of_k, of_v = attention.q.shape, append.q.shape, append.k.shape, append.v.shape
    has_extras = any(extra is not None for extra in append.extras)
    new_shift = None if append.q_shift is None else blank(q_shape[:3], torch.float32)
    restores = attention.features.restores

    def launch(step: Step) -> Results:
        (q, k, v, k_cache, v_cache, seq_lens, _, _, norm_eps, extras,
         softmax_scale, _, return_lse, out, options, transform) = step  # fmt: skip
        table = None if options is None else options["block_table"]
        more = None
        if has_extras:
            scales = (None, None) if options is None else (options["k_scale"], options["v_scale"])
            q_shift = None if new_shift is None else GPU.empty(*new_shift)
            bounds = None if q_shape[1] == 1 else even_bounds(q_shape[0], q_shape[1], q.device)
            more = (bounds, None, *(extras or NO_EXTRAS), *scales, q_shift)
            if q_shift is not None:
                options = (options or NO_OPTIONS) | {"q_shift": q_shift}
        if restores:
            options = step_plan.restoring(options, transform)
        new = (k.view(of_k), v.view(of_v), k_cache, v_cache)
        call = (*new, None, None, None, None, norm_eps, q.view(of_q), None, seq_lens, table, transform)
        rotated = launch_append((call, more))
        assert rotated is not None
        q = rotated.view(q_shape)
        values = q, k_cache, v_cache, seq_lens, "", softmax_scale, None, return_lse, out, options, None
        result, lse = launch_attention(new_call(Given, values))
        if transform is not None and transform.changes_values and not restores:
            result = restore(transform, result, out)
        return result, lse

    return Plan(first.device_index, launch, first.products + second.products, first.holds)


# -- checks -----------------------------------------------------------------------------------------------------------


def _checked(step: Step) -> tuple[AppendCall, AttentionCall]:
    """Returns a step's two calls, append and attention, after all checks that need not wait for the device. In debug
    mode it also checks lengths and pages."""
    append, attention = make_calls(step)
    append_plan.check_alignment(append, leads=True)
    attention_plan.check_alignment(attention)
    if arguments.DEBUG:
        _check_values(append, attention)
    return append, attention


def _plan_of(calls: tuple[AppendCall, AttentionCall]) -> Plan[[Step], Results] | None:
    append, attention = calls
    has_tokens = attention.k.cache.numel() and attention.max_seq_len and attention.batch
    return make_plan(append, attention) if has_tokens else None


launch = launcher(_key, _checked, _plan_of, lambda calls: attention_ops.without_tokens(calls[1]))
"""Runs a step on CUDA tensors; returns (out, lse or None)."""


def make_calls(step: Step) -> tuple[AppendCall, AttentionCall]:
    """Returns the two calls that make up a step: append and attention. Attention's q is a stand-in with the shape and
    dtype of the append's result.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    (q, k, v, k_cache, v_cache, seq_lens, kv_format, rope, norm_eps, extras, _, num_splits, _, out, options,
     transform) = step  # fmt: skip
    check_tensors(q=q, k=k, v=v)
    more: dict[str, torch.Tensor | None] = dict(zip(EXTRA_NAMES, extras or NO_EXTRAS, strict=True))
    if isinstance(out, torch.Tensor):
        arguments.check_apart("out", out, {"q": q, "k": k, "v": v, **more})
    complete: Any = options or NO_OPTIONS
    check_transform("transform", transform)
    if step.sees_shift:
        q_shift = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        complete = complete | {"q_shift": q_shift}
    attention = make_attention_call(
        q=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        k_cache=k_cache,
        v_cache=v_cache,
        seq_lens=seq_lens,
        kv_format=kv_format,
        num_splits=num_splits,
        out=out,
        **complete,
    )
    if transform is not None and transform.v_rotation <= WIDEST_RESTORED:
        has_factor = transform.v_factor is not None
        attention = replace(attention, v_rotation=transform.v_rotation, v_factor=has_factor)
    batch, q_len = q.shape[:2]
    position_ids = more["position_ids"]
    if isinstance(position_ids, torch.Tensor):
        check_tensors(position_ids=position_ids)
        check_shape("position_ids", position_ids, batch, q_len, why=", tokens of q")
        check_contiguous("position_ids", position_ids)
        more["position_ids"] = position_ids.view(-1)
    k_format, v_format = format_pair(kv_format)
    append = AppendCall(
        k=_as_tokens("k", k, q.shape),
        v=_as_tokens("v", v, q.shape),
        k_cache=k_cache,
        v_cache=v_cache,
        k_format=k_format,
        v_format=v_format,
        rope=rope,
        norm_eps=norm_eps,
        q=_as_tokens("q", q, q.shape),
        seq_lens=seq_lens,
        cu_seqlens=even_bounds(batch, q_len, q.device) if q_len > 1 else None,
        transform=transform,
        q_shift=None if complete["q_shift"] is None else complete["q_shift"].flatten(0, 1),
        **more,
        **{name: complete[name] for name in ("cache_layout", "block_table", "k_scale", "v_scale")},
    )
    check_append(append)
    return append, attention


def _as_tokens(name: str, x: torch.Tensor, q_shape: torch.Size) -> torch.Tensor:
    """Returns x [batch, q_len, heads, head_dim] as a view [tokens, heads, head_dim]."""
    check_shape(name, x, *q_shape[:2], "heads", "head_dim", why=", the tokens of q")
    try:
        return x.view(x.shape[0] * x.shape[1], *x.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: got strides {x.stride()} for shape {shape_of(x)}, want tokens evenly spaced: "
            f"{x.shape[1] * x.stride(1)} from one request to the next"
        ) from None


def _check_values(append: AppendCall, attention: AttentionCall) -> None:
    check_append_values(append, may_be_shorter=True)
    check_device_values(attention)


# -- other ways in ----------------------------------------------------------------------------------------------------


@as_kernels
def reference(step: Step) -> tuple[torch.Tensor, Any]:
    """Computes a step on CPU tensors. Returns (out in q's dtype, lse in fp32, even without ``return_lse``)."""
    softmax_scale, out = step.softmax_scale, step.out
    check_optional_positive("softmax_scale", softmax_scale)
    append, attention = make_calls(step)
    _check_values(append, attention)
    rotated = append_kv_reference(append)
    assert rotated is not None
    rotated = rotated.to(step.q.dtype)
    scale = attention.softmax_scale if softmax_scale is None else float(softmax_scale)
    result, lse = attention_of(replace(attention, q=rotated.view(attention.q.shape), softmax_scale=scale))
    if step.transform is not None:
        result = step.transform.restore(result)
    return (result.to(rotated.dtype) if out is None else out.copy_(result)), lse


def dispatch(step: Step) -> tuple[torch.Tensor, Any]:
    """Calls the registered operator. Returns (out, lse), even without ``return_lse``."""
    out = step.out
    if out is not None:
        check_out(out, step.q, step.v.shape[3])  # before anything is appended
    result, lse = _operator(
        *step.tensors.values(),
        *format_pair(step.kv_format),
        None if step.rope is None else step.rope.text,
        step.norm_eps,
        *(step.extras or NO_EXTRAS),
        softmax_scale=step.softmax_scale,
        num_splits=step.num_splits,
        **{name: given for name, given in (step.options or {}).items() if name not in NO_STEP_OPTIONS},
        **named_parts_of(step.transform),
    )
    return (result if out is None else out.copy_(result)), lse


def _implementation(path: Callable[[Step], tuple[torch.Tensor, Any]]) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Makes the operator's implementation for one device from :func:`launch` or :func:`reference`."""

    def run(
        q, k, v, k_cache, v_cache, seq_lens, k_format, v_format, rope, norm_eps, *extras,
        softmax_scale=None, num_splits=None, **options,
    ):  # fmt: skip
        formats = k_format if k_format == v_format else (k_format, v_format)
        made = None if rope is None else rope_of(rope)
        given = None if all(extra is None for extra in extras) else extras
        transform = transform_of(**{name: options.pop(name) for name in PART_NAMES if name in options})
        complete = {**NO_OPTIONS, **options} if options else None
        numbers = (softmax_scale, num_splits, True, None, complete, transform)
        return path(Step(q, k, v, k_cache, v_cache, seq_lens, formats, made, norm_eps, given, *numbers))

    return run


def _on_meta(q, k, v, k_cache, v_cache, seq_lens, k_format, v_format, *others, **options):
    v_head_dim = head_dim_of_row(format_of(v_format), v_cache.shape[3])
    return q.new_empty((*q.shape[:3], v_head_dim)), q.new_empty(q.shape[:3], dtype=torch.float32)


_operator = Operator(
    "append_and_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seq_lens, "
    "str k_format, str v_format, str? rope, float norm_eps, Tensor? position_ids, Tensor? q_bias, Tensor? k_bias, "
    f"Tensor? v_bias, Tensor? q_norm, Tensor? k_norm, *, {OF_NUMBERS}, {OF_BOTH}, {OF_BIAS}, {TRANSFORM_SCHEMA}) "
    "-> (Tensor, Tensor)",
    cpu=_implementation(reference),
    cuda=_implementation(launch),
    meta=_on_meta,
)


def path_of(step: Step) -> Callable[[Step], tuple[torch.Tensor, Any]]:
    """Returns the function that runs a step: :func:`launch`, :func:`reference` or :func:`dispatch`.

    Traced calls and tensor subclasses go through the registered operator. Raises TypeError for an argument that is no
    tensor.
    """
    if needs_dispatch(**step.tensors):
        return dispatch
    are_plain, options = attention_ops.are_plain, step.options
    if are_plain(step.extras or ()) and (options is None or are_plain(options.values())):
        return launch if step.q.is_cuda or GPU.takes_cpu else reference
    check_given_tensors(dict(zip(EXTRA_NAMES, step.extras or NO_EXTRAS, strict=True)) | dict(options or {}))
    return dispatch
