"""Calling the kernel: plan and launch in eager mode; the registered operator under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from cute_kernels import arguments
from cute_kernels.arguments import check_optional_count, check_optional_positive, needs_dispatch
from cute_kernels.attention.extend_call import (
    MAX_ROWS,
    ExtendCall,
    check_device_values,
    check_out,
    make_call,
    row_stride,
    write_own,
)
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_plan import ExtendPlan, check_alignment, make_plan
from cute_kernels.attention.extend_reference import attention_of
from cute_kernels.formats.kv import format_pair
from cute_kernels.formats.scores import flattened, restored
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, launcher, on_device_of
from cute_kernels.runtime.plans import ALIGNMENT, identity

DEFAULTS: dict[str, Any] = {
    "block_table": None,
    "cache_layout": "NHD",
    "causal": True,
    "window_size": None,
    "softcap": None,
    "sinks": None,
    "alibi_slopes": None,
    "k_scale": None,
    "v_scale": None,
    "new_k": None,
    "new_v": None,
    "tree_mask": None,
    "num_splits": None,
    "sm_margin": 0,
    "unpack": None,
    "max_seq_len": None,
    "fp8_products": False,
    "score_options": None,
}
"""Complete options, in the order that every complete set of options has."""

ROWS_OF_QUERIES = ("new_k", "new_v", "tree_mask")  # options that have a row for each query


def _key(
    q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format, softmax_scale, return_lse, out, options
) -> tuple[Any, ...]:
    """What decides a plan; options: complete ones, see `DEFAULTS`. Not how many queries there are, nor how long
    requests are at most: both change from step to step, but for whether there are any."""
    if softmax_scale is not None:
        check_optional_positive("softmax_scale", softmax_scale)
    if options["max_seq_len"] is not None:
        check_optional_count("max_seq_len", options["max_seq_len"])
    return (
        q.shape[1:],
        q.shape[0] == 0,
        q.dtype,
        q.get_device(),
        q.data_ptr() % ALIGNMENT,
        row_stride(q),
        identity(k_cache),
        identity(v_cache),
        identity(seq_lens),
        identity(cu_seqlens_q),
        kv_format,
        out if out is None else out is not q,
        *[_key_of(name, value) for name, value in options.items() if name != "max_seq_len"],
    )


def _has_odd_number(
    q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format, softmax_scale, return_lse, out, options
) -> bool:
    """Whether a call may be refused for its number of queries, which no key holds."""
    if q.shape[0] * q.shape[1] > MAX_ROWS:
        return True
    return any(options[name] is not None and options[name].shape[:1] != q.shape[:1] for name in ROWS_OF_QUERIES)


def _key_of(name: str, value: object) -> Any:
    """What of an option decides a plan; not how many queries there are, which q's rows say."""
    if name == "score_options" and value:
        given = cast("Mapping[str, torch.Tensor]", value)
        return tuple((option, identity(tensor)) for option, tensor in given.items())
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, *others = identity(value)
    assert isinstance(shape, tuple)
    return (shape[1:], stride, *others) if name in ROWS_OF_QUERIES else (shape, stride, *others)


def _checked(
    q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format, softmax_scale, return_lse, out, options
) -> ExtendCall:
    """Everything that can be said of a call without waiting for the device, and in debug mode its lengths and pages."""
    call = make_call(q, k_cache, v_cache, seq_lens, cu_seqlens_q=cu_seqlens_q, kv_format=kv_format, out=out, **options)
    check_alignment(call)
    if arguments.DEBUG:
        check_device_values(call)
    return call


def _plan_of(call: ExtendCall) -> ExtendPlan | None:
    has_keys = call.new is not None or (call.base.k.cache.numel() and call.base.max_seq_len)
    return make_plan(call) if call.batch and call.q.shape[0] and has_keys else None


def _without_tokens(call: ExtendCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result without queries or without a token, which no kernel is launched for."""
    lse = torch.full(call.q.shape[:2], float("-inf"), dtype=torch.float32, device=call.q.device)
    result = torch.zeros_like(call.q)
    return result if call.out is None else write_own(call.out, result, call.cu_seqlens_q), lse


launch = launcher(_key, _checked, _plan_of, _without_tokens, _has_odd_number)
"""Extend attention on CUDA tensors: (out, lse or None)."""


def bind_config(
    config: ExtendConfig,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: str | tuple[str, str],
    out: torch.Tensor,
    return_lse: bool = False,
    **options: Any,
) -> Callable[[], tuple[torch.Tensor, Any]]:
    """A launch of a given configuration, for experiments; planned once, so that repeating it costs the launch alone."""
    complete = DEFAULTS | options
    given = (q, k_cache, v_cache, seq_lens, cu_seqlens_q, kv_format, None, return_lse, out, complete)
    call = _checked(*given)
    plan = make_plan(call, config)
    return lambda: on_device_of(plan, *given)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_format: str | tuple[str, str],
    softmax_scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, Any]:
    """Extend attention on CPU tensors: (out in q's dtype, lse fp32, asked for or not)."""
    call = make_call(
        q,
        k_cache,
        v_cache,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        kv_format=kv_format,
        softmax_scale=softmax_scale,
        out=out,
        **options,
    )
    check_device_values(call)
    result, lse = attention_of(call)
    return (result.to(q.dtype) if out is None else write_own(out, result, cu_seqlens_q)), lse


# -- the operator -----------------------------------------------------------------------------------------------------


def dispatch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_format: str | tuple[str, str],
    softmax_scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, Any]:
    """Extend attention through the registered operator: (out, lse, asked for or not)."""
    given = flattened(options) | {"softmax_scale": softmax_scale}
    result, lse = _operator(q, k_cache, v_cache, seq_lens, cu_seqlens_q, *format_pair(kv_format), **given)
    if out is None:
        return result, lse
    check_out(out, q)
    return write_own(out, result, cu_seqlens_q), lse


def _on_cpu(q, k_cache, v_cache, seq_lens, cu_seqlens_q, k_format, v_format, *, softmax_scale=None, **options):
    formats, complete = (k_format, v_format), DEFAULTS | restored(options)
    return reference(q, k_cache, v_cache, seq_lens, cu_seqlens_q, formats, softmax_scale, True, None, complete)


def _on_cuda(q, k_cache, v_cache, seq_lens, cu_seqlens_q, k_format, v_format, *, softmax_scale=None, **options):
    formats = k_format if k_format == v_format else (k_format, v_format)
    complete = DEFAULTS | restored(options)
    return launch(q, k_cache, v_cache, seq_lens, cu_seqlens_q, formats, softmax_scale, True, None, complete)


def _on_meta(q, k_cache, v_cache, seq_lens, cu_seqlens_q, k_format, v_format, **options):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


_operator = Operator(
    "extend_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor cu_seqlens_q, str k_format, "
    "str v_format, *, float? softmax_scale=None, Tensor? block_table=None, str cache_layout='NHD', bool causal=True, "
    "int? window_size=None, float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? new_k=None, Tensor? new_v=None, Tensor? tree_mask=None, int? num_splits=None, "
    "int sm_margin=0, bool? unpack=None, int? max_seq_len=None, bool fp8_products=False, "
    "str score_names='', Tensor[]? score_tensors=None) "
    "-> (Tensor, Tensor)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    meta=_on_meta,
)


def path_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    options: dict[str, Any],
) -> Any:
    """Which of :func:`launch`, :func:`reference` and :func:`dispatch` serves a call; they are called alike.

    Raises TypeError for an argument that is no tensor at all.
    """
    given = {**options, **(options["score_options"] or {})}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    needed = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    plain = {name: value.data if type(value) is torch.nn.Parameter else value for name, value in tensors.items()}
    if needs_dispatch(**needed, **plain):
        return dispatch
    return launch if q.is_cuda or GPU.takes_cpu else reference
