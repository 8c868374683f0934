"""Computes appends: by plan and launch in eager mode, by the registered operator under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import needs_dispatch
from cute_kernels.formats.kv import WAITING
from cute_kernels.formats.kv.transforms import TRANSFORM_SCHEMA, parts_of, transform_of
from cute_kernels.kv_cache.call import NUM_USUAL, AppendCall, check_append
from cute_kernels.kv_cache.plan import Given, check_alignment, config_of, make_plan
from cute_kernels.kv_cache.reference import append_kv_reference
from cute_kernels.kv_cache.rope import rope_of
from cute_kernels.kv_cache.values import check_append_values
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, Plan, as_kernels, launcher
from cute_kernels.runtime.plans import identity

__all__ = ["append", "config_of", "dispatch", "launch", "reference"]


def append(call: tuple[Any, ...], extras: tuple[Any, ...] | None) -> torch.Tensor | None:
    """Appends new tokens on the device where the tensors are. Returns the rotated q, or None without q.

    call, extras: together the fields of an `AppendCall`. Making that object would take longer. extras has the fields
    from cu_seqlens on, or is None if all of them are None, as in most calls.

    Traced calls and tensor subclasses go through the registered operator. Raises TypeError for an argument that is no
    tensor.
    """
    k, v, k_cache, v_cache = call[:4]
    if type(k) is type(v) is type(k_cache) is type(v_cache) is torch.Tensor and not is_compiling():
        if k.is_cuda or GPU.takes_cpu:
            return launch((call, extras))
    path = dispatch if needs_dispatch(k=k, v=v, k_cache=k_cache, v_cache=v_cache) else reference
    return path(AppendCall(*call, *(extras or ())))


def _key(given: Given) -> tuple[Any, ...]:
    """Returns the key of a call's plan. The key has only two shapes: those of v and of K's cache. The compiled function
    checks all other shapes: k has v's tokens and heads, V's cache has K's pages, and rows fit their head_dim.
    """
    (k, v, k_cache, v_cache, k_format, v_format, layout, rope, norm_eps, q, q_out, seq_lens, block_table,
     transform), extras = given  # fmt: skip
    return (
        v.shape,
        v_cache.shape if k_format == WAITING.name else k_cache.shape,
        k.dtype,
        k_cache.dtype,
        v_cache.dtype,
        k.get_device(),
        q_out if q is None else q.shape,  # without q nothing, or what the checks refuse
        None if seq_lens is None else seq_lens.shape,
        None if block_table is None else block_table.shape,
        k_format,
        v_format,
        layout,
        k_cache is not v_cache,
        None if rope is None else rope.text,
        norm_eps,
        None if transform is None else transform.kind,
        extras and tuple([None if tensor is None else identity(tensor) for tensor in extras]),
    )


def _checked(given: Given) -> AppendCall:
    """Makes the `AppendCall` of ``given``, after all checks that need not wait for the device. In debug mode it also
    checks lengths and pages."""
    call, extras = given
    checked = AppendCall(*call, *(extras or ()))
    check_append(checked)
    check_alignment(checked)
    if arguments.DEBUG:
        check_append_values(checked)
    return checked


def _plan_of(call: AppendCall) -> Plan[[Given], torch.Tensor | None] | None:
    return make_plan(call) if call.has_places else None


def _without_tokens(call: AppendCall) -> torch.Tensor | None:
    return None if call.q is None else torch.empty_like(call.q) if call.q_out is None else call.q_out


launch = launcher(_key, _checked, _plan_of, _without_tokens)
"""Appends on CUDA tensors. Returns the rotated q, or None without q. Takes one argument, the pair (call, extras) of
:func:`append`."""


@as_kernels
def reference(call: AppendCall) -> torch.Tensor | None:
    """Checks a call, values included, and computes it in plain PyTorch. Returns the rotated q in q's dtype, or None
    without q."""
    check_append(call)
    check_append_values(call)
    q = append_kv_reference(call) if call.has_places else None
    if q is None or call.q is None:
        return _without_tokens(call)
    return q.to(call.q.dtype) if call.q_out is None else call.q_out.copy_(q)


# -- the operator -----------------------------------------------------------------------------------------------------


def _call_of(*arguments: Any) -> AppendCall:
    """Returns the call that the operator's arguments stand for.

    The operator's arguments differ from a call in four ways: there is no q_out, ``rope`` is a text, the transform comes
    in parts, and last arguments that were not given are missing.
    """
    rope = None if arguments[7] is None else rope_of(arguments[7])
    extras, q_shift, parts = arguments[12:22], (*arguments[22:23], None)[0], arguments[23:]
    usual = (*arguments[:7], rope, *arguments[8:10], None, *arguments[10:12], transform_of(*parts))
    return AppendCall._make((*usual, *extras, q_shift))


def _result(call: AppendCall, q_out: torch.Tensor | None) -> torch.Tensor:
    return call.k.new_empty(0) if q_out is None else q_out


def _on_cpu(*arguments: Any) -> torch.Tensor:
    call = _call_of(*arguments)
    return _result(call, reference(call))


def _on_cuda(*arguments: Any) -> torch.Tensor:
    call = _call_of(*arguments)
    return _result(call, launch((call[:NUM_USUAL], call.extras)))


def _on_meta(k, v, k_cache, v_cache, k_format, v_format, cache_layout, rope, norm_eps, q, *others):
    return k.new_empty(0) if q is None else q.new_empty(q.shape)


_operator = Operator(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, str k_format, str v_format, "
    "str cache_layout, str? rope, float norm_eps, Tensor? q, Tensor? seq_lens, Tensor? block_table, "
    "Tensor? cu_seqlens, Tensor? slot_mapping, Tensor? position_ids, Tensor? q_bias, Tensor? k_bias, Tensor? v_bias, "
    "Tensor? q_norm, Tensor? k_norm, Tensor? k_scale, Tensor? v_scale, Tensor(c!)? q_shift=None, "
    f"{TRANSFORM_SCHEMA}) -> Tensor",
    cpu=_on_cpu,
    cuda=_on_cuda,
    meta=_on_meta,
)


def dispatch(call: AppendCall) -> torch.Tensor | None:
    """Calls the registered operator, and copies its result to q_out."""
    rope = None if call.rope is None else call.rope.text
    parts = parts_of(call.transform)
    result = _operator(*call[:7], rope, *call[8:10], *call[11:13], *call.extras, *parts)
    if call.q is None:
        return None
    return result if call.q_out is None else call.q_out.copy_(result)
